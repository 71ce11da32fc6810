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
    )


@pytest.fixture(scope="module")
def viewer(tmp_path_factory):
    tok = tokenizer("chatml")
    tokens = TokenViewer(tok)
    add(tokens, tok, 0, "The capital?", "Paris.\n\n\tIt is  Paris 😀")
    add(tokens, tok, 5, ATTACK, f"no {ATTACK}\u202e\u200b", teacher=False)
    add(tokens, tok, 10, "hello there", "the answer is Paris")
    section = Section(title="Tokens", parts=[tokens.part(3)])
    page = Page(title="viewer", kind="Dataset", sections=[section])
    return write_page(tmp_path_factory.mktemp("viewer") / "page.html", page).path


def test_a_document_is_shown_with_turns_special_tokens_and_white_space(browser, viewer):
    with open_page(browser, viewer) as tab:
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


def test_buttons_and_numbers_move_between_documents(browser, viewer):
    with open_page(browser, viewer) as tab:
        head = tab.locator(".head")
        before, after = (tab.get_by_role("button", name=name) for name in ("Previous", "Next"))
        assert before.is_disabled() and head.inner_text().startswith("Document 0 ·")
        after.click()
        assert head.inner_text().startswith("Document 5 ·")
        place = tab.get_by_label("Shown, of 3")
        for number in ("3", "99"):
            place.fill(number)
            place.press("Enter")
            assert head.inner_text().startswith("Document 10 ·") and place.input_value() == "3"
        assert after.is_disabled()


def test_what_a_token_is_by_mouse_and_by_keyboard(browser, viewer):
    with open_page(browser, viewer) as tab:
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
        tab.keyboard.press("Home")
        assert "token 0, id" in detail.inner_text() and "context" in detail.inner_text()
        assert "No prediction of the target is stored" in detail.inner_text()
        for key in ("End", "ArrowRight"):
            tab.keyboard.press(key)
            assert "<|im_end|>" in detail.inner_text(), "the last token has no next one"


def test_search_finds_the_next_document(browser, viewer):
    with open_page(browser, viewer) as tab:
        box, head = tab.get_by_label("Search"), tab.locator(".head")
        for text, number in (("answer IS par", 10), ("paris", 0), ("paris", 10)):
            box.fill(text)
            box.press("Enter")
            assert head.inner_text().startswith(f"Document {number} ·")
        box.fill("nowhere")
        tab.get_by_role("button", name="Find").click()
        assert tab.get_by_role("status").inner_text().startswith("No document")


def test_texts_of_documents_stay_texts(browser, viewer):
    with open_page(browser, viewer, PHONE, dark=True) as tab:
        assert not scrolls_sideways(tab)
        tab.get_by_role("button", name="Next").click()
        assert tab.locator("img").count() == 0 and tab.locator(".tokens b").count() == 0
        assert ATTACK in "".join(tab.locator(".tokens .text").all_text_contents())
        tab.locator(".turn.learned .tok").last.hover()
        assert tab.locator(".detail img").count() == 0
