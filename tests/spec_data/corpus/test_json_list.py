"""Files that hold one JSON list: streamed, equal to `json.loads`, and nothing lost silently."""

import io
import json

import pytest

from spec_data.corpus import json_list
from spec_data.shards.errors import CorpusError
from tests.spec_data.corpus.reading import pair, read, rows, sha


@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
def test_a_json_list_is_streamed(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(json_list, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text("\ufeff [\n" + ",\n\n".join(json.dumps(r, indent=1) for r in rows(5)) + "\n]\n")
    records, (report,) = read(path)
    assert [r.messages for r in records] == [pair(i) for i in range(5)]
    lines = path.read_text().split("\n")
    starts = [i + 1 for i, line in enumerate(lines) if line == "{"]
    assert [r.where for r in records] == [f"{path}:{line}" for line in starts]
    assert (report.kind, report.sha256) == ("json", sha(path))


def test_a_broken_json_list_names_the_line(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"text": "a"},\n {"text": }]')
    with pytest.raises(CorpusError, match=r"a\.json:2: not valid JSON"):
        read(path)
    path.write_text('[{"text": "a"},\n {"text": "b"}')
    with pytest.raises(CorpusError, match=r"a\.json:2: .*: the list is not closed"):
        read(path)
    path.write_text('[{"text": "a"},\n' + "[" * 100_000)
    with pytest.raises(CorpusError, match=r"a\.json:2: "):
        read(path)


VALUES = r"""[
 {"text": "a", "n": 123456789012345678901234567890, "x": [1.5, 1E5, -0.0, 1e400, 7, NaN]},
 {"text": "\ud83d\ude00 \u0000 é", "text": "the last of two keys wins"},
 {"text": "a cut emoji \ud83d"},
 {"text": "\ud83d\u0041"}
]"""


@pytest.mark.parametrize("chunk", [1, 5, 1 << 20])
def test_elements_of_a_json_list_are_what_json_returns(tmp_path, monkeypatch, chunk):
    """Integers of any size, floats, NaN, and halves of surrogate pairs (which the reader refuses
    as rows) must survive: a parser that replaces them would change the corpus silently."""
    monkeypatch.setattr(json_list, "_CHUNK", chunk)
    found = [
        element for _, element in json_list.list_elements(io.StringIO(VALUES), "a.json", 1 << 20)
    ]
    assert repr(found) == repr(json.loads(VALUES))  # repr: NaN != NaN, and 7 is not 7.0
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows(300))[:-1] + "," + VALUES[1:])
    _, (report,) = read(path)
    assert (report.rows, report.bad) == (304, 2)
    assert all("half of a surrogate pair" in example for example in report.bad_examples)


@pytest.mark.parametrize("chunk", [1, 1 << 20])
@pytest.mark.parametrize("between", ["", "\n\n "])
def test_what_follows_a_json_list_is_not_lost(tmp_path, monkeypatch, chunk, between):
    monkeypatch.setattr(json_list, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows(2)) + between + json.dumps(rows(3, 2)))
    line = 1 + between.count("\n")
    with pytest.raises(CorpusError, match=rf"a\.json:{line}: '\[.*follows the end of the list"):
        read(path)
