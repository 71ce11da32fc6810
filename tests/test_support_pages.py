"""What a support table in docs says is tested: planted.toml names the tests of each row."""

import re

import pytest

from spec_data.models.families import TARGETS
from tests.current_families import CONTRACTED, CURRENT, NESTED, ONE_PER_ROW
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


def test_the_tables_of_targets_are_the_registry() -> None:
    """Each name is in one row; a test trains on its family, packed as the page says."""
    (_, *rows), (_, *different), (_, *mtp), (_, *others) = tables("targets.md")
    tested = {name: family for name, family in planted()["targets.md"].items() if name in TARGETS}
    assert sorted(re.findall(r"`(\w+)`", " ".join(row[-1] for row in rows))) == sorted(TARGETS)
    assert {*re.findall(r"`(\w+)`", " ".join(row[-1] for row in mtp))} <= TARGETS.keys()
    assert tested.keys() == TARGETS.keys()
    assert set(tested.values()) <= {*CURRENT, *NESTED, *CONTRACTED, *FAMILIES, *MORE_FAMILIES}
    alone = [row[0] for row in different if row[1].startswith("one document per row")]
    alone = re.findall(r"`(\w+)`", " ".join(alone))
    rows = {*ONE_PER_ROW, *CONTRACTED}
    assert sorted(alone) == sorted(name for name in tested if tested[name] in rows)
    for row in others:
        check_tests("targets.md", row[0])
    assert planted()["targets.md"].keys() == {*TARGETS, *(row[0] for row in others)}
