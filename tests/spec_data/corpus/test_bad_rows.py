"""How many bad rows a run accepts."""

import pytest

from spec_data.corpus.bad_rows import parse_limit
from spec_data.shards.errors import ConfigError, CorpusError
from tests.spec_data.corpus.reading import read, rows, write_jsonl

ALLOWED = [  # (--max-bad-rows, rows, how many may be bad)
    *(("auto", 9, 0), ("auto", 12, 1), ("auto", 307, 10), ("auto", 1000, 10), ("auto", 5000, 50)),
    *(("5", 10, 5), ("0", 10**6, 0), ("1%", 307, 3), (" 2.5 % ", 1000, 25), ("0.01", 5000, 50)),
    *(("1e-05", 200_000, 2), ("1.0", 7, 7), ("100%", 7, 7)),
]


def test_a_limit_is_a_count_or_a_share():
    for text, read_rows, allowed in ALLOWED:
        assert parse_limit(text).allowed(read_rows) == allowed, text
    for text in ("", "-1", "1.5", "101%", "five", "1/100", "nan", "1e5", "5 rows"):
        with pytest.raises(ConfigError, match="--max-bad-rows"):
            parse_limit(text)


def test_what_is_refused_names_the_value_that_goes_on(tmp_path):
    path = tmp_path / "log.jsonl"
    write_jsonl(path, [*rows(302), *["{cut"] * 5])
    records, (report,) = read(path)
    assert (len(records), report.bad) == (302, 5)
    write_jsonl(path, [*rows(286), *["{cut"] * 21])
    with pytest.raises(CorpusError, match=r"21 of 307 rows are bad(.|\n)*--max-bad-rows 21\b"):
        read(path)
    assert len(read(path, max_bad_rows=parse_limit("21"))[0]) == 286


def test_most_rows_bad_stops_before_the_end_and_all_of_them_can_be_allowed(tmp_path):
    path = tmp_path / "wrong.jsonl"
    write_jsonl(path, [*rows(20), *['{"what": 1}'] * 300])
    with pytest.raises(CorpusError, match=r"101 of 121 rows are bad so far(.|\n)*100%"):
        read(path)
    assert len(read(path, max_bad_rows=parse_limit("100%"))[0]) == 20
    write_jsonl(path, [*["{"] * 100, *rows(9900)])  # bad rows may all come first
    assert len(read(path)[0]) == 9900


def test_a_directory_counts_as_one_source_and_each_corpus_as_its_own(tmp_path, caplog):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text(f"text {i}")
    (folder / "7.txt").write_bytes(b"\xff")
    records, reports = read(folder)
    assert len(records) == 39 and sum(r.bad for r in reports) == 1
    assert f"rows skipped: {folder}/7.txt:1: not UTF-8" in caplog.text
    write_jsonl(tmp_path / "good.jsonl", rows(1000))
    with pytest.raises(CorpusError, match=r"few\.jsonl: 1 of 2 rows"):
        write_jsonl(tmp_path / "few.jsonl", [*rows(1), "{"])
        read(tmp_path / "good.jsonl", tmp_path / "few.jsonl")
