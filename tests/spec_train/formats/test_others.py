"""P-EAGLE and EAGLE-1/2: what engines read, and drafts of other trainers."""

import pytest
import torch

import spec_train
from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.own_draft import read
from tests.spec_train.formats.published.tiny import write
from tests.spec_train.formats.tools import ENGINES, export, same_weights

dataset, head, target = any_draft.dataset, any_draft.head, own_draft.target
saved, facts = own_draft.saved, own_draft.facts


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_vllm_reads_a_peagle_draft_as_it_was_trained(saved, tmp_path, target, form):
    own = saved("peagle", layers="0,2", fc_norm=True, depths=4)
    raw, tensors = read(export(own, form, tmp_path / form, target))
    assert ENGINES["vllm"](raw, 4) == [1, 3]
    assert tensors["mask_hidden"].shape == (1, 1, 2 * 32)  # before fc
    assert raw["mask_token_id"] == 5
    seen = raw["transformer_layer_config"] if form == "speculators" else raw
    assert seen["fc_norm"] is True and seen["num_hidden_layers"] == 2
    if form == "vllm":
        assert raw["ptd_token_id"] == 5 and raw["norm_before_residual"] is False
        assert raw["architectures"] == ["Eagle3LlamaForCausalLM"]  # see formats/write.py
    else:
        assert seen["num_aux_hidden_states"] == 2
        (method,) = raw["speculators_config"]["proposal_methods"]
        assert method["speculative_tokens"] == 4


def test_a_published_peagle_draft_is_read_by_its_mask_states(saved, tmp_path):
    """It has the architecture name of an EAGLE-3, and its mask states come in several shapes."""
    own = saved("peagle")
    raw, tensors = read(own)
    raw = {k: v for k, v in raw.items() if k not in ("spec_train", "mask_token_id", "eagle_config")}
    raw["architectures"] = ["LlamaForCausalLMEagle3"]
    tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, -1)
    again = load_draft(write(tmp_path / "theirs", raw, tensors))
    assert again.name == "peagle" and again.config.mask_token_id == 5
    assert again.options.depths == 8 and same_weights(again, load_draft(own))
    del raw["ptd_token_id"]
    with pytest.raises(DraftError, match="a mask token"):
        load_draft(write(tmp_path / "maskless", raw, tensors))


def test_sglang_gets_the_bias_that_it_would_make_up(saved, tmp_path, target):
    own = saved("eagle")
    raw, tensors = read(export(own, "sglang", tmp_path / "sglang", target))
    assert raw["architectures"] == ["LlamaForCausalLMEagle"]
    assert torch.equal(tensors["fc.bias"], torch.zeros(32))
    assert raw["bias"] is False  # true: llama.py makes biases of attention, which no file has
    raw, tensors = read(export(own, "vllm", tmp_path / "vllm", target))
    assert raw["architectures"] == ["EagleLlamaForCausalLM"] and "fc.bias" not in tensors
    found = spec_train.export(draft=str(own)).findings
    assert "--format sglang" in found["sglang"][0].text
    assert found["llama.cpp"][0].level == "refuse"
