"""What a support table in docs says is tested: planted.toml names the tests of each row."""

import re

import pytest

from spec_data.models.families import TARGETS
from tests.current_families import CURRENT, NESTED, ONE_PER_ROW
from tests.families import FAMILIES, MORE_FAMILIES
from tests.test_failures_page import check_tests, planted, tables

PAGES = ("converting.md", "published-drafts.md", "windows.md")


@pytest.mark.parametrize("page", PAGES)
def test_every_row_names_tests_that_exist(page: str) -> None:
    shown = {row[0] for table in tables(page) for row in table[1:]}
    assert planted()[page].keys() <= shown, planted()[page].keys() - shown
    for table in tables(page):
        if any(row[0] in planted()[page] for row in table):
            for row in table[1:]:
                assert len(row) == len(table[0]), row
                check_tests(page, row[0])


def test_the_table_of_targets_is_the_registry() -> None:
    """Each registered name is in one row; a test trains on that family, packed as it says."""
    (_, *rows), (_, *others) = tables("targets.md")
    named: list[str] = []
    for row in rows:
        named += re.findall(r"`(\w+)`", row[1])
        family = planted()["targets.md"][row[0]]
        assert family in CURRENT | NESTED | FAMILIES | MORE_FAMILIES, f"{row[0]}: no {family}"
        assert ("one document per row" in row[2]) == (family in ONE_PER_ROW), row[0]
    assert sorted(named) == sorted(TARGETS), "docs/targets.md and TARGETS name the same targets"
    for row in others:
        check_tests("targets.md", row[0])
    assert planted()["targets.md"].keys() == {row[0] for row in rows + others}
