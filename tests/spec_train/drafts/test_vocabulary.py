"""Draft vocabularies: by coverage, from files and other data."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_data.shards.errors import ConfigError, DraftError, MissingError
from spec_train import load_draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.vocabulary import choose_draft_vocabulary, smallest_vocabulary
from spec_train.formats.vocabulary_maps import read_vocabulary
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.presets import with_preset
from tests.factory import tiny_dataset
from tests.spec_train import flat

VOCAB = 64
SMALL: dict[str, dict[str, Any]] = {
    "eagle3": {"ttt_steps": 2},
    "peagle": {"depths": 2, "num_layers": 1},
    "dspark": {"num_layers": 1, "block_size": 3, "markov_rank": 4},
    "dflash": {"num_layers": 1, "block_size": 4},
}
KEPT = torch.arange(3, 60, 3)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("vocabulary") / "set", n_docs=24)


@pytest.fixture(scope="module")
def runs(data, tmp_path_factory) -> dict[int, Path]:
    """A run of one step with 40 of the 64 tokens, and one with all."""
    made = {size: tmp_path_factory.mktemp("runs") / str(size) for size in (40, 0)}
    for size, out in made.items():
        fit("eagle3", data, out, draft_vocab_size=size)
    return made


def fit(kind: str, data: Path, out: Path, **changes):
    given = dict(steps=1, batch_size=2, seq_len=48, validation=0.2, device="cpu")
    return flat.fit(kind, data, out, **given | SMALL[kind] | changes)


def write_maps(folder: Path, ids: Tensor, **more: Tensor) -> Path:
    """Write the maps of a draft with these tokens, and nothing else."""
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    folder.mkdir(parents=True)
    d2t = ids - torch.arange(len(ids))
    save_file({"d2t": d2t, "t2d": t2d, **more}, folder / "model.safetensors")
    return folder


# --- by coverage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("special", [[], [0, 7]])
def test_the_smallest_vocabulary_that_covers_a_share(special):
    counts = torch.tensor([0, 50, 25, 12, 6, 4, 2, 1, 0, 0])
    for share in (1e-6, 0.3, 0.5, 0.51, 0.75, 0.9, 0.97, 0.99, 0.999, 1.0):
        fewest = max(1, len(special))
        while True:  # one more token, until they cover the share
            chosen = choose_draft_vocabulary(counts, fewest, special)
            if int(counts[chosen].sum()) >= share * 100 - 1e-9:
                break
            fewest += 1
        assert smallest_vocabulary(counts, share, special).tolist() == chosen.tolist(), share
    with pytest.raises(DraftError, match="no supervised token"):
        smallest_vocabulary(torch.zeros(4, dtype=torch.long), 0.5)


# --- from files -----------------------------------------------------------------------------------


def test_every_form_of_a_vocabulary_is_read(tmp_path, runs):
    ids = torch.tensor([3, 9, 10, 63])
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    (tmp_path / "list.json").write_text("[63, 3, 10, 9]")
    save_file({"ids": ids.flip(0).int()}, tmp_path / "ids.safetensors")
    save_file({"mask": mask}, tmp_path / "mask.safetensors")
    save_file({"t2d": mask}, tmp_path / "t2d.safetensors")
    folder = write_maps(tmp_path / "draft", ids, weight=torch.ones(2, 2))
    for name in ("draft.bin", "map.pt"):
        torch.save({"model.d2t": ids - torch.arange(4)}, tmp_path / name)
    for path in (*tmp_path.glob("*.*"), folder, folder / "model.safetensors"):
        assert torch.equal(read_vocabulary(path, VOCAB), ids), path
    own = load_draft(runs[40] / "best").draft_ids
    for path in (runs[40], runs[40] / "best"):
        assert torch.equal(read_vocabulary(path, VOCAB), own)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1, 2, 64]", r"1 tokens lie outside 0\.\.63"),
        ("[1, 2, 2]", "1 tokens repeat"),
        ("[]", "names no token"),
        ('{"1": 2}', "expected a JSON list"),
        ("[1, true]", "expected a JSON list"),
        ("[1", "expected a JSON list"),
    ],
)
def test_a_list_that_is_no_vocabulary_is_refused(tmp_path, text, named):
    (tmp_path / "v.json").write_text(text)
    with pytest.raises(DraftError, match=named):
        read_vocabulary(tmp_path / "v.json", VOCAB)


def test_a_file_without_a_vocabulary_is_refused(tmp_path, runs):
    np.save(tmp_path / "d2t.npy", np.arange(4))  # intact
    with pytest.raises(DraftError, match=r"d2t\.npy: expected a \.json, \.safetensors"):
        read_vocabulary(tmp_path / "d2t.npy", VOCAB)
    with pytest.raises(DraftError, match="A draft without them proposes every token"):
        read_vocabulary(runs[0], VOCAB)
    with pytest.raises(MissingError, match="no such file"):
        read_vocabulary(tmp_path / "none", VOCAB)
    save_file({"x": torch.ones(3)}, tmp_path / "x.safetensors")
    with pytest.raises(DraftError, match="expected token ids"):
        read_vocabulary(tmp_path / "x.safetensors", VOCAB)
    other = write_maps(tmp_path / "other", torch.tensor([1, 2]))
    with pytest.raises(DraftError, match=r"t2d has shape \[64\], expected \[80\]"):
        read_vocabulary(other, 80)


# --- at fit ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", SMALL)
def test_a_new_draft_has_the_tokens_of_the_file(kind, data, tmp_path, caplog):
    (tmp_path / "v.json").write_text(json.dumps(KEPT.tolist()))
    run = fit(kind, data, tmp_path / "run", draft_vocab=tmp_path / "v.json")
    draft = load_draft(run.directory / "last")
    assert torch.equal(draft.draft_ids, KEPT)
    assert "warning[vocabulary]: --draft-vocab" in caplog.text  # it lacks 1 and 2
    assert "lacks the special tokens [1, 2]" in caplog.text
    assert draft.config.draft_vocab_size == len(KEPT)
    raw = (run.directory / "last" / "config.json").read_text()
    assert str(tmp_path) not in raw  # a path of this machine


def test_a_new_draft_covers_the_share(data, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    run = fit("eagle3", data, tmp_path / "run", draft_vocab_coverage=0.8, validation=0.0)
    draft = load_draft(run.directory / "last")
    assert f"vocabulary {len(draft.draft_ids)} of 64 tokens: 80." in caplog.text


@pytest.mark.parametrize("kind", SMALL)
@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"draft_vocab": "f", "draft_vocab_coverage": 0.9}, "each of them chooses"),
        ({"draft_vocab_coverage": 0.9, "draft_vocab_size": 9}, "each of them chooses"),
        ({"draft_vocab_coverage": 0.0}, "--draft-vocab-coverage 0"),
        ({"draft_vocab_coverage": 1.5}, "--draft-vocab-coverage 1.5"),
    ],
)
def test_options_that_exclude_each_other_are_refused(kind, given, named):
    with pytest.raises(DraftError, match=named):
        DRAFT_OPTIONS[kind](**given)


def test_a_preset_gives_way_to_a_file():
    found = with_preset(Eagle3Options(draft_vocab="f"), "smoke")
    assert found.draft_vocab == "f" and found.ttt_steps == 2


def test_a_draft_to_start_from_keeps_its_vocabulary(data, runs, tmp_path):
    same = read_vocabulary(runs[40], VOCAB)
    other = torch.cat([same[:-1], torch.tensor([i for i in range(VOCAB) if i not in same][-1:])])
    (tmp_path / "other.json").write_text(json.dumps(other.tolist()))
    given = {"init_from": runs[40]}
    with pytest.raises(DraftError, match="with other tokens than"):
        fit("eagle3", data, tmp_path / "a", draft_vocab=tmp_path / "other.json", **given)
    run = fit("eagle3", data, tmp_path / "b", draft_vocab=runs[40], **given)
    assert torch.equal(load_draft(run.directory / "last").draft_ids, same)


def test_the_vocabulary_is_part_of_a_run(data, tmp_path):
    (tmp_path / "v.json").write_text(json.dumps(KEPT.tolist()))
    fit("eagle3", data, tmp_path / "run", draft_vocab=tmp_path / "v.json")
    with pytest.raises(ConfigError, match="draft_vocab"):
        fit("eagle3", data, tmp_path / "run", draft_vocab_coverage=0.9)
