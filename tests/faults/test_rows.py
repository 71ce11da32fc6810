"""Campaign of odd corpus rows, in every kind of file.

For every file: the reader raises nothing but the documented errors; rows == records + bad rows; the
good rows among the odd ones arrive unchanged and in order; what can be rendered is a document, and
what cannot is refused and counted; every message and name can be stored. No exception is
unforeseen.
"""

import json
import re
from collections import Counter

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec import structs

from spec_data.corpus.bad_rows import parse_limit
from spec_data.corpus.chat import Renderer
from spec_data.corpus.documents import RenderError
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.records import parse_row
from spec_data.generation.plan import PlanWriter, truncate
from spec_data.shards.errors import CorpusError
from tests.faults.odd_rows import broken_bytes, good_row, odd_row
from tests.faults.tools import report, trials
from tests.spec_data.corpus.templates import tokenizer

LIMIT = 20_000  # bytes of a row
ROWS = 40  # of one file
LONG = pytest.mark.parametrize("times", [1, pytest.param(20, marks=pytest.mark.long)])
TEMPLATES = ("chatml", "qwen3", "llama3", "mistral", "gemma2", "tagged", "glm")


def rows_of_a_file(rng, broken: bool) -> tuple[list[bytes], list]:
    """Return the rows of a file, and the messages or text of the good ones, in order."""
    lines, good = [], []
    for i in range(ROWS):
        if rng.random() < 0.3:
            row = good_row(rng, f"good-{i}")
            record = parse_row(row, source="s", where="w")
            good.append(record.messages or record.text)
            lines.append(json.dumps(row, ensure_ascii=bool(rng.random() < 0.5)).encode())
        else:
            line = odd_row(rng)
            lines.append(broken_bytes(rng, line) if broken and rng.random() < 0.2 else line)
    return lines, good


def lines_of(whole: bytes) -> int:
    """Return the number of lines that are not blank."""
    lines = whole.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return sum(bool(line.strip()) for line in lines)


def unforeseen(reader) -> list[str]:
    """Return the examples of bad rows that no check foresees: an exception of another kind."""
    examples = (example for report in reader.reports for example in report.bad_examples)
    return [e for e in examples if re.search(r"(:\d+|row \d+): \w+Error: ", e)]


class Campaign:
    """Reads files, renders their records, checks the invariants and counts what happened."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.renderers = {t: Renderer(tokenizer(t)) for t in TEMPLATES}
        self.writer = PlanWriter()

    def read(self, path, rng, good: list | None = None, rows: int | None = None) -> None:
        """Read one file; `good` are its good rows, None if they are not known.

        `rows` is the number of its rows; without it the file may be refused after some rows.
        """
        renderer = self.renderers[TEMPLATES[int(rng.integers(len(TEMPLATES)))]]
        self.counts["files"] += 1
        reader = CorpusReader([str(path)], max_bad_rows=parse_limit("100%"), max_row_bytes=LIMIT)
        records, ended = [], ""
        try:
            for record in reader:
                records.append(record)
                self.render(renderer, reader, record)
        except CorpusError as error:
            ended = "without a good row" if "no usable row" in str(error) else "refused"
            self.counts[f"files {ended}"] += 1
            assert rows is None or ended == "without a good row", error
        assert not unforeseen(reader), reader.reports
        for found in reader.reports:
            assert found.rows == sum(found.formats.values()) + found.bad
            stored = json.dumps(structs.asdict(found), ensure_ascii=False)
            assert len(stored.encode()) < 50_000
        json.dumps(reader.refused_examples, ensure_ascii=False).encode()
        assert len(records) == sum(r.rows - r.bad for r in reader.reports)
        read = sum(r.rows for r in reader.reports)
        assert rows is None or read == rows
        self.counts["rows"] += read
        self.counts["bad rows"] += sum(r.bad for r in reader.reports)
        if good is not None:
            texts = [r.messages or r.text for r in records]
            found = [text for text in texts if "good-" in json.dumps(text)]
            assert found == (good[: len(found)] if ended == "refused" else good)
            self.counts["good rows kept"] += len(found)

    def render(self, renderer, reader, record) -> None:
        try:
            documents = renderer.render(record).documents
        except RenderError as error:
            assert error.reason != "unforeseen", error
            reader.refuse(error)
            self.counts[f"refused: {error.reason}"] += 1
            return
        self.counts["documents"] += len(documents)
        for document in documents:
            self.writer.add(truncate(document, 4096))

    def finish(self, folder) -> None:
        """Store the documents of the campaign as a plan, and print the counts."""
        if self.counts["documents"]:
            self.writer.finish()
        report(self.name, self.counts)


@LONG
def test_lines(tmp_path, times):
    campaign = Campaign("lines")
    for _, rng in trials(f"lines x{times}", 40 * times):
        lines, good = rows_of_a_file(rng, broken=True)
        path = tmp_path / "a.jsonl"
        whole = b"\n".join(lines) + (b"\n" if rng.random() < 0.5 else b"")
        path.write_bytes(whole)
        campaign.read(path, rng, good, lines_of(whole))
    campaign.finish(tmp_path)
    assert min(campaign.counts[what] for what in ("bad rows", "documents", "good rows kept")) > 99


ODD_COLUMNS = [
    pa.array(["a", None, "c"], pa.large_string()),
    pa.array(["a", None, "c"], pa.string_view()),
    pa.array(["a", "a", None]).dictionary_encode(),
    pa.array([b"a", b"\xff", None]),
    pa.array([b"a", b"\xff", b"b"], pa.binary()).view(pa.string()),
    pa.array([1, None, 2**62]),
    pa.array([1.5, float("nan"), None]),
    pa.array([2**62, -(2**62), 0], pa.timestamp("s")),
    pa.array([2**62, None, 0], pa.duration("s")),
    pa.array([2**31 - 1, None, 0], pa.date32()),
    pa.array([["a"], None, []]),
    pa.array([{"a": 1}, None, {"a": None}]),
    pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
    pa.nulls(3),
    pa.array([True, None, False]),
    pa.array([[{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]] * 3),
    pa.array([[{"role": "user", "content": b"q"}], None, [None]]),
    pa.array([[1, 2], [3], None], pa.list_(pa.int8())),
    pa.array([[1, 2], [300, -1], []], pa.large_list(pa.int64())),
    pa.array(["x" * LIMIT, "ok", "y" * (LIMIT + 1)]),
]
NAMES = ("messages", "conversations", "text", "input_ids", "prompt", "completion", "system")
NAMES += ("instruction", "output", "history", "tools", "chat_template_kwargs", "turns", "other")


@LONG
def test_columns_of_odd_types(tmp_path, times):
    """Parquet files and saved datasets whose columns have any type."""
    campaign = Campaign("columns")
    for _, rng in trials(f"columns x{times}", 60 * times):
        names = list(rng.choice(NAMES, int(rng.integers(1, 4))))  # a name may occur twice
        columns = [ODD_COLUMNS[int(rng.integers(len(ODD_COLUMNS)))] for _ in names]
        if "text" not in names and rng.random() < 0.5:  # beside a column that makes a document
            names, columns = [*names, "text"], [*columns, pa.array([f"text {i}" for i in range(3)])]
        table = pa.Table.from_arrays(columns, names)
        if rng.random() < 0.7 or len(set(names)) < len(names):
            path = tmp_path / "a.parquet"
            try:
                pq.write_table(table, path)
            except pa.ArrowException:
                continue  # a type that Parquet does not have
        else:
            path = tmp_path / "saved"
            try:
                datasets.Dataset(table).save_to_disk(path)
            except Exception:
                continue  # a type that datasets does not have
        campaign.read(path, rng, rows=3)
    campaign.finish(tmp_path)
    assert campaign.counts["documents"] and campaign.counts["bad rows"]
