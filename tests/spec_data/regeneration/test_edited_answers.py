"""Answers that were edited after `regenerate` wrote them are not called on-policy."""

import json

import pytest

import spec_data
from spec_data.corpus.documents import EDITED
from spec_data.corpus.sampling_record import DIGEST, answers_digest, is_edited
from spec_data.shards.errors import ConfigError
from tests.spec_data.regeneration.tools import answered, rows, write_rows
from tests.spec_data.runs import call, options, save_target, write_corpus


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("edited")
    save_target(folder / "target")
    corpus = write_corpus(folder / "chats.jsonl", 8)
    answered(corpus, folder / "own.jsonl", target=str(folder / "target"))
    return folder


def generated(place, corpus, out, **changes):
    given = options(place / "target", corpus, out, **changes)
    return call(spec_data.generate, given)


def with_record(place, tmp_path, found):
    """Write rows beside the record of own.jsonl."""
    record = (place / "own.jsonl.sampling").read_bytes()
    (tmp_path / "own.jsonl.sampling").write_bytes(record)
    return write_rows(tmp_path / "own.jsonl", found)


def edit(row):
    """Another answer, in either form of a row."""
    if "input_ids" in row:
        return row | {"input_ids": [*row["input_ids"][:-2], 7, 9]}
    messages = [dict(m) for m in row["messages"]]
    messages[-1]["content"] += " really"
    return row | {"messages": messages}


def test_every_row_has_a_digest_that_outlives_other_tools(place):
    for row in rows(place / "own.jsonl"):
        assert row[DIGEST] == answers_digest(row) and not is_edited(row)
        assert not is_edited(row | {"category": "x", "tools": None})
        name = "messages" if "messages" in row else "input_ids"
        assert not is_edited(row | {name: json.dumps(row[name])})  # a column of JSON text
        assert is_edited(edit(row))
    assert not is_edited({"messages": []})  # no row of `regenerate`


@pytest.mark.parametrize("change", [edit, None])
def test_an_edited_answer_is_refused_as_on_policy_and_an_unchanged_one_taken(
    place, tmp_path, change, caplog
):
    found = rows(place / "own.jsonl")[::-1][:-1]  # shuffled and filtered
    if change:
        found[2] = change(found[2])
    corpus = with_record(place, tmp_path, found)
    if change:
        with pytest.raises(ConfigError, match=r"1 rows whose answers were edited .*own.jsonl:3"):
            generated(place, corpus, tmp_path / "data", on_policy=True)
        assert not (tmp_path / "data" / "manifest.json").exists()
    else:
        assert generated(place, corpus, tmp_path / "data", on_policy=True).policy == "on-policy"
    assert "warning[sampling-record]" in caplog.text


def test_without_the_claim_an_edited_answer_is_counted_and_the_label_withheld(place, tmp_path):
    found = rows(place / "own.jsonl")
    corpus = write_rows(tmp_path / "own.jsonl", found)
    assert generated(place, corpus, tmp_path / "whole").policy == "on-policy"  # by its agreement
    target_text = edit(found[0])
    corpus = write_rows(tmp_path / "own.jsonl", [target_text, *found[1:], *found[1:]])
    made = generated(place, corpus, tmp_path / "data", allow_high_nll=True)
    assert made.policy == "off-policy"
    shown = spec_data.inspect(tmp_path / "data")
    assert EDITED in " ".join(shown.text.split()) and shown.facts()["policy"] == "off-policy"
