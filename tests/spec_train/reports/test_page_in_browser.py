"""The pages of runs and evaluations in a browser: whole, quiet, and usable without a mouse."""

import json

import pytest

from spec_train.reports.run_page import write_report
from tests.browser_tools import (
    DESKTOP,
    PHONE,
    open_browser,
    open_page,
    scrolls_sideways,
    wait_until,
)
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
    plain = {"tokens": [10, 11, 12, 14, 15, 16, 17, 19], "seconds": 0.2, "draft_seconds": 0.1}
    figures["samples"][0]["plain"] = plain
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
        assert tab.locator("svg.chart").count() == 3
        assert tab.locator("tr.best").count() == 1
        sides = [tab.locator(".beside .turn").nth(i).bounding_box() for i in (0, 1)]
        below = sides[1]["y"] > sides[0]["y"]
        assert below == (size == PHONE) and (sides[1]["x"] > sides[0]["x"]) == (size == DESKTOP)


def test_an_answer_is_replayed_and_ends_whole(browser, file):
    later = "document.querySelectorAll('.later').length"
    with open_page(browser, file) as tab:
        tab.keyboard.press("r")
        assert tab.evaluate("document.querySelectorAll('.item').length") == 13
        wait_until(tab, f"{later} === 0")
        tab.evaluate("performance.now = () => 1e12")  # a start in the future: nothing is shown yet
        tab.get_by_role("button", name="Replay").click()
        assert tab.evaluate(later) == 12, "all but the context and its first token"


def test_what_happened_to_a_token_is_not_told_by_colour_alone(browser, file):
    style = "e => {const s = getComputedStyle(e); return [s.textDecorationLine, s.fontWeight, "
    style += "s.borderBottomStyle, s.borderBottomColor, s.fontStyle].join(' ')}"
    with open_page(browser, file) as tab:
        tab.evaluate("location.replace('#doc-5')")
        wait_until(tab, "document.querySelector('tr[aria-current=true] a').hash === '#doc-5'")
        kinds = ("accepted", "target", "document")
        looks = [tab.locator(f".tokens .tok.{kind}").first.evaluate(style) for kind in kinds]
        assert len(set(looks)) == len(kinds)
        assert tab.locator(".legend .key").count() == 3
        assert tab.locator(".tokens .nl").count() == 1  # an accepted line end is marked, and ends
