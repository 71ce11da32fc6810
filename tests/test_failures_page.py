"""Every failure that docs/failures.md lists has an outcome and tests that exist."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"
KNOWN = 43  # numbered failures: those that the field has met


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; the first row is the header."""
    found = []
    for block in re.split(r"\n(?!\|)", (DOCS / page).read_text(encoding="utf-8")):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        found += [[row for row in cells if set("".join(row)) - {*"-:"}]] if cells else []
    return found


def named_tests(cell: str) -> list[tuple[str, str, str]]:
    """File, name and id of every test that a cell names; each exists."""
    found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[([\w-]+)\])?`", cell)
    assert found, f"no test: {cell}"
    for file, name, _ in found:
        assert f"def {name}(" in (DOCS.parent / file).read_text(encoding="utf-8"), (file, name)
    return found


def rows() -> list[list[str]]:
    """The rows of all tables of the page."""
    found = tables("failures.md")
    assert all(header == ["failure", "outcome", "tests"] for header, *_ in found)
    return [row for _, *some in found for row in some]


def test_every_row_has_an_outcome_and_a_test_that_exists():
    for failure, outcome, tests in rows():
        assert re.match(r"(impossible|refused|named)\b", outcome), failure
        assert named_tests(tests)


def test_every_numbered_failure_is_there_once():
    numbers = [int(m[1]) for row in rows() if (m := re.match(r"(\d+)\. ", row[0]))]
    assert sorted(numbers) == list(range(1, KNOWN + 1))
