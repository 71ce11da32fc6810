"""speculators' EAGLE-3 with the defaults of its trainer: windows, norms, several layers, biases.

Source: speculators 0.9, `models/eagle3/core.py`, `config.py` and `train/config/schema.py`. The
trainer norms before the residual, before fc and its own output, and every layer has a window of
2048. The config is what its class saves; layer ids are inputs of blocks, collected in ascending
order.
"""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD, H, V
from tests.spec_train.formats.tools import same_weights

WINDOW = 4
LAYER: dict[str, Any] = tiny.OF_TRANSFORMERS_5 | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "mlp_bias": False,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": None,
    "pretraining_tp": 1,
    "tie_word_embeddings": False,
    "transformers_version": "5.12.0",
}
CONFIG: dict[str, Any] = {
    "architectures": ["Eagle3DraftModel"],
    "auto_map": {"": "config.Eagle3SpeculatorConfig"},
    "draft_vocab_size": VD,
    "dtype": "float64",
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
    "embed_requires_grad": False,
    "fc_norm": False,
    "norm_before_fc": False,
    "norm_before_residual": False,
    "norm_output": False,
    "speculators_config": tiny.speculators_config("eagle3", 5, "LlamaForCausalLM"),
    "speculators_model_type": "eagle3",
    "speculators_version": "0.9.0",
    "target_hidden_size": None,
    "tie_word_embeddings": False,
    "transformers_version": "5.12.0",
}
TRAINED = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
QWEN3 = {"model_type": "qwen3", "max_window_layers": 28}


def sliding(layers: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "layer_types": ["sliding_attention"] * layers,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    }


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the trainer's defaults": (TRAINED, sliding(1)),
    "three layers": (TRAINED, sliding(3)),
    "without windows": ({"norm_before_residual": True}, {}),
    "no switch at all": ({}, {}),
    "fc_norm": ({"fc_norm": True, "norm_output": True}, {}),
    "qwen3": (TRAINED, QWEN3 | sliding(2)),
    "biases": ({}, {"attention_bias": True, "mlp_bias": True}),
    "gelu": ({}, {"hidden_act": "gelu_pytorch_tanh"}),
    "full vocabulary": (TRAINED | {"draft_vocab_size": V}, sliding(1)),
}


def published(form: str) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a form, without an embedding."""
    top, layer = FORMS[form]
    config = CONFIG | top | {"transformer_layer_config": LAYER | layer}
    size, count = config["draft_vocab_size"], layer.get("num_hidden_layers", 1)
    qk_norm = layer.get("model_type") == "qwen3"
    tensors = tiny.eagle3_tensors("layers.0.", size=size, qk_norm=qk_norm)
    for i in range(1, count):
        tensors |= tiny.layer_tensors(f"layers.{i}.", qk_norm=qk_norm)
        tensors[f"layers.{i}.input_layernorm.weight"] = tiny.gain(H)
    if config["norm_before_fc"]:
        tensors["input_norm.weight"] = tiny.gain(3 * H)
    if config["fc_norm"]:
        tensors |= {f"fc_norm.{i}.weight": tiny.gain(H) for i in range(3)}
    if layer.get("attention_bias"):
        for name in [n for n in tensors if "_proj" in n]:
            tensors[name.replace("weight", "bias")] = torch.randn(len(tensors[name])).double()
    if size < V:
        tensors |= tiny.maps(tiny.some_ids())
    return config, tensors


def as_defined(folder: Path, config: dict[str, Any], tensors: Any, facts: Any, **how: Any) -> Any:
    layer = config["transformer_layer_config"]
    given = {name: config.get(name, True) for name in ("norm_before_residual", "norm_output")}
    given |= {"window": layer.get("sliding_window"), "act": layer["hidden_act"]}
    return tiny.eagle3_as_defined(folder, config, tensors, facts, **given | how)


@pytest.mark.parametrize("form", FORMS)
def test_eagle3_has_the_logits_of_its_own_class(tmp_path, form):
    torch.manual_seed(51)
    facts = tiny.target()
    config, tensors = published(form)
    draft = as_defined(tmp_path, config, tensors, facts)
    assert draft.config.layers == (1, 5, 8) and draft.options.ttt_steps == 5


@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_can_be_written_for_vllm(tmp_path, form):
    torch.manual_seed(52)
    facts = tiny.target()
    config, tensors = published(form)
    tensors["embed_tokens.weight"] = facts.embedding.clone()
    folder = tiny.write(tmp_path / "draft", config, tensors)
    # vLLM, which reads the speculators form, serves silu only
    for written in ("hf",) if form == "gelu" else ("speculators", "hf"):
        out = tmp_path / written
        given = {"target": None} if written == "hf" else {"target": "Some/Target"}
        spec_train.export(draft=str(folder), format=written, out=str(out), **given)
        old, new = load_draft(folder), load_draft(out)
        assert old.config == new.config and old.options == new.options
        assert same_weights(old, new)
        found = spec_train.export(draft=str(out)).findings["spec-train"]
        assert not [f.text for f in found if "keys that engines read" in f.text]


def test_a_trained_embedding_is_the_drafts_own(tmp_path):
    torch.manual_seed(53)
    facts = tiny.target()
    config, tensors = published("no switch at all")
    own = facts.embedding + tiny.noise(V, H)
    tensors["embed_tokens.weight"] = own
    for stated in (True, False):  # a file may leave the key at its default
        said = config | {"embed_requires_grad": stated}
        draft = as_defined(tmp_path / str(stated), said, tensors, facts, embedding=own)
        assert draft.config.train_embeddings
    other = tiny.write(
        tmp_path / "other", config, tensors | {"embed_tokens.weight": tiny.noise(V, H)}
    )
    assert not load_draft(other, facts).config.train_embeddings  # of another target: refused later


def test_ids_in_another_order_mean_the_same_states(tmp_path):
    """vLLM, which computes the states, passes them in ascending order."""
    torch.manual_seed(54)
    facts = tiny.target()
    config, tensors = published("no switch at all")
    config |= {"eagle_aux_hidden_state_layer_ids": [9, 2, 6]}
    assert as_defined(tmp_path, config, tensors, facts).config.layers == (1, 5, 8)


def test_a_missing_norm_before_residual_is_what_vllm_serves(tmp_path, caplog):
    torch.manual_seed(55)
    facts = tiny.target()
    config, tensors = published("no switch at all")
    del config["norm_before_residual"]
    with caplog.at_level(logging.WARNING):
        as_defined(tmp_path, config, tensors, facts)
    assert "warning[assumed]" in caplog.text
    assert "no norm_before_residual; it is read as true" in caplog.text


def test_layers_that_the_file_lacks_are_refused(tmp_path):
    config, tensors = published("three layers")
    tensors = {name: value for name, value in tensors.items() if "layers.2." not in name}
    folder = tiny.write(tmp_path / "draft", config, tensors)
    with pytest.raises(DraftError, match=r"num_hidden_layers = 3, but .* has 2 layers"):
        load_draft(folder, tiny.target())
