"""Rows and files that once ended a run: each is one counted bad row, in bounded memory."""

import json
import re
import tracemalloc

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import parse_row
from spec_data.shards.errors import CorpusError
from tests.spec_data.corpus.reading import pair, read, rows, sha, write_jsonl

ALL = parse_limit("100%")
QA = json.dumps(pair(0))
ODD = [  # (row as it is in the file, the reason)
    ('{"text": "a", "n": ' + "7" * 4301 + "}", "not valid JSON: .*4300"),
    ('{"text": ' + "[" * 5000 + "]" * 5000 + "}", "not valid JSON: .*recursion"),
    ('{"text": "a", "turns": ' + "[" * 400 + "]" * 400 + "}", "nested more than 200 deep"),
    ('{"messages": ' + QA[:-1] + ', {"\\ud800": 1}]}', "unknown role"),
    (json.dumps({"instruction": "q", "output": "a", "history": 5}), "history is a number, not a"),
    (json.dumps({"instruction": "q", "output": "a", "input": 5}), "input is a number, not text"),
    ('{"text": "a", "\\udc80": 1}', "name of a column has half of a surrogate pair"),
    ('{"messages": ' + QA + ', "tools": [{"a": ["\\ud800"]}]}', "tools has half of a surrogate"),
    ('{"messages": ' + QA + ', "chat_template_kwargs": "{\\"\\\\udfff\\": 1}"}', "template_kwargs"),
    ('{"what\\u001b[2J": 1}', r"no known columns \(found: what\\x1b\[2J"),
    ('{"' + "k" * 9000 + '": 1}', "no known columns"),
]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_each_is_one_bad_row_among_good_ones(tmp_path, name):
    """With its place and reason, as a line and as an element of a list; the good rows stay."""
    path, lines = tmp_path / name, []
    for i, (row, _) in enumerate(ODD):
        lines += [json.dumps(rows(1, i)[0]), row]
    good = [r["messages"] for r in rows(len(ODD))]
    path.write_text("\n".join(lines) if name == "a.jsonl" else "[" + ",\n".join(lines) + "]")
    records, (report,) = read(path, max_bad_rows=ALL)
    assert [r.messages for r in records] == good
    assert (report.bad, report.sha256) == (len(ODD), sha(path))
    for row, reason in ODD:
        path.write_text(row if name == "a.jsonl" else f"[{row}]")
        reader = CorpusReader([str(path)], max_bad_rows=ALL)
        with pytest.raises(CorpusError, match="no usable row"):
            list(reader)
        (example,) = reader.reports[0].bad_examples
        example.encode()  # as the manifest stores it
        assert example.startswith(f"{name}:1: " if name == "a.jsonl" else f"{name} row 0: ")
        assert len(example) < 450 and re.search(reason, example), (reason, example)


def test_what_no_check_foresees_is_a_bad_row_and_named_with_its_type(tmp_path):
    def parse(row, **where):
        if row["text"] == "bomb":
            raise ZeroDivisionError("by a row")
        return parse_row(row, **where)

    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "good"}] * 20 + [{"text": "bomb"}])
    records, (report,) = read(path, parse=parse)
    assert len(records) == 20
    assert report.bad_examples == ["a.jsonl:21: ZeroDivisionError: by a row"]


# --- long rows ---


def test_a_line_over_the_limit_is_a_bad_row(tmp_path):
    path = tmp_path / "a.jsonl"
    most, long = (json.dumps({"text": "x" * (size - 12)}) + "\n" for size in (100, 101))
    path.write_bytes(f'{{"text": "a"}}\n{long}{most}{long}'.encode() + b'{"text": "\xff"}\n')
    records, (report,) = read(path, max_row_bytes=100, max_bad_rows=ALL)
    assert [r.where.rpartition(":")[2] for r in records] == ["1", "3"]
    assert (report.bad, report.sha256) == (3, sha(path))
    assert "a.jsonl:5: not UTF-8" in report.bad_examples[1]
    assert "a.jsonl:2: 101 bytes, more than the 100 of" in report.bad_examples[0]


SIZE = 24 << 20


def test_a_huge_parquet_cell_never_becomes_python_objects(tmp_path):
    path = tmp_path / "a.parquet"
    table = pa.table({"text": ["good", "x" * SIZE, "better"]})
    pq.write_table(table, path, compression="zstd")
    del table
    reader = CorpusReader([str(path)], max_row_bytes=1 << 20, max_bad_rows=ALL)
    tracemalloc.start()
    try:
        records, peak = list(reader), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [r.text for r in records] == ["good", "better"]
    assert "row 1: 25,165,8" in reader.reports[0].bad_examples[0] and peak < 8 << 20


def test_a_large_row_group_of_long_rows_is_not_unpacked(tmp_path):
    """8 MB in a file of some kB; the groups around it are read."""
    path, size = tmp_path / "a.parquet", 8 << 20
    table = pa.table({"text": ["good", "x" * size, "lost", "better"], "other": [None] * 4})
    with pq.ParquetWriter(path, table.schema, compression="zstd") as writer:
        for start, count in ((0, 1), (1, 2), (3, 1)):
            writer.write_table(table.slice(start, count))
    del table
    default = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(default)
    pa.set_memory_pool(pool)
    try:
        records, (report,) = read(path, max_row_bytes=10_000, max_bad_rows=ALL)
    finally:
        pa.set_memory_pool(default)
    assert [r.text for r in records] == ["good", "better"] and report.bad == 2
    assert "row 1: in a row group of 8,388,6" in report.bad_examples[0]
    assert pool.max_memory() < size // 4


def test_rows_that_arrow_cannot_convert_are_bad_rows(tmp_path):
    path = tmp_path / "a.parquet"
    text = pa.array([b"good", b"\xff", b"fine"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": text}), path)
    records, (report,) = read(path, max_bad_rows=ALL)
    assert [r.text for r in records] == ["good", "fine"] and report.bad == 1
    pq.write_table(pa.table({"text": pa.array([b"bytes"])}), path)
    reader = CorpusReader([str(path)], max_bad_rows=ALL)
    with pytest.raises(CorpusError, match="no usable row"):
        list(reader)
    assert "text is bytes, not text" in reader.reports[0].bad_examples[0]


# --- directories of datasets ---


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("dataset_info.json", '{"features": {"text": {"_type": "Nonsense"}}}'),
        ("state.json", '{"_data_files": [{"filename": "gone.arrow"}]}'),
        ("dataset_dict.json", "{}"),
        ("data-00000-of-00001.arrow", "\xff\xff\xff\xff"),
    ],
)
def test_a_broken_dataset_directory_is_refused(tmp_path, file, content):
    saved = datasets.Dataset.from_list(rows(2))
    if file == "dataset_dict.json":
        saved = datasets.DatasetDict(train=saved)
    saved.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / file).write_text(content)
    with pytest.raises(CorpusError, match=r"saved: (datasets cannot open it|no split)"):
        read(tmp_path / "saved")


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_rows_without_a_known_column_are_counted(tmp_path, kind):
    """A saved dataset without one once had no rows at all, neither good nor bad."""
    table = pa.table({"query": ["a", "b", "c"], "reply": ["d", "e", "f"]})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "kind")
        (tmp_path / "kind").rename(path := tmp_path / "a.parquet")
    else:
        datasets.Dataset(table).save_to_disk(path := tmp_path / "saved")
    with pytest.raises(CorpusError, match=r"3 of 3 rows are bad(.|\n)*found: query, reply;"):
        read(path)


def test_the_names_of_unused_columns_are_bounded(tmp_path, caplog):
    caplog.set_level("INFO")
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [{"text": "a", f"column {i}": 1, "x" * 9000: 1} for i in range(300)])
    _, (report,) = read(path)
    assert len(report.unused_columns) == 100 and len(str(report.unused_columns)) < 3000
    assert len(caplog.text) < 2000
