"""DeepSpec's EAGLE-3: Qwen3's layer with norms of queries and keys, five states, full copies.

Source: DeepSpec, `modeling/eagle3/qwen3/modeling.py` and `config.py`; a fork of it has norms before
fc. The config is a copy of the target's. `target_layer_ids` are outputs of decoder blocks.
"""

from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import H, L, V
from tests.spec_train.formats.tools import same_weights

LAYERS = [1, 3, 5, 7, 9]
CONFIG: dict[str, Any] = tiny.PLAIN | {
    "architectures": ["Qwen3Eagle3Model"],
    "model_type": "qwen3",
    "max_window_layers": 36,
    "sliding_window": None,
    "use_sliding_window": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.1",
    "num_target_layers": L,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "target_model_name_or_path": "Qwen/Qwen3-8B",
    "target_layer_ids": LAYERS,
    "ttt_length": 5,
    "step_loss_decay": 0.9,
    "draft_num_hidden_layers": 1,
}


def published(facts: Any) -> dict[str, torch.Tensor]:
    tensors = tiny.eagle3_tensors("layers.0.", states=5, size=V, qk_norm=True)
    return tensors | {
        "embed_tokens.weight": facts.embedding.clone(),
        "lm_head.weight": facts.head.clone(),
    }


@pytest.mark.parametrize("form", ["as published", "a norm of each state", "with biases"])
def test_eagle3_has_the_logits_of_its_own_class(tmp_path, form):
    torch.manual_seed(41)
    facts = tiny.target()
    tensors, config = published(facts), dict(CONFIG)
    files = tensors
    if form == "a norm of each state":
        norms = {str(i): tiny.gain(H) for i in range(5)}
        files = tensors | {f"fc_norm_perslice.{i}.weight": w for i, w in norms.items()}
        tensors = tensors | {f"fc_norm.{i}.weight": w for i, w in norms.items()}
        config |= {"fc_norm": False, "fc_norm_perslice": True}
    if form == "with biases":
        config["attention_bias"] = True
        for part in ("q", "k", "v", "o"):
            name = f"layers.0.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.randn(len(tensors[f"{name}.weight"])).double()
    how = {"tensors": tensors, "states": 5}
    draft = tiny.eagle3_as_defined(tmp_path, config, files, facts, **how)
    assert draft.config.qk_norm and draft.config.layers == tuple(LAYERS)
    assert (draft.options.ttt_steps, draft.options.step_decay) == (5, 0.9)


def test_what_is_read_can_be_written_back(tmp_path):
    torch.manual_seed(42)
    facts = tiny.target()
    folder = tiny.write(tmp_path / "draft", CONFIG, published(facts))
    spec_train.export(draft=str(folder), format="deepspec", out=str(tmp_path / "out"))
    old, new = load_draft(folder), load_draft(tmp_path / "out")
    assert old.config == new.config
    assert same_weights(old, new)
    raw = tiny.read_config(tmp_path / "out")
    for name in ("architectures", "model_type", "target_layer_ids", "ttt_length", "layer_types"):
        assert raw[name] == CONFIG[name], name
    assert raw["step_loss_decay"] == 0.9 and raw["draft_num_hidden_layers"] == 1
    names = set(tiny.read_tensors(tmp_path / "out"))
    assert names == set(published(facts))


def test_layers_that_read_the_token_again_are_refused(tmp_path):
    facts = tiny.target()
    tensors = published(facts)
    again = tiny.layer_tensors("layers.1.", 2 * H, True)
    again |= {
        f"layers.1.{name}.weight": tiny.gain(H) for name in ("hidden_norm", "input_layernorm")
    }
    config = CONFIG | {"num_hidden_layers": 2, "draft_num_hidden_layers": 2}
    config["layer_types"] = ["full_attention"] * 2
    folder = tiny.write(tmp_path / "draft", config, tensors | again)
    with pytest.raises(DraftError, match=r"layers\.1\.self_attn\.q_proj\.weight reads the token"):
        load_draft(folder, facts)
