"""DSpark and DFlash: what engines read, and drafts of other trainers."""

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.spec_train.drafts import any_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.own_draft import read
from tests.spec_train.formats.published.tiny import write
from tests.spec_train.formats.tools import export, nulls, same_weights

dataset, head, target = any_draft.dataset, any_draft.head, own_draft.target
saved, facts = own_draft.saved, own_draft.facts

CASES = [
    ("dspark", {}, "hf vllm sglang speculators deepspec"),
    ("dspark", {"draft_vocab_size": 40}, "hf vllm speculators"),
    ("dspark", {"layout": "mask"}, "hf vllm sglang speculators"),
    ("dflash", {}, "hf vllm sglang speculators"),
    ("dflash", {"layout": "anchor"}, "hf vllm speculators deepspec"),
]


@pytest.mark.parametrize(("kind", "changes", "forms"), CASES, ids=str)
def test_keys_and_layers(saved, head, tmp_path, target, forms, kind, changes):
    own = saved(kind, layers="0,2", **changes)
    full = "draft_vocab_size" not in changes
    anchor = changes.get("layout", "anchor" if kind == "dspark" else "mask") == "anchor"
    published = kind == "dflash" and not anchor
    for form in forms.split():
        raw, tensors = read(export(own, form, tmp_path / form, target))
        assert ("embed_tokens.weight" in tensors) == (form in ("hf", "deepspec"))
        assert ("lm_head.weight" in tensors) == (not full or form == "deepspec")
        assert raw["draft_vocab_size"] == (64 if full else 40) and nulls(raw) == []
        assert raw["sample_from_anchor"] is anchor  # always said: readers' defaults differ
        assert raw["mask_token_id"] == 5 and raw["block_size"] == 3
        if form == "speculators":
            assert raw["aux_hidden_state_layer_ids"] == [1, 3]  # inputs of blocks
            assert raw["speculators_model_type"] == ("dflash" if published else "dspark")
            (method,) = raw["speculators_config"]["proposal_methods"]
            assert method["speculative_tokens"] == (3 if anchor else 2)
        else:
            assert raw["target_layer_ids"] == [0, 2]  # outputs of blocks
            assert raw["architectures"] == ["DFlashDraftModel" if published else "Qwen3DSparkModel"]
            if published:
                assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
                assert raw["dflash_config"]["mask_token_id"] == 5
        if form == "deepspec":
            assert torch.equal(tensors["lm_head.weight"], head.head_weight)
            assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight)
        if full and form in ("vllm", "sglang"):
            assert raw["has_embed_tokens"] is False  # llama.cpp's trap


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ({"confidence_head_with_markov": False}, "confidence head of width 32; the one"),
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"target_layer_ids": ...}, "target_layer_ids"),
    ],
)
def test_what_cannot_be_represented_is_refused(saved, head, facts, tmp_path, changes, message):
    """As DeepSpec publishes it: no section of ours, copies of the target's weights."""
    raw, tensors = read(saved("dspark"))
    raw = {k: v for k, v in raw.items() if k not in ("spec_train", "sample_from_anchor", "dtype")}
    raw = {k: v for k, v in (raw | changes).items() if v is not ...}
    theirs = write(tmp_path / "theirs", raw, tensors | {"lm_head.weight": head.head_weight})
    with pytest.raises(DraftError, match=message):
        load_draft(theirs, facts)


def test_fit_starts_from_a_form_and_from_no_other_kind(saved, dataset, tmp_path, target):
    own = saved("dspark")
    place = {"data": str(dataset.path), "out": str(tmp_path / "run"), "steps": 0, "seq_len": 64}
    start = str(export(own, "deepspec", tmp_path / "form", target))
    config = Training(**place, init_from=start, device="cpu")
    fit("dspark", config, DRAFT_OPTIONS["dspark"](**any_draft.SMALL["dspark"]))
    assert same_weights(load_draft(tmp_path / "run" / "last"), load_draft(own))
    other = Training(**place | {"out": str(tmp_path / "other")}, init_from=start, device="cpu")
    with pytest.raises(DraftError, match="holds a draft of the kind dspark"):
        fit("dflash", other, DRAFT_OPTIONS["dflash"](**any_draft.SMALL["dflash"]))
