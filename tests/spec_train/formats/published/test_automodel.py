"""NVIDIA AutoModel's EAGLE-1/2, 3 and 3.1: a copy of the target's config, names with `model.`.

Source: AutoModel 0.7, `components/speculative/eagle/draft_llama.py` (EAGLE-3) and
`draft_llama_v12.py` (EAGLE-1/2), and the recipes `train_eagle3.py` and `train_eagle1.py`. Its
EAGLE-1/2 norms the first layer's input and the prediction. `num_hidden_layers`, windows and layer
types are the target's: its class reads none of them, has one layer, and takes the outputs of blocks
1, L/2-1 and L-4 if not told otherwise.
"""

from typing import Any

import pytest
import torch

import spec_train
from spec_train.drafts.unroll import Unroll
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD, H, L, V

TARGET: dict[str, Any] = tiny.PLAIN | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "num_hidden_layers": L,
    "transformers_version": "5.3.0",
    "rope_parameters": {"rope_type": "default", "rope_theta": tiny.THETA},
    "dtype": "float64",
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "mlp_bias": False, "pretraining_tp": 1},
    "qwen3": {
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * L,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
    },
    "gpt-oss": {  # its windows and experts are the target's
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"] * (L // 2),
        "sliding_window": 3,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "router_aux_loss_coef": 0.9,
    },
}
DRAFT = {
    "architectures": ["LlamaEagle3DraftModel"],
    "draft_vocab_size": VD,
    "target_hidden_size": H,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
    "fc_norm": False,
    "norm_output": False,
    "parallel_drafting": False,
}


def in_its_form(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    top = ("lm_head.weight", "d2t", "t2d")
    return {name if name in top else f"model.{name}": value for name, value in tensors.items()}


@pytest.mark.parametrize("form", ["EAGLE-3", "EAGLE-3.1", "full vocabulary", "with biases"])
@pytest.mark.parametrize("name", TARGETS)
def test_eagle3_has_the_logits_of_its_own_class(tmp_path, name, form, caplog):
    torch.manual_seed(31)
    facts = tiny.target()
    ids = torch.arange(V) if form == "full vocabulary" else tiny.some_ids("by frequency")
    new, config = form == "EAGLE-3.1", TARGET | TARGETS[name] | DRAFT
    tensors = tiny.eagle3_tensors("layers.0.", size=len(ids))
    tensors["embed_tokens.weight"] = facts.embedding.clone()
    if new:
        tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
        config |= {"fc_norm": True, "norm_output": True}
    if form == "with biases":
        config |= {"attention_bias": True, "mlp_bias": True}
        parts = [n for n in tensors if n.startswith("layers.") and "proj" in n]
        for part in parts:
            rows = tensors[part].shape[0]
            tensors[part.replace("weight", "bias")] = torch.randn(rows).double()
    if form == "full vocabulary":
        config["draft_vocab_size"] = V
    else:
        tensors |= tiny.maps(ids)
    how = {"tensors": tensors, "ids": ids, "norm_output": new}
    draft = tiny.eagle3_as_defined(tmp_path, config, in_its_form(tensors), facts, **how)
    assert draft.config.layers == (1, L // 2 - 1, L - 4)
    assert "warning[assumed]" in caplog.text and "AutoModel writes no layer ids" in caplog.text
    assert draft.config.layer_types == () and draft.config.sliding_window is None


def trained_states(draft: Any, tokens: list[int], states: torch.Tensor) -> torch.Tensor:
    """Step 0 of the training forward."""
    rows, document = torch.arange(len(tokens))[None], torch.zeros(1, len(tokens), dtype=torch.long)
    with torch.no_grad():
        known = torch.tensor([tokens])
        return Unroll(draft, states[None], known, document, rows).advance(known)[0]


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("name", TARGETS)
def test_eagle1_predicts_the_states_of_its_own_class(tmp_path, name, blocks):
    torch.manual_seed(32)
    facts = tiny.target()
    tensors = tiny.eagle_tensors(blocks, first_norm=True) | {"norm.weight": tiny.gain(H)}
    tensors["embed_tokens.weight"] = facts.embedding.clone()
    own = {"architectures": ["LlamaEagleDraftModel"], "draft_num_hidden_layers": blocks}
    config = TARGET | TARGETS[name] | own | {"hidden_act": "gelu"}  # its MLP is always SiLU
    tokens, states = tiny.rows_of(states=1)
    folder = tiny.write(tmp_path / "draft", config, tensors)
    draft, found = tiny.served_states(folder, facts, tokens, states)
    assert draft.name == "eagle" and draft.config.num_hidden_layers == blocks
    want = tiny.eagle_states(tensors, tokens, states, facts.embedding)
    tiny.assert_same(found, want)
    tiny.assert_same(trained_states(draft, tokens, states), want)  # what a fit goes on from
    engines = spec_train.export(draft=str(folder)).findings
    for engine in ("vllm", "sglang"):  # none has these norms
        assert [f.level for f in engines[engine]].count("refuse") == 2
