"""Files that hold one JSON list: equal to `json.loads`, and nothing lost silently."""

import gzip
import json

import pytest

from spec_data.corpus import file_rows
from spec_data.corpus.bad_rows import parse_limit
from spec_data.shards.errors import CorpusError
from tests.spec_data.corpus.reading import pair, read, rows, sha


def test_a_json_list_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("\ufeff [\n" + ",\n\n".join(json.dumps(r, indent=1) for r in rows(5)) + "\n]\n")
    records, (report,) = read(path)
    assert [r.messages for r in records] == [pair(i) for i in range(5)]
    assert [r.where for r in records] == [f"{path} row {number}" for number in range(5)]
    assert (report.kind, report.sha256) == ("json", sha(path))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"text": "a"},\n {"text": }]', r"a\.json:2: not valid JSON"),
        ('[{"text": "a"},\n' + "[" * 100_000, r"a\.json: not valid JSON: .*recursion"),
        ("[" + "7" * 5000 + "]", r"a\.json: not valid JSON: .*4300"),
        (json.dumps(rows(2)) + "\n\n " + json.dumps(rows(3, 2)), r"a\.json:3: .*Extra data"),
    ],
)
def test_what_is_no_json_list_is_refused_by_its_line(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CorpusError, match=problem):
        read(path)


VALUES = r"""[
 {"text": "a", "n": 123456789012345678901234567890, "x": [1.5, 1E5, -0.0, 1e400, 7, NaN]},
 {"text": "\ud83d\ude00 \u0000 é", "text": "the last of two keys wins"},
 {"text": "a cut emoji \ud83d"},
 {"text": "\ud83d\u0041"}
]"""


@pytest.mark.parametrize("limit", [1 << 20, 200])
def test_elements_of_a_json_list_are_what_json_returns(tmp_path, limit):
    """Integers of any size, floats, NaN, and halves of surrogate pairs (which the reader refuses
    as rows) must survive: a parser that replaces them would change the corpus silently."""
    path = tmp_path / "a.json"
    path.write_text(VALUES)
    found = [e for _, e in file_rows.json_list("a.json", path, limit)]
    assert repr(found) == repr(json.loads(VALUES))  # repr: NaN != NaN, and 7 is not 7.0
    path.write_text(json.dumps(rows(300))[:-1] + "," + VALUES[1:])
    _, (report,) = read(path)
    assert (report.rows, report.bad) == (304, 2)
    assert all("half of a surrogate pair" in example for example in report.bad_examples)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_large_element_is_a_bad_row_and_a_large_list_is_refused(tmp_path, monkeypatch, name):
    elements = [{"text": "a"}, {"text": "é" * 100}, 7, {"text": "b"}, "x" * 200]
    content = json.dumps(elements, indent=1).encode()
    path, limits = tmp_path / name, {"max_row_bytes": 150, "max_bad_rows": parse_limit("100%")}
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    records, (report,) = read(path, **limits)
    assert [(r.text, r.where) for r in records] == [("a", f"{path} row 0"), ("b", f"{path} row 3")]
    assert (report.rows, report.bad, report.sha256) == (5, 3, sha(path))
    assert f"{name} row 1: 211 bytes, more than the 150 of" in report.bad_examples[0]
    monkeypatch.setattr(file_rows, "_LARGEST_LIST", 100)
    with pytest.raises(CorpusError, match=r"more than 100 bytes.*convert it to JSON Lines"):
        read(path)
