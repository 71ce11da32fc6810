"""A family may have a draft class of its own: `fit` and `load_draft` use it, engines do not."""

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import spec_train
from spec_data.shards import draft_code
from spec_data.shards.errors import ConfigError, DraftError
from spec_train.cli import main
from spec_train.drafts import kinds
from spec_train.drafts.eagle3 import Eagle3Draft
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.loading import DRAFTS, draft_class, load_draft
from spec_train.training.search_space import SearchTraining
from tests.factory import tiny_dataset
from tests.spec_train import flat

FAMILY = "LlamaForCausalLM"
SOURCE = """
from spec_train.drafts.eagle3 import Eagle3Draft


class OwnDraft(Eagle3Draft):
    architectures = ("LlamaForCausalLM",)

    def project(self, aux):
        return super().project(aux) / 2
"""


class OwnDraft(Eagle3Draft):
    """A draft whose features are half as large."""

    def project(self, aux):
        """Project aux states, and halve them."""
        return super().project(aux) / 2


class Unnamed:
    """No draft."""


@dataclass(frozen=True, kw_only=True)
class OtherOptions(Eagle3Options):
    """Options of somebody else."""


@pytest.fixture(autouse=True)
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test begins as a new process does."""
    for place in (kinds, "_REGISTERED"), (kinds, "_OF_FAMILIES"), (draft_code, "_LOADED"):
        monkeypatch.setattr(*place, {})
    monkeypatch.setattr(OwnDraft, "code", "")


def fitted(tmp_path: Path) -> Path:
    data = tiny_dataset(tmp_path / "data", n_docs=6)
    given = dict(steps=1, batch_size=1, seq_len=48, validation=0.3, device="cpu", ttt_steps=2)
    return flat.fit("eagle3", data, tmp_path / "run", **given).directory / "last"


def test_fit_and_load_draft_use_the_class_of_the_family(tmp_path: Path, monkeypatch) -> None:
    kind = spec_train.register_draft(OwnDraft, FAMILY)
    assert (kind.name, kind.options) == ("eagle3", Eagle3Options)
    folder = fitted(tmp_path)
    assert type(load_draft(folder)) is OwnDraft
    with pytest.raises(DraftError, match=r"does not know .*OwnDraft, the class of eagle3 drafts"):
        spec_train.export(draft=folder, format="vllm", out=tmp_path / "vllm")
    spec_train.export(draft=folder, format="hf", out=tmp_path / "hf")
    assert type(load_draft(tmp_path / "hf")) is OwnDraft
    monkeypatch.setattr(kinds, "_OF_FAMILIES", {})  # another process: it is not read as another one
    with pytest.raises(DraftError, match=r"a class that the family of its target has.*OwnDraft"):
        load_draft(folder)


def test_a_draft_of_before_stays_what_it_is(tmp_path: Path) -> None:
    folder = fitted(tmp_path)
    spec_train.register_draft(OwnDraft, FAMILY)
    assert type(load_draft(folder)) is Eagle3Draft


def test_on_the_command_line_its_code_is_named(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_dataset(tmp_path / "data", n_docs=6)
    Path("own.py").write_text(SOURCE)
    words = "--steps 1 --batch-size 1 --seq-len 48 --validation 0.3 --device cpu --ttt-steps 2"
    run = ["fit", "eagle3", "--data", "data", "--out", "run", *words.split()]
    assert main([*run, "--draft-code", "own.py:OwnDraft"]) == 0
    monkeypatch.setattr(kinds, "_OF_FAMILIES", {})
    monkeypatch.setattr(draft_code, "_LOADED", {})
    for name in [name for name in sys.modules if name.startswith("draft_code_")]:
        monkeypatch.delitem(sys.modules, name)
    capsys.readouterr()
    assert main(["export", "--draft", "run"]) == 2
    assert "--draft-code own.py:OwnDraft" in " ".join(capsys.readouterr().err.split())
    assert main(["export", "--draft", "run", "--draft-code", "own.py:OwnDraft"]) == 0
    assert "does not know own.py:OwnDraft" in " ".join(capsys.readouterr().out.split())


def test_a_search_goes_on_with_the_classes_that_it_began_with(tmp_path, monkeypatch) -> None:
    """Without --draft-code the built-in class would train on under the same record."""
    data = tiny_dataset(tmp_path / "data", n_docs=6)
    given = dict(steps=1, batch_size=1, seq_len=48, validation=0.3, device="cpu")
    options = SearchTraining(data=str(data), out=str(tmp_path / "found"), **given)
    spec_train.register_draft(OwnDraft, FAMILY)
    assert spec_train.search(options, space="ttt_steps=1,2").complete
    monkeypatch.setattr(kinds, "_OF_FAMILIES", {})
    with pytest.raises(ConfigError, match=r"draft_code: \['.*OwnDraft'\] -> '\(absent\)'"):
        spec_train.search(options, space="ttt_steps=1,2")


def test_other_kinds_and_families_have_the_plain_classes() -> None:
    spec_train.register_draft(OwnDraft, FAMILY)
    assert draft_class("eagle3", [FAMILY]) is OwnDraft
    assert draft_class("eagle3", ["Unheard", FAMILY, "Qwen3ForCausalLM"]) is OwnDraft
    for kind, plain in DRAFTS.items():
        assert draft_class(kind, ["Qwen3ForCausalLM"]) is plain
        assert draft_class(kind) is plain
    assert draft_class("peagle", [FAMILY]) is DRAFTS["peagle"]


def test_a_class_that_is_no_such_draft_is_refused() -> None:
    with pytest.raises(DraftError, match=r"config_class\.draft is None"):
        spec_train.register_draft(Unnamed, FAMILY)
    other = type("Other", (OwnDraft,), {"options_class": OtherOptions})
    with pytest.raises(DraftError, match="its options_class is not Eagle3Options"):
        spec_train.register_draft(other, FAMILY)
    with pytest.raises(DraftError, match="name in its `architectures` the targets"):
        spec_train.register_draft(OwnDraft)
