"""Rows far above --max-row-bytes: each is one bad row, and memory does not grow with it.

The readers move along a file by pieces. They are compared with readers of the whole file, on random
files whose quotes, brackets and ends of lines fall anywhere on the edges of the pieces.
"""

import csv
import gzip
import io
import json
import random
import tracemalloc

import pytest

from spec_data.corpus import file_rows, json_list
from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.file_rows import JsonText, csv_rows, json_lines, paragraphs
from spec_data.shards.errors import CorpusError

LIMIT, LONG = 50_000, 24 << 20
MOST = 4 * LIMIT + 4096
HEAD = {
    "a.jsonl.gz": '{"text": "first"}\n{"text": "',
    "a.json.gz": '[{"text": "first"}, {"text": "',
    "a.csv.gz": 'text\nfirst\n"',
    "plain.csv.gz": "text\nfirst\n",
    "a.txt.gz": "first\n\n",
    "lines.txt.gz": "first\n\n",
}
TAIL = {
    "a.jsonl.gz": '"}\n{"text": "last"}\n',
    "a.json.gz": '"}, {"text": "last"}]',
    "a.csv.gz": '"\nlast\n',
    "plain.csv.gz": "\nlast\n",
    "a.txt.gz": "\n\nlast\n",
    "lines.txt.gz": "\n\nlast\n",
}
READERS = {"jsonl": json_lines, "json": json_list.json_list, "csv": csv_rows, "txt": paragraphs}


def texts(reader, path, limit=LIMIT):
    """Return the texts of rows, None for bad ones."""
    found = []
    for _, row in reader(path.name, path, limit):
        row = json.loads(row) if isinstance(row, JsonText) else row
        found.append(None if isinstance(row, BadRow) else row["text"])
    return found


@pytest.mark.parametrize("name", HEAD)
def test_memory_does_not_grow_with_a_row(tmp_path, name):
    """24 MB in one row of some kB on disk; once they were all in memory, several times."""
    path, filler = tmp_path / name, b"x" * 99
    filler += b"\n" if name.startswith("lines") else b"x"
    with gzip.open(path, "wb", 1) as file:
        file.write(HEAD[name].encode())
        for _ in range(LONG // (100 << 10)):
            file.write(filler * 1024)
        file.write(TAIL[name].encode())
    reader = READERS[name.split(".")[1]]
    tracemalloc.start()
    try:
        found, peak = texts(reader, path), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert found == ["first", None, "last"] and peak < LONG / 4


def whole_csv(content: str, limit: int):
    csv.field_size_limit((1 << 31) - 1)
    table = list(csv.reader(io.StringIO(content, newline="")))
    rows = [cells for cells in table[1:] if cells]
    return [tuple(cells) if len(",".join(cells).encode()) <= limit else None for cells in rows]


def random_csv(rng) -> str:
    """Cells of quotes, commas, ends of lines and letters; some far beyond the bound."""
    lines = ["a,b"]
    for _ in range(rng.randint(1, 6)):
        cells = []
        for _ in range(2):
            count = rng.choice([0, 3, 9, 40, MOST // 2, 2 * MOST])
            part = "".join(rng.choices('x,"\n\ré', k=rng.randint(1, 7)))
            text = (part * count)[: rng.randint(0, count + 3)]
            plain = text.translate({ord(c): "-" for c in ",\n\r"}).lstrip('"')
            quoted = '"' + text.replace('"', '""') + '"'
            cells.append(rng.choice([plain, quoted, quoted + "rest"]))
        lines.append(",".join(cells))
    return "\n".join(lines) + rng.choice(["", "\n"])


def test_csv_files_are_read_as_from_memory(tmp_path):
    rng, path, long = random.Random(0), tmp_path / "a.csv", 0
    for _ in range(40):
        content = random_csv(rng)
        path.write_text(content, newline="")
        found = []
        for _, row in csv_rows("a.csv", path, LIMIT):
            bad = isinstance(row, BadRow)
            found.append(None if bad else (row.get("a", ""), row.get("b", "")))
        assert found == whole_csv(content, LIMIT)
        long += found.count(None)
    assert long > 40


def random_value(rng, depth=0):
    kind = rng.randrange(7 if depth < 4 else 5)
    if kind < 3:
        return "".join(rng.choices('x"\\[]{},:é \n', k=rng.choice([0, 3, 30, 3000])))
    if kind == 3:
        return rng.choice([None, True, -1.5e-7, 12345678, 0])
    if kind == 4:
        return "y" * rng.choice([1, 100, 30_000])
    values = [random_value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return values if kind == 5 else {f"k{i}": value for i, value in enumerate(values)}


def test_lists_are_read_as_from_memory(tmp_path, monkeypatch):
    rng, path, long, limit = random.Random(0), tmp_path / "a.json", 0, 100
    for _ in range(150):
        monkeypatch.setattr(json_list, "_CHUNK", rng.randint(1, 40))
        elements = [random_value(rng) for _ in range(rng.randrange(6))]
        path.write_text(
            rng.choice(["", "\ufeff", " \n"])
            + json.dumps(elements, indent=rng.choice([None, 0, 3]), ensure_ascii=rng.random() < 0.5)
            + rng.choice(["", " \n"]),
        )
        found = [row for _, row in json_list.json_list("a", path, limit)]
        for element, row in zip(elements, found, strict=True):
            size = len(json.dumps(element, ensure_ascii=False, separators=(",", ":")).encode())
            assert isinstance(row, BadRow) if size > limit else row == element
            long += size > 4 * limit + 4096
    assert long > 30


def test_a_cut_list_is_refused_after_its_whole_elements(tmp_path, monkeypatch):
    path, content = tmp_path / "a.json", json.dumps([{"text": 'a"\\['}, [1, 2.5], "x" * 9000, True])
    for end in range(1, len(content)):
        if 50 < end < len(content) - 20:
            continue
        monkeypatch.setattr(json_list, "_CHUNK", 1 + end % 5)
        path.write_text(content[:end])
        with pytest.raises(CorpusError, match="a:1: not valid JSON"):
            list(json_list.json_list("a", path, 100))


def test_lines_and_paragraphs_on_the_edges_of_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(file_rows, "_PIECE", 3)
    path = tmp_path / "a.txt"
    for size in range(1, 20):
        path.write_text("a" * size + "\n\n" + " " * size + "\nb\n" + "c" * size)
        found = texts(paragraphs, path, 8)
        last = f"b\n{'c' * size}"
        assert found == ["a" * size if size < 8 else None, last if size < 7 else None]
        path.write_text(f'{{"text":"{"a" * size}"}}\n\n{{"text":"b"}}')
        found = texts(json_lines, path, 20)
        assert found == ["a" * size if size <= 9 else None, "b"]
