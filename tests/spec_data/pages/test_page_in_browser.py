"""The page frame in a browser: no errors, phones, dark mode, charts, hostile texts, keyboard."""

import pytest

from spec_data.pages.page import write_page
from tests.browser_tools import (
    DESKTOP,
    PHONE,
    open_browser,
    open_page,
    scrolls_sideways,
    wait_until,
)
from tests.spec_data.pages.samples import sample_page


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_page(tmp_path_factory.mktemp("page") / "page.html", sample_page()).path


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_page_is_whole_in_every_window(browser, file, size, dark):
    with open_page(browser, file, size, dark) as tab:
        assert not scrolls_sideways(tab)
        assert tab.title() == "data plain – Dataset"
        assert tab.locator("canvas").count() == 2 and tab.locator("nav a").count() == 3
        behind = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert behind == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
        drawn = tab.evaluate(
            "[...document.querySelectorAll('canvas')].every(c => c.getContext('2d')"
            ".getImageData(0, 0, c.width, c.height).data.some(v => v > 0))"
        )
        assert drawn


def test_charts_have_their_data_as_a_table_and_follow_the_colours_of_the_system(browser, file):
    with open_page(browser, file) as tab:
        colour = "page.charts[0].data.datasets[0].borderColor"
        before = tab.evaluate(colour)
        tab.emulate_media(color_scheme="dark")
        wait_until(tab, f"{colour} !== {before!r}")
        summary = tab.locator("summary").nth(0)
        summary.focus()
        tab.keyboard.press("Enter")
        rows = tab.locator("details").nth(0).locator("tbody tr")
        assert rows.count() == 40
        assert rows.nth(1).locator("td").all_inner_texts() == ["1", "1", "1.2"]
        tab.locator("summary").nth(1).click()
        depths = tab.locator("details").nth(1).locator("tbody tr")
        assert depths.nth(0).locator("td").all_inner_texts() == ["1", "50.0\u00a0%"]


def test_a_script_that_is_not_of_the_page_does_not_run(browser, tmp_path):
    file = tmp_path / "page.html"
    whole = write_page(file, sample_page()).path.read_text()
    file.write_text(whole.replace("<noscript>", "<script>window.planted = 1</script><noscript>"))
    with (
        pytest.raises(AssertionError, match="Content Security Policy"),
        open_page(browser, file) as tab,
    ):
        assert tab.evaluate("window.planted === undefined")
