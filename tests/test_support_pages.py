"""Every row of a support table in docs names tests that exist."""

import re
from pathlib import Path

import pytest

from spec_data.models.families import TARGETS
from tests.current_families import CURRENT, NESTED, ONE_PER_ROW
from tests.families import FAMILIES, MORE_FAMILIES

ROOT = Path(__file__).parents[1]
PAGES = ("converting.md", "published-drafts.md", "targets.md", "windows.md")
"""Pages of which every table with a column `test` is checked."""
_TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)(?:\[([\w-]+)\])?`")


def tables(page: str) -> list[list[list[str]]]:
    """The tables of a page, as rows of cells; the first row is the header."""
    found: list[list[list[str]]] = []
    inside = False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        if not line.startswith("|"):
            inside = False
            continue
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not inside:
            found.append([])
        inside = True
        if not all(set(cell) <= {"-", ":"} for cell in cells):
            found[-1].append(cells)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_exist(page: str) -> None:
    wrong, count = [], 0
    for header, *rows in tables(page):
        if header[-1] not in ("test", "tests"):
            continue
        for row in rows:
            count += 1
            found = _TEST.findall(row[-1])
            if len(row) != len(header) or not found:
                wrong.append(f"{row[0]}: no test, or another number of cells than the header")
            for file, name, _ in found:
                path = ROOT / file
                if not path.is_file() or f"def {name}(" not in path.read_text(encoding="utf-8"):
                    wrong.append(f"{row[0]}: no {file}::{name}")
    assert count and not wrong, "\n".join(wrong)


def test_the_table_of_targets_is_the_registry() -> None:
    """Each registered name is in one row; its test exists with that id; packing is as tested."""
    (_, *rows), *_ = tables("targets.md")
    ids = {"test_families": CURRENT | NESTED, "test_targets": FAMILIES | MORE_FAMILIES}
    named: list[str] = []
    for row in rows:
        named += re.findall(r"`(\w+)`", row[1])
        for file, _, family in _TEST.findall(row[-1]):
            assert family in ids[Path(file).stem], f"{row[0]}: {file} has no family {family}"
            captured = "one document per row" if family in ONE_PER_ROW else "packed"
            assert row[2] == captured, f"{row[0]}: captured {captured}"
    assert sorted(named) == sorted(TARGETS), "docs/targets.md and TARGETS name the same targets"
