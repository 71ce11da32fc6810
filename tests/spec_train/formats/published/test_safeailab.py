"""SafeAILab's own drafts: one name for all of them, pytorch_model.bin, no layer ids.

Source: SafeAILab/EAGLE, `eagle/model/cnets1.py` (EAGLE-1/2) and `cnets.py` (EAGLE-3), the configs
in `eagle/train/` and `eagle/traineagle3/config.json`. Its loader makes a bias of `fc` unless the
config says `"bias": false`, and drafts for Qwen2 have biases of queries, keys and values
(`qkv_bias`).
"""

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD

CONFIG = {name: value for name, value in tiny.SIZES.items() if name != "head_dim"} | {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "model_type": "llama",
    "num_hidden_layers": 1,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "draft_vocab_size": VD,
}


def test_eagle3_has_the_logits_of_its_own_class(tmp_path):
    torch.manual_seed(11)
    facts, ids = tiny.target(), tiny.some_ids("by frequency")
    tensors = tiny.eagle3_tensors() | tiny.maps(ids)
    draft = tiny.eagle3_as_defined(tmp_path, CONFIG, tensors, facts, ids=ids)
    assert draft.name == "eagle3"
    assert draft.config.layers == (1, 5, 8)  # the inputs of blocks 2, L/2 and L-3


EAGLE = {name: value for name, value in CONFIG.items() if name != "draft_vocab_size"}
FORMS = {
    "with a bias of fc": {},  # no key: the loader makes one
    "without": {"bias": False},
    "Qwen2": {"bias": False, "qkv_bias": True},
    "two layers": {"bias": False, "num_hidden_layers": 2},
}


def eagle_draft(form: str, facts: object) -> dict[str, torch.Tensor]:
    tensors = tiny.eagle_tensors(2 if form == "two layers" else 1)
    tensors["embed_tokens.weight"] = facts.embedding.clone()
    if form == "with a bias of fc":
        tensors["fc.bias"] = torch.randn(tiny.H).double()
    if form == "Qwen2":
        for part in "qkv":
            name = f"layers.0.self_attn.{part}_proj"
            tensors[f"{name}.bias"] = torch.randn(len(tensors[f"{name}.weight"])).double()
    return tensors


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
@pytest.mark.parametrize("form", FORMS)
def test_eagle1_predicts_the_states_of_its_own_class(tmp_path, form, weights):
    torch.manual_seed(15)
    facts = tiny.target()
    tensors = eagle_draft(form, facts)
    tokens, states = tiny.rows_of(states=1)
    folder = tiny.write(tmp_path / "draft", EAGLE | FORMS[form], tensors, weights)
    draft, found = tiny.served_states(folder, facts, tokens, states)
    assert draft.name == "eagle"
    tiny.assert_same(found, tiny.eagle_states(tensors, tokens, states, facts.embedding))


def test_a_bias_of_fc_is_served_by_sglang_only(tmp_path):
    torch.manual_seed(16)
    facts = tiny.target()
    folder = tiny.write(tmp_path / "draft", EAGLE, eagle_draft("with a bias of fc", facts))
    found = spec_train.export(draft=str(folder)).findings
    assert "a bias of fc" in found["vllm"][0].text and found["vllm"][0].level == "refuse"
    assert "refuse" not in [finding.level for finding in found["sglang"]]
    out = tmp_path / "sglang"
    spec_train.export(draft=str(folder), format="sglang", out=str(out))
    old, new = load_draft(folder), load_draft(out)
    assert old.config == new.config and torch.equal(old.fc.bias, new.fc.bias)


def test_a_bias_that_the_file_lacks_is_refused(tmp_path):
    tensors = eagle_draft("without", tiny.target())
    folder = tiny.write(tmp_path / "draft", EAGLE | {"bias": True}, tensors)
    with pytest.raises(DraftError, match=r"bias = true, but .* has no fc\.bias"):
        load_draft(folder)
