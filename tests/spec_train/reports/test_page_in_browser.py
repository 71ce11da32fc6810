"""The pages of runs and evaluations in a browser: whole, quiet, and usable without a mouse."""

import json

import pytest

from spec_train.reports.run_page import write_report
from tests.browser_tools import DESKTOP, PHONE, open_browser, open_page, scrolls_sideways
from tests.spec_train.reports.written import data_figures, real_figures, write_run


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


def page_of(folder, text=""):
    """A page of two runs and an evaluation with all kinds of sections."""
    write_run(folder / "first", 1, note=text)
    write_run(folder / "second", 2)
    figures = real_figures(text) | {"data": data_figures(0, text)}
    (folder / "result.json").write_text(json.dumps(figures))
    places = [folder / "first", folder / "second", folder / "result.json"]
    return write_report(places, folder / "page.html").path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return page_of(tmp_path_factory.mktemp("page"))


@pytest.mark.parametrize(("size", "dark"), [(DESKTOP, False), (PHONE, True)])
def test_a_page_is_whole_in_every_window(browser, file, size, dark):
    with open_page(browser, file, size, dark) as tab:
        assert not scrolls_sideways(tab)
        assert tab.locator("canvas").count() == 3 and tab.locator(".item").count() == 5


def test_what_happened_to_a_token_is_not_told_by_colour_alone(browser, file):
    style = "e => {const s = getComputedStyle(e); return [s.textDecorationLine, s.fontWeight, "
    style += "s.borderBottomStyle, s.borderBottomColor, s.fontStyle].join(' ')}"
    with open_page(browser, file) as tab:
        tab.locator(".viewer input[type=number]").fill("5")
        tab.keyboard.press("Enter")
        kinds = ("accepted", "rejected", "target", "differs", "document")
        looks = [tab.locator(f".tokens .tok.{kind}").first.evaluate(style) for kind in kinds]
        assert len(set(looks)) == len(kinds)
        assert "line-through" in looks[1] and "line-through" not in looks[0] + looks[2]
        tags = [tab.locator(f".tokens .tok.{k}").first.evaluate("e => e.tagName") for k in kinds]
        assert tags == ["SPAN", "DEL", "SPAN", "DEL", "SPAN"]
        assert tab.locator(".legend .key").count() == 5
        assert tab.locator(".tokens .nl").count() == 1  # an accepted line end is marked, and ends
