"""The drawings of docs/how-it-works.md: what they show follows from plain rules, in any dataset."""

import json
import sys
import xml.etree.ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import evidence_text  # noqa: E402
import how_it_works  # noqa: E402

from tests.api_workspace import make_workspace  # noqa: E402


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Facts of a dataset and a draft that were made here, and the stored ones."""
    folder = make_workspace(tmp_path_factory.mktemp("how"))
    return how_it_works.read_facts(str(folder / "data"), str(folder / "run"), 0)


@pytest.fixture(params=["made", "stored"])
def facts(request):
    if request.param == "stored":
        return json.loads(how_it_works.FACTS.read_text(encoding="utf-8"))
    return request.getfixturevalue("made")


def test_the_stored_drawings_are_what_the_script_draws():
    stored = json.loads(how_it_works.FACTS.read_text(encoding="utf-8"))
    drawn = how_it_works.drawings(stored, evidence_text.read_results())
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    for name, picture in drawn.items():
        assert (ROOT / "docs" / "how" / name).read_text(encoding="utf-8") == picture, name
        assert f"](how/{name})" in page and "prefers-color-scheme: dark" in picture
        xml.etree.ElementTree.fromstring(picture)
    assert {file.name for file in (ROOT / "docs" / "how").iterdir()} == set(drawn)


def test_slots_are_those_of_one_document(facts):
    mask, slots = facts["document"]["mask"], facts["slots"]
    last = len(mask) - 1
    assert any(slot["trained"] for slot in slots) and not all(slot["trained"] for slot in slots)
    for slot in slots:
        t = slot["state"]
        if t + 2 <= last:
            assert (slot["known"], slot["drafted"]) == (t + 1, t + 2)
            assert slot["trained"] == bool(mask[t + 1] and mask[t + 2])
        else:
            assert not slot["trained"]


def test_steps_read_no_later_state_and_one_token_more_each(facts):
    slot = facts["unroll"][0]["drafted"] - 2
    for step, fact in enumerate(facts["unroll"]):
        assert fact["states"] == list(range(slot + 1))
        assert fact["tokens"] == list(range(1, slot + 2 + step))  # x_0 is known to no slot
        assert fact["drafted"] == fact["tokens"][-1] + 1


def test_a_token_of_a_pack_sees_its_own_document(facts):
    known = facts["pack"]
    documents = known["documents"]
    assert len({*documents} - {-1}) > 1
    for t, document in enumerate(documents):
        if document != -1:
            first = documents.index(document)
            assert known["positions"][t] == t - first and known["spans"][t] == [first, t]


def test_a_block_sees_what_is_before_its_anchor_and_itself(facts):
    known, length = facts["block"], len(facts["document"]["mask"])
    anchor, size = known["anchor"], len(known["drafts"])
    for keys in known["keys"]:
        assert keys == [*range(anchor), *range(length, length + size)]
    for d, draft in enumerate(known["drafts"]):
        drafted = draft["drafted"]
        assert drafted == anchor + 1 + d
        mask = facts["document"]["mask"]
        assert draft["trained"] == (drafted < length and all(mask[anchor : drafted + 1]))


def test_an_answer_is_split_where_the_target_wrote():
    pieces = [("a", False), ("b", True), ("c", False), ("d", True)]
    assert how_it_works.rounds(pieces) == [
        [("a", False)],
        [("b", True), ("c", False)],
        [("d", True)],
    ]
