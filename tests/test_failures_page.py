"""Every failure of docs/failures.md has an outcome, and tests in planted.toml that plant it."""

import re
from pathlib import Path
from typing import Any

from tests.named_tests import source, table

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"
KNOWN = 43  # numbered failures: those that the field has met


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; the first row is the header."""
    found = []
    for block in re.split(r"\n(?!\|)", (DOCS / page).read_text(encoding="utf-8")):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found += [[row for row in cells if set("".join(row)) - {*"-:"}]] if cells else []
    return found


def planted() -> dict[str, dict[str, Any]]:
    """By page and first cell of a row: the tests of it."""
    return table("planted.toml")


def check_tests(page: str, row: str) -> None:
    """Every test that planted.toml names for a row exists."""
    assert planted()[page].get(row), f"{page}: no test of {row!r} in planted.toml"
    for test in planted()[page][row]:
        source(test)


def rows() -> list[list[str]]:
    """The failures of the page, each with its outcome."""
    lines = re.findall(r"^(?:- |(?=\d+\. ))(.*)$", (DOCS / "failures.md").read_text("utf-8"), re.M)
    return [line.split(" — ") for line in lines]


def test_every_row_has_an_outcome_and_a_test_that_exists():
    for failure, outcome in rows():
        assert re.match(r"(impossible|refused|named)\b", outcome), failure
        check_tests("failures.md", failure)
    assert planted()["failures.md"].keys() == {failure for failure, _ in rows()}


def test_every_numbered_failure_is_there_once():
    numbers = [int(m[1]) for row in rows() if (m := re.match(r"(\d+)\. ", row[0]))]
    assert sorted(numbers) == list(range(1, KNOWN + 1))
