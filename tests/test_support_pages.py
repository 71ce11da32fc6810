"""Every row of a support table in docs names tests that exist."""

import re
from pathlib import Path

import pytest

from spec_data.models.families import TARGETS
from tests.current_families import CURRENT, NESTED, ONE_PER_ROW
from tests.families import FAMILIES, MORE_FAMILIES
from tests.test_failures_page import named_tests, tables

PAGES = ("converting.md", "published-drafts.md", "targets.md", "windows.md")
"""Pages of which every table with a column `test` is checked."""


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_exist(page: str) -> None:
    checked = [table for table in tables(page) if table[0][-1] in ("test", "tests")]
    assert checked
    for header, *rows in checked:
        for row in rows:
            assert len(row) == len(header) and named_tests(row[-1]), row


def test_the_table_of_targets_is_the_registry() -> None:
    """Each registered name is in one row; its test exists with that id; packing is as tested."""
    (_, *rows), *_ = tables("targets.md")
    ids = {"test_families": CURRENT | NESTED, "test_targets": FAMILIES | MORE_FAMILIES}
    named: list[str] = []
    for row in rows:
        named += re.findall(r"`(\w+)`", row[1])
        for file, _, family in named_tests(row[-1]):
            assert family in ids[Path(file).stem], f"{row[0]}: {file} has no family {family}"
            captured = "one document per row" if family in ONE_PER_ROW else "packed"
            assert row[2] == captured, f"{row[0]}: captured {captured}"
    assert sorted(named) == sorted(TARGETS), "docs/targets.md and TARGETS name the same targets"
