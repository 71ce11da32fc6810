"""A key of a published file that changes the draft is read or refused, for every kind of draft.

The files are our own checkpoints without the section that only this project reads.
"""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import load_draft
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.write import write_form
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import SHAPED, build_draft
from tests.spec_train.formats import own_draft
from tests.spec_train.formats.published import tiny

dataset, head, facts = any_draft.dataset, any_draft.head, own_draft.facts


def read_as_foreign(files: DraftFiles, facts: TargetFacts, **keys: Any) -> Any:
    """Read files without the section of this project, with other `keys`; None removes a key."""
    raw = {k: v for k, v in files.config.items() if k != SECTION} | keys
    raw = {name: value for name, value in raw.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        return load_draft(tiny.write(Path(folder) / "draft", raw, files.tensors), facts)


@pytest.fixture(scope="module")
def plain(dataset: HiddenStatesDataset, head: TargetHead) -> dict[str, DraftFiles]:
    return {name: build_draft(name, dataset, head).files(torch.float32, "own") for name in SHAPED}


@pytest.mark.parametrize("name", SHAPED)
def test_norms_that_are_off_change_nothing(plain, facts, name):
    off = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
    if name in ("eagle3", "peagle"):  # they have this norm
        del off["norm_before_fc"]
    files = plain[name]
    assert read_as_foreign(files, facts, **off).config == read_as_foreign(files, facts).config


@pytest.mark.parametrize("key", ["norm_before_residual", "norm_before_fc", "norm_output"])
@pytest.mark.parametrize("name", ["eagle", "dspark", "dflash"])
def test_norms_that_the_draft_does_not_have_are_refused(plain, facts, name, key):
    with pytest.raises(DraftError, match=f"{key} = (True cannot be represented|true, but)"):
        read_as_foreign(plain[name], facts, **{key: True})


@pytest.mark.parametrize("name", ["eagle", "eagle3", "peagle", "dflash"])
def test_sizes_that_a_config_lacks_are_those_of_the_weights(plain, facts, name):
    """Half of the query heads: 2 of 8 channels beside 32 of the stream, and one of keys."""
    files, cut = plain[name], {"q_proj.w": (0, 16), "o_proj.w": (1, 16), "k_proj.w": (0, 8)}
    cut |= {"v_proj.w": (0, 8)}
    tensors = {
        key: next((t.narrow(d, 0, n) for part, (d, n) in cut.items() if part in key), t)
        for key, t in files.tensors.items()
    }
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    lacking = {"num_attention_heads": 2, "head_dim": None, "num_key_value_heads": None}
    found = read_as_foreign(replace(files, tensors=tensors), facts, **lacking).config
    assert (found.hidden_size, found.head_dim, found.num_key_value_heads) == (32, 8, 1)


@pytest.mark.parametrize("name", SHAPED)
def test_the_activation_has_two_names(plain, facts, name):
    found = read_as_foreign(plain[name], facts, hidden_act=None, hidden_activation="gelu")
    assert found.config.hidden_act == found.options.hidden_act == "gelu"
    with pytest.raises(DraftError, match="hidden_act = silu and hidden_activation = gelu"):
        read_as_foreign(plain[name], facts, hidden_activation="gelu")


def test_an_eagle3_file_that_drafts_in_parallel_is_refused(plain, facts):
    with pytest.raises(DraftError, match=r"parallel_drafting = true, but .* has no mask_hidden"):
        read_as_foreign(plain["eagle3"], facts, parallel_drafting=True)
    assert read_as_foreign(plain["peagle"], facts, parallel_drafting=True).name == "peagle"


@pytest.mark.parametrize("name", SHAPED)
def test_windows_of_every_layer_are_read_outside_their_table_too(plain, facts, name):
    found = read_as_foreign(plain[name], facts, use_swa=True, swa_window_size=4, layer_types=None)
    assert set(found.config.windows) == {4}


@pytest.mark.parametrize("form", ["vllm", "speculators"])
@pytest.mark.parametrize("name", SHAPED)
def test_a_trained_embedding_is_kept_without_a_key_for_it(dataset, head, facts, name, form):
    """The forms for engines have no key of it in block drafts, so the weights decide."""
    if form == "speculators" and name in ("eagle", "domino", "lilicorr", "xpress"):
        form = "hf"
    if (name, form) == ("domino", "vllm"):
        form = "sglang"
    draft = build_draft(name, dataset, head, train_embeddings=True)
    with torch.no_grad():
        draft.embed_tokens.weight += 0.01
    written = write_form(draft.files(torch.float32, "own"), form, facts)
    found = read_as_foreign(written, facts)
    assert found.config.train_embeddings and found.embed_tokens.weight.requires_grad
    found.join(head, dataset.manifest, "here")
    assert torch.equal(found.embed_tokens.weight, draft.embed_tokens.weight)
    frozen = build_draft(name, dataset, head).files(torch.float32, "own")
    assert not read_as_foreign(write_form(frozen, form, facts), facts).config.train_embeddings
