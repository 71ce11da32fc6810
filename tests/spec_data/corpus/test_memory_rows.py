"""Rows that a program holds are a corpus: the same documents as from a file, with a hash."""

import json
from dataclasses import replace

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import spec_data
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.reader import open_dataset
from spec_data.terminal import memory_rows
from spec_data.terminal.kept import forgotten
from tests.spec_data.runs import save_target, write_corpus

OPTIONS = CaptureOptions(layers="0", codec="bf16", allow_high_nll=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


class Polars(list):
    """What is read of a table of polars, whose iteration gives columns."""

    def __iter__(self):
        raise AssertionError

    def to_dicts(self):
        return self[:]


def test_missing_cells_are_no_values_and_dates_are_texts():
    rows = [{"text": "a", "weight": 0.0}, {"text": "b", "on": pd.Timestamp("2026-01-02")}]
    with forgotten():
        (name,) = memory_rows.named(pd.DataFrame(rows))
        lines = [json.loads(line) for line in memory_rows.lines_of(name)]
    assert lines == [rows[0], {"text": "b", "on": "2026-01-02T00:00:00"}]


def test_rows_in_memory_are_the_documents_of_their_file(tmp_path, target):
    path = write_corpus(tmp_path / "a.jsonl", 8)
    rows = rows_of(path)
    spec_data.generate(target, path, tmp_path / "file", OPTIONS)
    wanted = open_dataset(tmp_path / "file")
    forms = {
        "list": rows,
        "generator": (row for row in rows),
        "table": datasets.Dataset.from_list(rows),
        "numpy": [{"messages": np.array(row["messages"])} for row in rows],
        "pandas": pd.DataFrame(rows),
        "arrow": pa.Table.from_pylist(rows),
        "polars": Polars(rows),
    }
    for name, given in forms.items():
        spec_data.generate(target, given, tmp_path / name, OPTIONS)
        found = open_dataset(tmp_path / name)
        assert found.id_array.to_pylist() == wanted.id_array.to_pylist(), name
        (source,) = found.manifest.corpus
        assert (source.source, source.kind, source.rows) == ("memory", "rows in memory", 8)
    assert not memory_rows._kept, "rows are kept while the command runs"


def test_equal_rows_resume_and_others_are_refused(tmp_path, target):
    rows = rows_of(write_corpus(tmp_path / "a.jsonl", 4))
    made = spec_data.generate(target, rows, tmp_path / "d", OPTIONS)
    again = spec_data.generate(target, [dict(row) for row in rows], tmp_path / "d", OPTIONS)
    assert made.sealed and again.sealed
    with pytest.raises(ConfigError, match="corpus"):
        spec_data.generate(target, rows[:2], tmp_path / "d", OPTIONS)


def test_columns_are_a_setting_of_a_run(tmp_path, target):
    rows = [{"ask": f"q{i}", "say": f"a{i}", "who": "s"} for i in range(3)]
    forms = ("prompt=ask,answer=say", {"prompt": "ask", "answer": "say"})
    for form in forms:  # as typed, and in Python
        spec_data.generate(target, rows, tmp_path / "d", replace(OPTIONS, columns=form))
    assert open_dataset(tmp_path / "d").manifest.settings["columns"] == forms[1]
    more = replace(OPTIONS, columns="prompt=ask,answer=say,system=who")
    with pytest.raises(ConfigError, match="columns"):
        spec_data.generate(target, rows, tmp_path / "d", more)
    out = tmp_path / "own.jsonl"
    made = spec_data.regenerate(rows, out, target, columns=forms[0], max_new_tokens=2)
    assert made.written == 3 and made.settings["columns"] == forms[1]


def test_bad_rows_of_memory_are_named_and_files_go_beside_them(tmp_path, target):
    path = write_corpus(tmp_path / "a.jsonl", 4)
    with pytest.raises(CorpusError, match=r"memory: 1 of 1 rows are bad(.|\n)*memory row 0: no kn"):
        spec_data.estimate(target, [{"ask": "q"}], tmp_path / "d", OPTIONS)
    table = datasets.Dataset.from_list([{"query": "q", "response": "a"}])
    both = spec_data.estimate(target, [path, table], tmp_path / "d", OPTIONS)
    assert both.documents == 5 and both.next_command == ()


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"messages": []}, r"write a list of rows: \[row\]"),
        ([{"text": {1, 2}}], "row 0 is no JSON: it holds a set"),
        (datasets.DatasetDict(a=datasets.Dataset.from_list([{"text": "a"}])), "the splits a"),
        ([1, 2], "--corpus"),
    ],
)
def test_what_is_no_rows_is_refused_in_words(tmp_path, target, given, why):
    with pytest.raises(ConfigError, match=why):
        spec_data.estimate(target, given, tmp_path / "d", OPTIONS)
