"""The viewer of tokens in a browser: mouse, keyboard, search, phones, hostile texts, speed."""

import numpy as np
import pytest

from spec_data.pages.dataset_page import TokenViewer
from spec_data.pages.page import Page, Section, write_page
from tests.browser_tools import PHONE, open_browser, open_page, scrolls_sideways
from tests.spec_data.corpus.templates import tokenizer

ATTACK = "</script><img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


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
def file(tmp_path_factory):
    tok = tokenizer("chatml")
    viewer = TokenViewer(tok)
    add(viewer, tok, 0, "The capital?", "Paris.\n\n\tIt is  Paris 😀")
    add(viewer, tok, 5, ATTACK, f"no {ATTACK}\u202e\u200b", teacher=False)
    add(viewer, tok, 10, "hello there", "the answer is Paris")
    section = Section(title="Tokens", parts=[viewer.part(3)])
    page = Page(title="viewer", kind="Dataset", sections=[section])
    return write_page(tmp_path_factory.mktemp("viewer") / "page.html", page).path


def test_a_document_is_shown_with_turns_special_tokens_and_white_space(browser, file):
    with open_page(browser, file) as tab:
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


def test_buttons_and_numbers_move_between_documents(browser, file):
    with open_page(browser, file) as tab:
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


def test_what_a_token_is_by_mouse_and_by_keyboard(browser, file):
    with open_page(browser, file) as tab:
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


def test_search_finds_the_next_document(browser, file):
    with open_page(browser, file) as tab:
        box, head = tab.get_by_label("Search"), tab.locator(".head")
        for text, number in (("answer IS par", 10), ("paris", 0), ("paris", 10)):
            box.fill(text)
            box.press("Enter")
            assert head.inner_text().startswith(f"Document {number} ·")
        box.fill("nowhere")
        tab.get_by_role("button", name="Find").click()
        assert tab.get_by_role("status").inner_text().startswith("No document")


def test_texts_of_documents_stay_texts(browser, file):
    with open_page(browser, file, PHONE, dark=True) as tab:
        assert not scrolls_sideways(tab)
        tab.get_by_role("button", name="Next").click()
        assert tab.locator("img").count() == 0 and tab.locator(".tokens b").count() == 0
        assert ATTACK in "".join(tab.locator(".tokens .text").all_text_contents())
        tab.locator(".turn.learned .tok").last.hover()
        assert tab.locator(".detail img").count() == 0
