"""The corpus reader: rows read == records + bad rows, for every kind of source."""

import bz2
import gzip
import io
import json
import os
from functools import partial

import datasets
import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.documents import RenderError
from spec_data.corpus.record_reader import CorpusReader
from spec_data.shards.errors import ConfigError, CorpusError, MissingError
from tests.spec_data.corpus.reading import pair, read, rows, sha, write_jsonl

# --- kinds of sources ---


def parquet(path, items):
    items[9]["messages"] = [dict(m, name="x") for m in items[9]["messages"]]
    pq.write_table(pa.Table.from_pylist(items), path, row_group_size=100)


def saved(path, items):
    datasets.Dataset.from_list(items).save_to_disk(path)


def zstd(path, items):
    """Write two frames, as tools that compress in parallel do."""
    write_jsonl(path, items)
    data = path.read_bytes()
    frames = [pa.Codec("zstd").compress(part) for part in (data[:9999], data[9999:])]
    path.write_bytes(b"".join(map(bytes, frames)))


KINDS = [  # (name, what writes it, kind, where the last of 600 rows is, what it is if it is cut)
    ("a.jsonl", write_jsonl, "jsonl", ":602", None),
    ("a.jsonl.gz", partial(write_jsonl, opener=gzip.open), "jsonl", ":602", "is cut off"),
    ("a.json.bz2", partial(write_jsonl, opener=bz2.open), "jsonl", ":602", "is cut off"),
    ("a.ndjson.zst", zstd, "jsonl", ":602", "is cut off"),
    ("a.parquet", parquet, "parquet", " row 599", "its rows cannot be read"),
    ("saved", saved, "hf dataset directory", " row 599", None),
]


@pytest.mark.parametrize(("name", "write", "kind", "last", "damaged"), KINDS)
def test_every_kind_of_source_holds_its_rows_in_order(tmp_path, name, write, kind, last, damaged):
    path, items = tmp_path / name, [r | {"blob": "unused"} for r in rows(600)]
    write(path, [items[0], "", " ", *items[1:]] if kind == "jsonl" else items)
    records, (report,) = read(path)
    assert [r.messages for r in records] == [item["messages"] for item in items]
    assert records[-1].where == f"{path}{last}" and {r.source for r in records} == {name}
    facts = (report.source, report.kind, report.format, report.rows, report.unused_columns)
    assert facts == (name, kind, "messages", 600, ["blob"])
    assert len(report.sha256) == 64 if path.is_dir() else report.sha256 == sha(path)
    if damaged is not None:
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(CorpusError, match=damaged):
            read(path)


def test_what_datasets_stores_as_json_is_read_as_lines_of_json_are(tmp_path):
    """A field that has another type in another row: schemas and arguments of tools."""

    def row(kind, arguments):
        schema = {"type": "object", "properties": {"city": {"type": kind}}}
        call = {"type": "function", "function": {"name": "get", "arguments": arguments}}
        return {
            "messages": [*pair(0)[:1], {"role": "assistant", "content": "", "tool_calls": [call]}],
            "tools": [{"type": "function", "function": {"name": "get", "parameters": schema}}],
        }

    items = [row("string", {"city": "Paris"}), row({"const": None}, {"city": 3})]
    file = write_jsonl(tmp_path / "rows.jsonl", items)
    loaded = datasets.load_dataset(
        "json", data_files=file, split="train", cache_dir=str(tmp_path / "cache")
    )
    assert "Json" in str(loaded.features), "the test shows nothing"
    loaded.save_to_disk(tmp_path / "saved")
    loaded.to_parquet(tmp_path / "rows.parquet")
    wanted = [(r.messages, r.tools) for r in read(file)[0]]
    for path in (tmp_path / "saved", tmp_path / "rows.parquet"):
        assert [(r.messages, r.tools) for r in read(path)[0]] == wanted
    table = pq.read_table(tmp_path / "rows.parquet")
    place = table.schema.get_field_index("messages")
    texts = pa.ExtensionArray.from_storage(pa.json_(), pa.array(["{", "[", "{"]))
    broken = pa.ListArray.from_arrays([0, 2, 3], texts)
    pq.write_table(table.set_column(place, "messages", broken), tmp_path / "broken.parquet")
    with pytest.raises(CorpusError, match=r"2 of 2 rows are bad(.|\n)*row 0: not valid JSON"):
        read(tmp_path / "broken.parquet")


def test_a_split_that_is_named_is_read_alone(tmp_path):
    """As Hub repositories name them: HuggingFaceH4/ultrachat_200k, Nemotron's chat, code, math."""
    (tmp_path / "data").mkdir()
    for name in ("train_sft", "train_gen", "test_sft", "chat", "chatty"):
        write_jsonl(tmp_path / "data" / f"{name}-00000-of-00001.jsonl", rows(1))
    for split in ("train_sft", "test_sft", "chat"):
        reader = CorpusReader([f"{tmp_path}@{split}"])
        assert [s.name for s in reader.sources] == [f"data/{split}-00000-of-00001.jsonl"]
    for split in ("stem", "train_sft[:2]"):
        with pytest.raises(CorpusError, match="no file of split"):
            CorpusReader([f"{tmp_path}@{split}"])


def test_splits_of_a_saved_dataset(tmp_path):
    parts = {"train": rows(5), "test": rows(2, 7)}
    parts = {name: datasets.Dataset.from_list(items) for name, items in parts.items()}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "two")
    assert read(tmp_path / "two")[1][0].source == "two@train"
    records, (report,) = read(f"{tmp_path / 'two'}@test")
    assert report.source == "two@test"
    assert [r.messages for r in records] == [pair(7), pair(8)]
    with pytest.raises(CorpusError, match="no split 'dev'"):
        read(f"{tmp_path / 'two'}@dev")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('[{"text": "a"},\n {"text": }]', r"a\.json:2: not valid JSON"),
        ('[{"text": "a"},\n {"text": "b"}\n {"text": "c"}]', r"a\.json:3: .*delimiter"),
        ('[{"text": "a"},\n {"text": "b"}', r"a\.json:2: not valid JSON"),
        ('[{"text": "a"},\n "b', r"a\.json:2: not valid JSON: Unterminated"),
        (json.dumps(rows(2)) + "\n\n " + json.dumps(rows(3, 2)), r"a\.json:3: .*Extra data"),
    ],
)
def test_what_is_no_json_list_is_refused_by_its_line(tmp_path, text, problem):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(CorpusError, match=problem):
        read(path)


@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_a_large_element_of_a_list_is_a_bad_row(tmp_path, name):
    elements = [{"text": "a"}, {"text": "é" * 100}, 7, {"text": "b"}, "x" * 200]
    content = json.dumps(elements, indent=1).encode()
    path, limits = tmp_path / name, {"max_row_bytes": 150, "max_bad_rows": parse_limit("100%")}
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    records, (report,) = read(path, **limits)
    assert [(r.text, r.where) for r in records] == [("a", f"{path} row 0"), ("b", f"{path} row 3")]
    assert (report.rows, report.bad, report.sha256) == (5, 3, sha(path))
    assert f"{name} row 1: 211 bytes, more than the 150 of" in report.bad_examples[0]


def test_nulls_that_arrow_adds_to_structs_are_removed(tmp_path):
    path = tmp_path / "a.parquet"
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    tools = [{"name": "w", "city": "Paris"}, {"name": "v", "unit": "C"}]
    pq.write_table(pa.Table.from_pylist([{"messages": messages, "tools": tools}]), path)
    (record,), _ = read(path)
    assert [tool["function"] for tool in record.tools or ()] == tools


def test_a_text_file_is_split_at_blank_lines(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n \none line\n  and\r\n\r\n\t\n" + b"x" * 99 + b"\n\n\xff\n\nlast\n")
    limits = {"max_row_bytes": 50, "max_bad_rows": parse_limit("2")}
    records, (report,) = read(path, **limits)
    found = [(r.text, r.where) for r in records]
    assert found == [("one line\n  and", f"{path}:3"), ("last", f"{path}:11")]
    assert (report.rows, report.bad, report.sha256) == (4, 2, sha(path))
    long, damaged = report.bad_examples
    assert long.startswith("a.txt:7: 100 bytes") and damaged.startswith("a.txt:9: not UTF-8")


CSV = b'''\xef\xbb\xbfquestion,answer,system,id
"two
lines","say ""yes""",,1
q,a,s,2

short,row
\xff,a,,3
q,"a record of
more than the limit, in ""lines"",
q,a,,",4
"""last""",z,,6
q,"never closed,,7
x,y,,8
'''


def test_csv_rows_are_those_of_pandas_and_bad_ones_are_counted(tmp_path):
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(CSV))
    limits = {"max_row_bytes": 30, "max_bad_rows": parse_limit("5")}
    records, (report,) = read(path, **limits)
    found = [[m["content"] for m in r.messages] for r in records]
    assert found == [["two\nlines", 'say "yes"'], ["s", "q", "a"], ['"last"', "z"]]
    assert [r.where for r in records] == [f"{path}:{n}" for n in (3, 4, 11)]
    assert (report.kind, report.format) == ("csv", "question+answer")
    assert (report.rows, report.bad, report.unused_columns) == (8, 5, ["id"])
    reasons = [example.partition(": ")[2] for example in report.bad_examples]
    assert [r[:11] for r in reasons[:2]] == ["2 cells und", "messages ha"]
    assert reasons[2].endswith("more than the 30 of --max-row-bytes")
    assert reasons[3:] == ["after a quote, on line 12, that nothing closes"]
    table = pandas.read_csv(io.BytesIO(CSV[: CSV.index(b"short")]), dtype=str)
    pandas_rows = table.where(table.notna(), None).to_dict("records")
    assert [[r["question"], r["answer"]] for r in pandas_rows] == [f[-2:] for f in found[:2]]


def test_a_csv_file_whose_first_rows_are_too_long(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("question,answer\n" + "q" * 9 + "," + "a" * 9 + "\nq,a\n")
    records, (report,) = read(path, max_row_bytes=18, max_bad_rows=parse_limit("1"))
    assert len(records) == 1 and "19 bytes, more than the 18" in report.bad_examples[0]
    path.write_text("q" * 19)  # no header
    with pytest.raises(CorpusError, match=r"no header .*19 bytes, more than the 18"):
        read(path, max_row_bytes=18)


@pytest.mark.parametrize("lines", [20, 2000])  # far beyond the limit, no more of it is read
def test_the_rest_of_a_long_csv_cell_is_no_row(tmp_path, lines):
    path = tmp_path / "a.csv"
    path.write_text('text\na\n"' + "line, of it\n" * lines + 'end"\nb\n"c\nd"\n5" pipe')
    records, (report,) = read(path, max_row_bytes=100, max_bad_rows=parse_limit("1"))
    assert [r.text for r in records] == ["a", "b", "c\nd", '5" pipe']
    assert [r.where for r in records][1:] == [f"{path}:{lines + n}" for n in (4, 6, 7)]
    assert (report.rows, report.bad) == (5, 1)
    cell = '"' + "line, of it\n" * lines + 'end"'
    path.write_text(f'question,answer\n5" pipe,{cell}\na,b\n{cell},5" pipe\nc,d\n')
    records, (report,) = read(path, max_row_bytes=100, max_bad_rows=parse_limit("2"))
    assert [r.messages[0]["content"] for r in records] == ["a", "c"]
    assert (report.rows, report.bad) == (4, 2)
    path.write_text('question,"answer\n' + "a,b\n" * lines * 100)
    with pytest.raises(CorpusError, match="no header of a CSV file: nothing closes its quote"):
        read(path, max_row_bytes=100)


def test_a_directory_is_read_sorted_and_without_other_splits(tmp_path, caplog):
    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train-1.jsonl", rows(2, 2))
    write_jsonl(tmp_path / "data" / "train-0.jsonl", rows(2))
    write_jsonl(tmp_path / "data" / "test-0.jsonl", rows(9))
    write_jsonl(tmp_path / "more.jsonl", rows(1, 4))
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\nA card.\n")
    reader = CorpusReader([str(tmp_path)])
    for _ in range(2):  # it may be read twice
        assert [r.messages for r in reader] == [pair(i) for i in range(5)]
    names = ["data/train-0.jsonl", "data/train-1.jsonl", "more.jsonl"]
    assert [r.source for r in reader.reports] == names
    assert reader.reports[0].path == str(tmp_path / "data/train-0.jsonl")
    assert {r.licence for r in reader.reports} == {"mit"}
    assert caplog.text.count("left out: by its name") == caplog.text.count("test-0.jsonl: l") == 1
    assert caplog.text.count("warning[split]") == 1
    records, _ = read(str(tmp_path), split="test")
    assert len(records) == 10  # test-0 and the file of no split


def test_a_directory_follows_links_and_names_what_it_cannot_read(tmp_path, caplog):
    other, corpus = tmp_path / "other", tmp_path / "corpus"
    (corpus / "sub").mkdir(parents=True)
    other.mkdir()
    write_jsonl(other / "b.jsonl", rows(2))
    write_jsonl(corpus / "a.jsonl", rows(1))
    (corpus / "link").symlink_to(other)
    (corpus / "sub" / "loop").symlink_to(corpus)
    (corpus / "again").symlink_to(other)
    (corpus / "0").symlink_to(corpus / "sub")  # a folder has its own name
    write_jsonl(corpus / "sub" / "c.jsonl", rows(1, 3))
    for name in ("c.jsonl.xz", "d.tsv", "e.csv.zip", ".hidden.jsonl.zst", "notes.md"):
        (corpus / name).write_text("x")
    reader = CorpusReader([str(corpus)])
    assert len(list(reader)) == 4
    assert [r.source for r in reader.reports] == ["a.jsonl", "again/b.jsonl", "sub/c.jsonl"]
    named = [r.getMessage() for r in caplog.records if "warning[files]" in r.getMessage()]
    assert [n.split(": ")[1] for n in named] == [
        str(corpus / name) for name in ("c.jsonl.xz", "d.tsv", "e.csv.zip")
    ]


def links_named(caplog) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if "warning[links]" in r.getMessage()]
    caplog.clear()
    return [line.split(": ")[1] for line in lines]


def test_rows_of_a_corpus_folder_that_lie_elsewhere_are_named(tmp_path, caplog):
    """A folder of a stranger can have links to any file of this machine."""
    corpus, private = tmp_path / "corpus", tmp_path / "private"
    (corpus / "data").mkdir(parents=True)
    private.mkdir()
    write_jsonl(corpus / "data" / "a.jsonl", rows(1))
    write_jsonl(private / "mine.jsonl", rows(2))
    read(corpus)
    assert not links_named(caplog)
    (corpus / "b.jsonl").symlink_to(private / "mine.jsonl")
    (corpus / "c").symlink_to(private)
    (corpus / "d.jsonl").symlink_to(corpus / "data" / "a.jsonl")  # inside
    (corpus / "e.txt").symlink_to(private / "gone")
    (corpus / "f.test.jsonl").symlink_to(private / "mine.jsonl")  # another split: not read
    os.mkfifo(corpus / "g.jsonl")
    records, _ = read(corpus)
    assert len(records) == 1 + 1 + 2 + 2
    lost = [
        r.getMessage().partition(": ")[2] for r in caplog.records if "[files]" in r.getMessage()
    ]
    assert lost == [
        f"{corpus / 'e.txt'}: left out: a link to nothing",
        f"{corpus / 'g.jsonl'}: left out: no regular file",
    ]
    assert (
        f"warning[links]: {corpus / 'b.jsonl'}: a link to {private / 'mine.jsonl'}" in caplog.text
    )
    assert links_named(caplog) == [str(corpus / "b.jsonl"), str(corpus / "c" / "mine.jsonl")]

    cache = tmp_path / "datasets--me--chats"  # as huggingface_hub lays it out
    (cache / "snapshots" / "abc").mkdir(parents=True)
    (cache / "blobs").mkdir()
    write_jsonl(cache / "blobs" / "0f", rows(1))
    (cache / "snapshots" / "abc" / "train.jsonl").symlink_to("../../blobs/0f")
    assert len(read(cache / "snapshots" / "abc")[0]) == 1 and not links_named(caplog)


def test_rows_of_a_saved_dataset_that_lie_elsewhere_are_named(tmp_path, caplog):
    for name in ("mine", "saved"):
        datasets.Dataset.from_list(rows(2)).save_to_disk(tmp_path / name)
    read(tmp_path / "saved")
    assert not links_named(caplog)
    state = tmp_path / "saved" / "state.json"
    (mine,) = (tmp_path / "mine").glob("*.arrow")
    state.write_text(state.read_text().replace(mine.name, f"../mine/{mine.name}"))
    assert len(read(tmp_path / "saved")[0]) == 2
    assert len(links_named(caplog)) == 1


def test_hub_names(tmp_path, monkeypatch):
    """`datasets.load_dataset("me/chats")` without the Hub: the name resolves to a directory."""
    (tmp_path / "repo").mkdir()
    write_jsonl(tmp_path / "repo" / "train.jsonl", rows(4))
    write_jsonl(tmp_path / "repo" / "test.jsonl", rows(2, 4))
    load, asked = datasets.load_dataset, []

    def load_dataset(name, config=None, **options):
        asked.append((name, config, options["split"]))
        return load(str(tmp_path / "repo"), config, cache_dir=str(tmp_path / "cache"), **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.chdir(tmp_path)
    records, (report,) = read("me/chats")
    assert [r.messages for r in records] == [pair(i) for i in range(4)]
    assert records[3].where == "me/chats row 3" and report.sha256
    assert (report.source, report.kind, report.format) == ("me/chats", "hf dataset", "messages")
    assert len(read("me/chats:default@test")[0]) == 2
    assert asked == [("me/chats", None, "train"), ("me/chats", "default", "test")]
    with pytest.raises(CorpusError, match=r"me/chats@dev.*(.|\n)*NAME@SPLIT"):
        read("me/chats@dev")


@pytest.mark.parametrize(
    ("names", "error", "words"),
    [
        (["missing.jsonl"], MissingError, "no such file or directory"),
        (["./missing"], MissingError, "no such file or directory"),
        (["a.jsonl", "a/b/c"], MissingError, "no such file or directory"),
        (["a.xlsx"], CorpusError, "unknown kind of file"),
        (["none"], CorpusError, "no file of split"),
        (["odd"], CorpusError, r"caf.\.jsonl: its name is not UTF-8"),
        ([], ConfigError, "no corpus"),
    ],
)
def test_what_is_no_source_is_refused_at_once(names, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "a.jsonl", rows(1))
    (tmp_path / "a.xlsx").touch()
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.xlsx").touch()
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / os.fsdecode(b"caf\xe9.jsonl")).touch()
    with pytest.raises(error, match=words):
        CorpusReader(names)


def test_stored_names_do_not_depend_on_how_a_path_is_written(tmp_path, monkeypatch):
    (tmp_path / "chats").mkdir()
    write_jsonl(tmp_path / "chats" / "a.jsonl", rows(1))
    monkeypatch.chdir(tmp_path / "chats")
    for spelling in ("a.jsonl", "./a.jsonl", "../chats/a.jsonl", str(tmp_path / "chats/a.jsonl")):
        records, (report,) = read(spelling)
        assert records[0].source == report.source == "a.jsonl"
        assert records[0].where == f"{spelling}:1"
    for spelling in (".", "../chats", str(tmp_path / "chats"), f"{tmp_path / 'chats'}@train"):
        assert read(spelling)[1][0].source == "a.jsonl"


# --- bad rows ---


def refused(path, reason, every, **options):
    """Read `path` and refuse one record in `every`."""
    reader = CorpusReader([str(path)], **options)
    for i, record in enumerate(reader):
        if i % every == every - 1:
            reader.refuse(RenderError(reason, f"{record.where}: no"))
    return reader


def test_rows_that_break_when_rendered_are_bad_rows(tmp_path, caplog):
    path = tmp_path / "a.jsonl"
    write_jsonl(path, [*rows(600), "{"])
    caplog.set_level("INFO")
    reader = refused(path, "template-error", 120)
    (report,) = reader.reports
    assert (report.bad, report.unrendered) == (1, 5)
    assert reader.refused == {"template-error": 5}
    assert reader.refused_examples["template-error"][0] == "a.jsonl:120: no"
    assert caplog.text.count(f"rows skipped: {path}:") == 2  # one for each reason
    assert f"warning[bad-rows]: 6 bad rows skipped: {path}:120: no" in caplog.text
    with pytest.raises(CorpusError, match=rf"11 of 601 rows are bad.*\n  {path}:60: no"):
        refused(path, "template-error", 60)
    with pytest.raises(CorpusError, match=r"101 of 101 rows are bad"):
        refused(path, "unprovable-boundaries", 1)
    with pytest.raises(CorpusError, match=rf"{path}:80: no\nfix the row"):
        refused(path, "template-error", 80, max_bad_rows=parse_limit("0"))


def test_rows_without_anything_to_learn_are_counted_only(tmp_path, caplog):
    reason = "nothing-supervised"
    path = tmp_path / "a.jsonl"
    write_jsonl(path, rows(300))
    caplog.set_level("INFO")
    reader = refused(path, reason, 1, max_bad_rows=parse_limit("0"))
    assert reader.refused == {reason: 300} and reader.reports[0].unrendered == 0
    assert len(reader.refused_examples[reason]) == caplog.text.count("row left out") == 1


# --- order and limit ---


def test_limit_counts_records_over_all_sources_and_hashes_whole_files(tmp_path):
    a, b, c = (tmp_path / f"{n}.jsonl" for n in "abc")
    write_jsonl(a, rows(3))
    write_jsonl(b, rows(500, 3))
    write_jsonl(c, rows(3))
    records, reports = read(a, b, c, limit=5)
    assert [r.messages for r in records] == [pair(i) for i in range(5)]
    assert [r.rows for r in reports] == [3, 2]
    assert [r.sha256 for r in reports] == [sha(a), sha(b)]
    _, reports = read(a, b, limit=3)
    assert [r.rows for r in reports] == [3]
