"""A family may bring its own draft class: `fit` and `load_draft` use it, engines do not know it."""

from pathlib import Path

import pytest

import spec_train
from spec_data.models import families
from spec_data.models.families import DraftSpec
from spec_data.shards.errors import DraftError
from spec_train.drafts import DRAFTS, draft_class, load_draft
from spec_train.drafts.eagle3.draft import Eagle3Draft
from spec_train.training.setup import fit
from tests.spec_data.runs import run, save_target, write_corpus
from tests.spec_train import flat

NAME = "LlamaForCausalLM"


class OwnDraft(Eagle3Draft):
    """A draft whose features are half as large."""

    def project(self, aux):
        """Project aux states, and halve them."""
        return super().project(aux) / 2


class Unnamed:
    """No draft."""


def _register(monkeypatch, place: str, kind: str = "eagle3") -> None:
    """Give the Llama family a class of its own, in one line of the registry."""
    monkeypatch.setitem(families.TARGETS, NAME, DraftSpec(family="Own", drafts={kind: place}))


def test_fit_and_load_draft_use_the_class_of_the_family(tmp_path: Path, monkeypatch) -> None:
    _register(monkeypatch, f"{__name__}:OwnDraft")
    save_target(tmp_path / "target")
    write_corpus(tmp_path / "chats.jsonl", 6)
    run(tmp_path / "target", tmp_path / "chats.jsonl", tmp_path / "data")
    out = str(tmp_path / "run")
    settings = {"steps": 1, "batch_size": 1, "seq_len": 128, "device": "cpu", "ttt_steps": 2}
    config = flat.split("eagle3", data=str(tmp_path / "data"), out=out, **settings)
    assert fit("eagle3", *config).finished
    folder = tmp_path / "run" / "last"
    assert type(load_draft(folder)) is OwnDraft
    with pytest.raises(DraftError, match=r"does not know .*OwnDraft, the draft class of Own"):
        spec_train.export(draft=str(folder), format="vllm", out=str(tmp_path / "vllm"))
    spec_train.export(draft=str(folder), format="hf", out=str(tmp_path / "hf"))
    assert type(load_draft(tmp_path / "hf")) is OwnDraft


def test_other_kinds_and_families_have_the_plain_classes(monkeypatch) -> None:
    _register(monkeypatch, f"{__name__}:OwnDraft")
    assert draft_class("eagle3", [NAME]) is OwnDraft
    assert draft_class("eagle3", ["Unheard", NAME, "Qwen3ForCausalLM"]) is OwnDraft
    for kind, plain in DRAFTS.items():
        assert draft_class(kind, ["Qwen3ForCausalLM", NAME]) is plain
        assert draft_class(kind, []) is plain
    assert draft_class("peagle", [NAME]) is DRAFTS["peagle"]
    with pytest.raises(DraftError, match=r"no draft 'eagle4'; known kinds: eagle, "):
        draft_class("eagle4", [NAME])


@pytest.mark.parametrize(
    ("place", "kind", "message"),
    [
        (f"{__name__}:Missing", "eagle3", "cannot be loaded"),
        ("no_such_package:Draft", "eagle3", "No module named 'no_such_package'"),
        (f"{__name__}:Unnamed", "eagle3", "is no eagle3 draft"),
        (f"{__name__}:OwnDraft", "peagle", "is no peagle draft"),
    ],
)
def test_a_class_that_is_no_such_draft_is_refused(
    monkeypatch, place: str, kind: str, message: str
) -> None:
    _register(monkeypatch, place, kind)
    with pytest.raises(DraftError, match=message):
        draft_class(kind, [NAME])
