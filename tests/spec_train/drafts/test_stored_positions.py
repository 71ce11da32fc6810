"""A draft's rotary embedding comes from its dataset: stored, damaged, absent, beyond a config."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import spec_train
from spec_data.models import families
from spec_data.shards.errors import DatasetError, DraftError, MissingError
from spec_data.shards.files import dump_json
from spec_data.shards.position_data import POSITIONS, Positions, load_positions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest, RopeRecord, fingerprint
from spec_train.drafts import load_draft
from spec_train.training.fit import fit
from tests.spec_data.runs import run, save_target, verify, write_corpus
from tests.spec_data.shards.integrity_tools import flip
from tests.spec_train import flat
from tests.spec_train.drafts.any_draft import SHAPED, SMALL

STEP = {"steps": 1, "batch_size": 1, "seq_len": 128, "device": "cpu"}


def lying(config: Any, **_: Any) -> tuple[torch.Tensor, float]:
    """Frequencies that no settings of a config express."""
    size = config.hidden_size // config.num_attention_heads
    plain = 1.0 / (1e4 ** (torch.arange(0, size, 2, dtype=torch.float) / size))
    return plain * (1 + torch.arange(size // 2) / 7), 1.0


def made(folder: Path, family: str = "llama") -> Path:
    """Make a target, a corpus and a dataset in a folder."""
    save_target(folder / "target", family)
    write_corpus(folder / "chats.jsonl", 8)
    run(folder / "target", folder / "chats.jsonl", folder / "data", layers="1,2,4")
    return folder


def settings(data: Path, draft: str = "eagle3", out: str = "run", **changes: Any) -> Any:
    """The options of a fit of one step, in a directory beside the dataset."""
    place = {"data": str(data), "out": str(data.parent / f"{draft}-{out}")}
    config = flat.split(draft, **place, **STEP, **SMALL[draft], **changes)
    return config


def fitted(data: Path, draft: str = "eagle3", out: str = "run") -> Path:
    """Fit a draft for one step; return its directory."""
    config, options = settings(data, draft, out)
    assert fit(draft, config, options).finished
    return Path(config.out) / "last"


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A Llama and its dataset."""
    return made(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def odd(tmp_path_factory) -> Path:
    """A Llama whose modules compute another rope than its config says, and its dataset."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRotaryEmbedding, "compute_default_rope_parameters", staticmethod(lying))
        return made(tmp_path_factory.mktemp("odd"))


@pytest.fixture
def data(plain: Path, tmp_path: Path) -> Path:
    """A copy of the dataset of the Llama, to be changed."""
    shutil.copytree(plain / "data", tmp_path / "data")
    return tmp_path / "data"


def test_a_dataset_says_how_its_target_tells_positions_apart(plain: Path) -> None:
    manifest = Manifest.read(plain / "data" / "manifest.json")
    found = manifest.positions
    assert (found.kind, found.proven, found.proven_to) == ("rope", True, 256)
    assert found.tables == {"full_attention": RopeRecord(dimensions=8)}
    assert POSITIONS in manifest.files
    assert verify(data=str(plain / "data"), device="cpu") == 0
    loaded = load_positions(HiddenStatesDataset(plain / "data", ()))
    assert loaded is not None and loaded.of_draft is not None
    draft = load_draft(fitted(plain / "data"))
    assert torch.equal(draft.rotary.inv_freq, loaded.of_draft.inv_freq)
    assert draft.config.positions == {}  # its rope settings say it all


def test_a_flipped_bit_of_the_stored_frequencies_is_refused(data: Path, capsys) -> None:
    flip(data / POSITIONS, -1)
    with pytest.raises(DatasetError, match=r"positions.safetensors: changed or damaged"):
        fitted(data)
    assert verify(data=str(data), device="cpu") == 1
    assert "positions.safetensors" in capsys.readouterr().out
    (data / POSITIONS).unlink()
    with pytest.raises(MissingError, match=r"positions.safetensors"):
        fitted(data)


def _changed(data: Path, change: Any) -> None:
    """Change a manifest, and make its fingerprint again."""
    raw = json.loads((data / "manifest.json").read_text())
    change(raw)
    raw["fingerprint"] = fingerprint(raw)
    (data / "manifest.json").write_text(dump_json(raw))


def _without_positions(data: Path) -> None:
    """Make a dataset in which nothing is known of positions."""
    (data / POSITIONS).unlink()

    def change(raw: dict[str, Any]) -> None:
        del raw["positions"], raw["files"][POSITIONS]

    _changed(data, change)


def test_without_positions_the_registry_knows_the_rope(data: Path, monkeypatch) -> None:
    _without_positions(data)
    assert load_positions(HiddenStatesDataset(data, ())) == Positions()
    assert load_draft(fitted(data)).rotary.inv_freq.shape == (4,)
    # but not a family that is not registered
    monkeypatch.delitem(families.TARGETS, "LlamaForCausalLM")
    with pytest.raises(DraftError, match=r"no eagle draft is registered.*Qwen3ForCausalLM"):
        fitted(data, "eagle")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("dimensions", 16, r"full_attention are not float32 \[8\]"),
        ("limit", 64, r"full_attention are not float32 \[4\]"),
        ("dimensions", "8", r"dimensions: expected int"),
    ],
)
def test_a_manifest_that_describes_other_frequencies_is_refused(data, key, value, message):
    _changed(data, lambda raw: raw["positions"]["tables"]["full_attention"].update({key: value}))
    with pytest.raises(DatasetError, match=message):
        load_positions(HiddenStatesDataset(data, ()))


@pytest.mark.parametrize("draft", sorted(SHAPED))
def test_a_draft_of_a_config_that_lies_has_the_rope_of_the_data(odd, draft, tmp_path, caplog):
    stored = load_positions(HiddenStatesDataset(odd / "data", ()))
    assert stored is not None and stored.proven and stored.of_draft is not None
    with caplog.at_level(logging.WARNING):
        folder = fitted(odd / "data", draft)
    assert "'rope_theta': 10000.0" in caplog.text and "engines cannot serve it" in caplog.text
    loaded = load_draft(folder)  # without the dataset
    assert torch.equal(loaded.rotary.inv_freq, stored.of_draft.inv_freq)
    assert loaded.config.positions["inv_freq"] == stored.of_draft.inv_freq.tolist()
    # engines compute rope from config.json, so no form for them is written
    with pytest.raises(DraftError, match="no rope settings express"):
        form = "sglang" if draft == "domino" else "vllm"
        spec_train.export(draft=str(folder), format=form, out=str(tmp_path / form))
    spec_train.export(draft=str(folder), format="hf", out=str(tmp_path / "hf"))
    again = load_draft(tmp_path / "hf")
    assert torch.equal(again.rotary.inv_freq, stored.of_draft.inv_freq)


@pytest.mark.parametrize("older_first", [True, False])
def test_of_several_datasets_the_one_that_has_the_rope_decides(odd, tmp_path, older_first):
    older, newer = tmp_path / "older", odd / "data"
    shutil.copytree(newer, older)
    _without_positions(older)
    sources = tuple(map(str, (older, newer) if older_first else (newer, older)))
    given = {"data": sources, "out": str(tmp_path / "run")}
    config = flat.split("eagle3", **given, **STEP, **SMALL["eagle3"])
    assert fit("eagle3", *config).finished
    stored = load_positions(HiddenStatesDataset(newer, ()))
    draft = load_draft(tmp_path / "run" / "last")
    assert torch.equal(draft.rotary.inv_freq, stored.of_draft.inv_freq)


def test_a_draft_with_heads_of_another_size_takes_the_rope_of_the_config(odd: Path) -> None:
    config, options = settings(odd / "data", out="wide", head_dim=16)
    assert fit("eagle3", config, options).finished
    draft = load_draft(Path(config.out) / "last")
    assert draft.config.positions == {} and draft.rotary.inv_freq.shape == (8,)


def test_a_draft_with_another_rope_than_the_dataset_does_not_go_on(plain: Path, odd: Path) -> None:
    with pytest.raises(DraftError, match=r"another shape or target.*\n *positions"):
        fit(
            "eagle3",
            *settings(odd / "data", out="continued", init_from=str(fitted(plain / "data"))),
        )


def test_a_family_that_is_not_registered_is_derived_and_named(plain, monkeypatch, caplog):
    monkeypatch.delitem(families.TARGETS, "LlamaForCausalLM")
    with caplog.at_level(logging.INFO):
        folder = fitted(plain / "data", "eagle3", "derived")
    assert "is not registered: sizes come from config.json" in caplog.text
    assert load_draft(folder).config.head_dim == 8


def test_an_unknown_family_without_proven_positions_is_refused(data: Path, monkeypatch) -> None:
    def unproven(raw: dict[str, Any]) -> None:
        raw["positions"] |= {"proven": False, "reason": "it computes otherwise", "tables": {}}
        del raw["files"][POSITIONS]

    with pytest.raises(DatasetError, match=r"disagree on target/positions\.safetensors"):
        _changed(data, lambda raw: raw["positions"].update(tables={}))
        Manifest.read(data / "manifest.json")
    (data / POSITIONS).unlink()
    _changed(data, unproven)
    fitted(data)  # a registered family: its config decides
    monkeypatch.delitem(families.TARGETS, "LlamaForCausalLM")
    with pytest.raises(DraftError, match=r"Qwen3ForCausalLM.*not proven \(it computes otherwise\)"):
        fitted(data, "peagle")


@pytest.mark.parametrize("factors", ["short", "long"])
def test_a_draft_of_longrope_has_the_factors_of_the_capture(tmp_path: Path, factors: str) -> None:
    save_target(tmp_path / "target", "phi3-longrope")
    write_corpus(tmp_path / "chats.jsonl", 6)
    where = (tmp_path / "target", tmp_path / "chats.jsonl", tmp_path / "data")
    run(*where, layers="1,2,4", rope_factors=factors)
    found = load_positions(HiddenStatesDataset(tmp_path / "data", ()))
    assert found is not None and found.of_draft is not None and found.proven
    table = found.of_draft
    assert (table.factors, table.limit) == (factors, 4096)
    folder = fitted(tmp_path / "data")
    spec_train.export(draft=str(folder), format="vllm", out=str(tmp_path / "vllm"))
    for place in (folder, tmp_path / "vllm"):
        draft = load_draft(place)
        assert draft.config.positions == {"factors": factors}
        wanted = table.inv_freq if factors == "short" else table.long_inv_freq
        assert torch.equal(draft.rotary.inv_freq, wanted) and draft.rotary.limit is None
        # engines read both sets, and the limit between them
        rope = json.loads((place / "config.json").read_text())["rope_scaling"]
        assert rope["long_factor"] == [2.0, 3.0, 4.0] and "inv_freq" not in rope


def test_verify_compares_the_stored_frequencies_with_the_target(odd: Path, capsys) -> None:
    """Here the target's class computes what its config says, unlike when it was captured."""
    given = {"data": str(odd / "data"), "target": str(odd / "target"), "device": "cpu"}
    assert verify(**given) == 1
    assert (
        "the rotary frequencies of full_attention are not this target's" in capsys.readouterr().out
    )
