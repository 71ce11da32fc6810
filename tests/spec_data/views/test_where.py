"""What `--where` may say: a condition on the documents, and nothing else of the machine."""

import numpy as np
import pyarrow as pa
import pytest

from spec_data.shards.errors import ConfigError
from spec_data.views.select import matching

TABLE = pa.table(
    {
        "number": [3, 5, 8],
        "doc_id": ["a", "b", "c"],
        "source": ["gsm8k", "chats", "gsm8k"],
        "length": pa.array([100, 2000, 3000], pa.int32()),
        "nll": pa.array([0.5, None, 2.0]),
    }
)


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ("length < 1024 and source = 'gsm8k'", [3]),
        ("source in ('chats') or nll > 1", [5, 8]),
        ("nll < 1", [3]),  # what is not known meets no condition
        ("length > (select avg(1000) from range(3))", [5, 8]),
        ("true", [3, 5, 8]),
        ("false", []),
    ],
)
def test_a_condition_is_sql(condition, kept):
    assert TABLE["number"].to_numpy()[matching(TABLE, condition)].tolist() == kept


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        ("lenght < 10", r"no column lenght; did you mean length\?; columns: number, doc_id"),
        ("length <", "Parser Error"),
        ("true; drop table x", "Parser Error"),
        ("length < 'many'", "Conversion Error"),
    ],
)
def test_a_wrong_condition_is_an_error_that_lists_the_columns(condition, words):
    with pytest.raises(ConfigError, match=words) as refused:
        matching(TABLE, condition)
    assert "source, length, nll" in str(refused.value)


@pytest.mark.parametrize(
    "read",
    [
        "read_text('{file}')",
        "'{file}'",
        "read_parquet('http://127.0.0.1:9/x')",
        "secret",
    ],
)
def test_a_condition_reads_no_file_no_url_and_no_variable(tmp_path, read):
    secret = pa.table({"length": [1]})  # noqa: F841 (a variable that duckdb could find)
    file = tmp_path / "secret.csv"
    file.write_text("length\n1\n")
    where = f"exists (select * from {read.format(file=file, folder=tmp_path)})"
    with pytest.raises(ConfigError, match="where"):
        matching(TABLE, where)


def test_rows_stay_in_order_whatever_their_number():
    count = 300_000
    table = pa.table({"number": np.arange(count), "length": np.arange(count) % 7})
    assert np.array_equal(matching(table, "length = 3"), np.arange(count) % 7 == 3)
