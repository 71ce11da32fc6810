"""Pages and the viewer of tokens in a browser: phones, dark mode, charts, keys, hostile texts."""

import numpy as np
import pytest

from spec_data.pages.dataset_page import TokenViewer
from spec_data.pages.page import Page, Section, write_page
from tests.browser_tools import (
    DESKTOP,
    PHONE,
    open_browser,
    open_page,
    scrolls_sideways,
    wait_until,
)
from tests.spec_data.corpus.templates import tokenizer
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
        assert tab.locator("svg.chart").count() == 2
        behind = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        assert behind == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")
        wide = "[...document.querySelectorAll('svg.chart')].map(c => c.getBoundingClientRect())"
        assert tab.evaluate(f"{wide}.every(b => b.left >= 0 && b.right <= innerWidth)")


def test_print_is_dark_on_white_in_dark_mode_too(browser, file):
    with open_page(browser, file, dark=True) as tab:
        tab.emulate_media(media="print")
        style = "(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))"
        assert tab.evaluate(style) == ["rgb(255, 255, 255)", "rgb(28, 33, 40)"]
        assert tab.locator(".bar").is_hidden() and tab.locator("svg.chart").first.is_visible()


def test_charts_have_their_data_as_a_table_and_follow_the_colours_of_the_system(browser, file):
    with open_page(browser, file) as tab:
        colour = "getComputedStyle(document.querySelector('.chart .s0')).stroke"
        before = tab.evaluate(colour)
        tab.emulate_media(color_scheme="dark")
        wait_until(tab, f"{colour} !== {before!r}")
        summary = tab.locator("summary").nth(0)
        summary.focus()
        tab.keyboard.press("Enter")
        rows = tab.locator("details").nth(0).locator("tbody tr")
        assert rows.count() == 40
        assert rows.nth(1).locator("td").all_inner_texts() == ["1", "1.000", "1.200"]
        tab.locator("summary").nth(1).click()
        depths = tab.locator("details").nth(1).locator("tbody tr")
        assert depths.nth(0).locator("td").all_inner_texts() == ["1", "50.0\u00a0%"]


def test_a_script_that_is_not_of_the_page_does_not_run(browser, tmp_path):
    file = tmp_path / "page.html"
    whole = write_page(file, sample_page()).path.read_text()
    file.write_text(whole.replace("<footer>", "<script>window.planted = 1</script><footer>"))
    with (
        pytest.raises(AssertionError, match="Content Security Policy"),
        open_page(browser, file) as tab,
    ):
        assert tab.evaluate("window.planted === undefined")


ATTACK = "</script><img src=x onerror=alert(1)><b>bold</b>"


def add(viewer, tok, number, text, answer, teacher=True):
    """Add a chat of one answer; the target's first choice is right at every second token of it."""
    start = tok.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    ids = np.array(start + tok.encode(f"{answer}<|im_end|>"))
    mask = np.arange(len(ids)) >= len(start)
    choice = np.where(mask, np.where((np.arange(len(ids)) - len(start)) % 2, ids, ids[0]), -1)
    viewer.add(
        number,
        name=f"{number:032x}",
        source="chats.jsonl",
        ids=ids,
        mask=mask,
        turns=[("assistant", len(start), len(ids))],
        choice=choice if teacher else None,
        scores=(0.9 - number / 10, float("nan") if number else 1.0),
    )


@pytest.fixture(scope="module")
def viewer(tmp_path_factory):
    tok = tokenizer("chatml")
    tokens = TokenViewer(tok)
    add(tokens, tok, 0, "The capital?", "Paris.\n\n\tIt is  Paris 😀")
    add(tokens, tok, 5, ATTACK, f"no {ATTACK}\u202e\u200b", teacher=False)
    add(tokens, tok, 10, "hello there", "the answer is Paris")
    section = Section(title="Tokens", parts=[tokens.part(3)])
    page = Page(title="viewer", kind="Dataset", lead="", figures=[], sections=[section])
    return write_page(tmp_path_factory.mktemp("viewer") / "page.html", page).path


def go_to(tab, number):
    """Follow the link to a document."""
    tab.evaluate(f"location.replace('#doc-{number}')")
    wait_until(tab, f"document.querySelector('.head').innerText.startsWith('Document {number} ')")


def test_a_document_is_shown_with_turns_special_tokens_and_white_space(browser, viewer):
    with open_page(browser, viewer) as tab:
        go_to(tab, 0)
        assert tab.locator(".turn h3").nth(0).inner_text().startswith("context, not supervised")
        assert tab.locator(".turn h3").nth(1).inner_text().startswith("assistant · ")
        assert tab.locator(".turn.learned").count() == 1
        assert tab.locator(".turn.learned .tok:not(.sup)").count() == 0
        assert tab.locator(".turn:not(.learned) .tok.sup").count() == 0
        assert tab.locator(".tokens .special").all_inner_texts()[0] == "<|im_start|>"
        whole = tab.evaluate("document.querySelector('.turn.learned .text').textContent")
        assert whole == "Paris.\n\n\tIt is  Paris \ufffd\ufffd\ufffd\ufffd<|im_end|>"
        assert tab.locator(".turn.learned .nl").count() == 2
        assert tab.locator(".turn.learned .tab").count() == 1
        assert "46.7\u00a0% the target's first choice" in tab.locator(".head").inner_text()


def test_the_worst_document_comes_first_and_keys_work_at_once(browser, viewer):
    with open_page(browser, viewer) as tab:
        head, now = tab.locator(".head"), tab.locator("tr[aria-current=true] a")
        assert head.inner_text().startswith("Document 10 \u00b7")
        assert tab.evaluate("document.querySelector('.list').scrollTop") == 0
        for key, number in (("j", 5), ("j", 0), ("j", 0), ("k", 5)):
            tab.keyboard.press(key)
            wait_until(tab, f"document.querySelector('.head').innerText.includes(' {number} ')")
            assert now.get_attribute("href") == f"#doc-{number}"
        go_to(tab, 10)
        tab.keyboard.press("ArrowRight")
        assert "token 1, id" in tab.locator(".detail").inner_text()
        tab.keyboard.press("/")
        tab.keyboard.type("j k")
        assert tab.get_by_label("Filter").input_value() == "j k", "letters are letters there"


def test_the_list_is_sorted_and_filtered_and_links_to_documents(browser, viewer):
    with open_page(browser, viewer) as tab:
        links, box = tab.locator(".list tbody a"), tab.get_by_label("Filter")
        assert links.all_inner_texts() == ["10", "5", "0"]
        for name, order in (("highest NLL", ["0", "5", "10"]), ("in order", ["0", "5", "10"])):
            tab.get_by_label("Sort").select_option(name)
            assert links.all_inner_texts() == order
        for text, order in (
            ("answer IS par", ["10"]),
            ("paris", ["0", "10"]),
            ("", ["0", "5", "10"]),
        ):
            box.fill(text)
            assert links.all_inner_texts() == order
        box.fill("nowhere")
        assert tab.get_by_role("status").inner_text().startswith("No document")
        box.fill("")
        links.nth(1).click()
        wait_until(tab, "document.querySelector('.head').innerText.startsWith('Document 5 ')")
        assert tab.url.endswith("#doc-5")
        tab.reload()
        wait_until(tab, "document.documentElement.dataset.ready === 'yes'")
        assert tab.locator(".head").inner_text().startswith("Document 5 ")


def test_what_a_token_is_by_mouse_and_by_keyboard(browser, viewer):
    with open_page(browser, viewer) as tab:
        go_to(tab, 0)
        detail = tab.locator(".detail")
        tab.locator(".turn.learned .tok").nth(0).hover()
        first = detail.inner_text()
        assert "supervised" in first and "turn of assistant" in first
        assert 'first choice: "<|im_start|>"' in first
        edge = "getComputedStyle(document.querySelector('.wrong')).borderBottomStyle"
        assert tab.evaluate(edge) == "dashed", "told by more than colour"
        tab.locator(".item[tabindex='0']").focus()
        tab.keyboard.press("ArrowRight")
        assert detail.inner_text() != first and "The target's first choice." in detail.inner_text()
        tab.locator(".item").first.focus()
        assert "token 0, id" in detail.inner_text() and "context" in detail.inner_text()
        assert "No prediction of the target is stored" in detail.inner_text()
        tab.locator(".item").last.focus()
        tab.keyboard.press("ArrowRight")
        assert "<|im_end|>" in detail.inner_text(), "the last token has no next one"


def test_texts_of_documents_stay_texts(browser, viewer):
    with open_page(browser, viewer, PHONE, dark=True) as tab:
        assert not scrolls_sideways(tab)
        go_to(tab, 5)
        assert tab.locator("img").count() == 0 and tab.locator(".tokens b").count() == 0
        assert ATTACK in "".join(tab.locator(".tokens .text").all_text_contents())
        tab.locator(".turn.learned .tok").last.hover()
        assert tab.locator(".detail img").count() == 0
