"""DSpark and DFlash: what engines read, and drafts of other trainers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS, load_draft
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.setup import fit
from tests.draft_tools import unseal
from tests.factory import tiny_llama
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.formats.tools import nulls

dataset, head = eagle3_tools.dataset, eagle3_tools.head

SMALL = {"num_layers": 2, "block_size": 4, "mask_token_id": 5}
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("dspark", {"markov_rank": 8}, "hf vllm sglang speculators deepspec"),
    ("dspark", {"markov_rank": 8, "draft_vocab_size": 40}, "hf vllm speculators"),
    ("dspark", {"markov_rank": 8, "layout": "mask"}, "hf vllm sglang speculators"),
    ("dflash", {}, "hf vllm sglang speculators"),
    ("dflash", {"layout": "anchor"}, "hf vllm sglang speculators deepspec"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_llama().save_pretrained(folder)
    return folder


def saved(
    dataset: HiddenStatesDataset, head: TargetHead, folder: Path, kind: str, **changes: Any
) -> Path:
    torch.manual_seed(3)
    draft = DRAFTS[kind].build(
        DRAFT_OPTIONS[kind](**SMALL | changes),
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=torch.arange(head.spec.vocab_size),
    )
    draft.save_pretrained(folder)
    return folder


def facts(head: TargetHead) -> TargetFacts:
    return TargetFacts(num_layers=4, embedding=head.embed_weight, head=head.head_weight)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def written(own: Path, form: str, out: Path, target: Path) -> Path:
    spec_train.export(draft=str(own), format=form, out=str(out), target=str(target))
    return out


@pytest.mark.parametrize(
    ("kind", "changes", "form"),
    [(kind, changes, form) for kind, changes, forms in CASES for form in forms.split()],
    ids=str,
)
def test_keys_and_layers(dataset, head, tmp_path, target, form, kind, changes):
    own = saved(dataset, head, tmp_path / "own", kind, layers="0,2", **changes)
    raw, tensors = read(written(own, form, tmp_path / form, target))
    full = "draft_vocab_size" not in changes
    assert ("embed_tokens.weight" in tensors) == (form in ("hf", "deepspec"))
    assert ("lm_head.weight" in tensors) == (not full or form == "deepspec")
    assert raw["draft_vocab_size"] == (64 if full else 40) and nulls(raw) == []
    anchor = changes.get("layout", "anchor" if kind == "dspark" else "mask") == "anchor"
    assert raw["sample_from_anchor"] is anchor  # always said: readers' defaults differ
    assert raw["mask_token_id"] == 5 and raw["block_size"] == 4
    if form == "speculators":
        assert raw["aux_hidden_state_layer_ids"] == [1, 3]  # inputs of blocks
        served = "dflash" if kind == "dflash" and not anchor else "dspark"
        assert raw["speculators_model_type"] == served
        (method,) = raw["speculators_config"]["proposal_methods"]
        assert method["speculative_tokens"] == (4 if anchor else 3)
    else:
        assert raw["target_layer_ids"] == [0, 2]  # outputs of blocks
        published = kind == "dflash" and not anchor
        assert raw["architectures"] == ["DFlashDraftModel" if published else "Qwen3DSparkModel"]
        if published:
            assert raw["dflash_config"]["target_layer_ids"] == [0, 2]
            assert raw["dflash_config"]["mask_token_id"] == 5
    if form == "deepspec":
        assert torch.equal(tensors["lm_head.weight"], head.head_weight)
        assert torch.equal(tensors["embed_tokens.weight"], head.embed_weight)
    if full and form in ("vllm", "sglang"):
        assert raw["has_embed_tokens"] is False  # llama.cpp's trap


def published(own: Path, folder: Path, head: TargetHead, **changes: Any) -> Path:
    """As DeepSpec publishes it: no section of ours, copies of the target's weights."""
    raw, tensors = read(own)
    raw = {k: v for k, v in raw.items() if k not in ("spec_train", "sample_from_anchor", "dtype")}
    raw = {k: v for k, v in (raw | changes).items() if v is not ...}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    tensors["lm_head.weight"] = head.head_weight.clone()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_published_draft_is_read(dataset, head, tmp_path):
    own = saved(dataset, head, tmp_path / "own", "dspark", markov_rank=8, layers="0,2")
    folder = published(own, tmp_path / "theirs", head)
    again, ours = load_draft(folder, facts(head)), load_draft(own)
    assert again.config.layers == (0, 2) and again.config.sample_from_anchor
    assert again.options.block_size == 4 and again.options.markov_rank == 8
    for name, value in ours.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(DraftError, match="lm_head is not the target's"):
        load_draft(folder, facts(head))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding"),
        ({"is_causal": True}, "is_causal"),
        ({"confidence_head_with_markov": False}, "confidence head of width 32; the one"),
        ({"mask_token_id": ...}, "mask_token_id is missing"),
        ({"target_layer_ids": [2, 2]}, "repeat an id"),
        ({"target_layer_ids": ...}, "target_layer_ids"),
        ({"attention_bias": True}, r"missing layers\.0\.self_attn\.q_proj\.bias"),
        ({"draft_vocab_size": 40}, "40 by draft_vocab_size, 64 by lm_head"),
    ],
)
def test_what_cannot_be_represented_is_refused(dataset, head, tmp_path, changes, message):
    own = saved(dataset, head, tmp_path / "own", "dspark", markov_rank=8)
    with pytest.raises(DraftError, match=message):
        load_draft(published(own, tmp_path / "theirs", head, **changes), facts(head))


def test_speculators_drafts_without_the_slot_that_drafts_first(
    dataset, head, tmp_path, target, caplog
):
    """The library reads true; vLLM reads false, and so say the tokens per round of such a file."""
    own = saved(dataset, head, tmp_path / "own", "dspark", markov_rank=8)
    out = written(own, "speculators", tmp_path / "out", target)
    raw, _ = read(unseal(out))
    del raw["sample_from_anchor"], raw["spec_train"]
    (out / "config.json").write_text(json.dumps(raw))
    assert load_draft(out, facts(head)).config.sample_from_anchor
    assert "has no sample_from_anchor; read as true" in caplog.text
    (method,) = raw["speculators_config"]["proposal_methods"]
    method["speculative_tokens"] -= 1
    (out / "config.json").write_text(json.dumps(raw))
    with pytest.raises(DraftError, match=r"no sample_from_anchor, and 3 tokens per round.*of 4"):
        load_draft(out, facts(head))


@pytest.mark.parametrize("form", ["vllm", "speculators", "deepspec"])
def test_fit_starts_from_every_form(dataset, head, tmp_path, target, form):
    options = {**SMALL, "markov_rank": 8}
    own = saved(dataset, head, tmp_path / "own", "dspark", markov_rank=8)
    start = written(own, form, tmp_path / form, target)
    config = Training(
        data=str(dataset.path),
        out=str(tmp_path / "run"),
        steps=0,
        seq_len=64,
        init_from=str(start),
        device="cpu",
    )
    fit("dspark", config, DRAFT_OPTIONS["dspark"](**options))
    after = load_draft(tmp_path / "run" / "last")
    for name, value in load_draft(own).state_dict().items():
        assert torch.equal(value, after.state_dict()[name]), name
    with pytest.raises(DraftError, match="holds a draft of the kind dspark"):
        fit(
            "dflash",
            Training(
                data=str(dataset.path),
                out=str(tmp_path / "other"),
                steps=0,
                seq_len=64,
                init_from=str(start),
                device="cpu",
            ),
            DRAFT_OPTIONS["dflash"](**SMALL),
        )
