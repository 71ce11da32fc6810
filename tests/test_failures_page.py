"""Every failure that docs/failures.md lists has an outcome and tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "failures.md"
HEADER = ["failure", "outcome", "tests"]
KNOWN = 43  # numbered failures: those that the field has met
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def rows() -> list[list[str]]:
    """The cells of every row of a table: lines that follow a header and its line of dashes."""
    found = []
    for block in re.split(r"\n(?!\|)", PAGE.read_text(encoding="utf-8")):
        lines = [line for line in block.splitlines() if line.startswith("|")]
        cells = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
        if cells:
            assert cells[:2] == [HEADER, ["---"] * len(HEADER)], f"no table's header: {lines[0]}"
        found += cells[2:]
    return found


def test_every_row_has_an_outcome_and_a_test_that_exists():
    wrong = []
    for row in rows():
        failure, outcome, tests = row
        if not re.match(r"(impossible|refused|named)\b", outcome):
            wrong.append(f"{failure}: the outcome is impossible, refused or named")
        found = _TEST.findall(tests)
        if not found:
            wrong.append(f"{failure}: no test")
        for file, name in found:
            path = ROOT / file
            if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
                wrong.append(f"{failure}: no {file}::{name}")
    assert not wrong, "\n".join(wrong)


def test_every_numbered_failure_is_there_once():
    numbers = [int(m[1]) for row in rows() if (m := re.match(r"(\d+)\. ", row[0]))]
    assert sorted(numbers) == list(range(1, KNOWN + 1))
