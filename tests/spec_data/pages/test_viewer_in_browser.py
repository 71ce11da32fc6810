"""The viewer of tokens in a browser: mouse, keyboard, search, phones, hostile texts, speed."""

import numpy as np
import pytest

from spec_data.pages.page import Page, Section, write_page
from spec_data.pages.viewer import ViewedDocument, token_viewer
from tests.browser_tools import DESKTOP, PHONE, open_browser, open_page, scrolls_sideways
from tests.spec_data.corpus.templates import tokenizer

ATTACK = "</script><img src=x onerror=alert(1)><b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    with open_browser() as found:
        yield found


def document(tok, number, text, answer, teacher=True):
    """A chat of one answer; the target's first choice is right at every second token of it."""
    start = tok.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
    ids = np.array(start + tok.encode(f"{answer}<|im_end|>"))
    mask = np.arange(len(ids)) >= len(start)
    known = mask.copy()
    choice = np.where(np.arange(known.sum()) % 2, ids[known], ids[0])
    entropy = np.linspace(0, 4, int(known.sum()))
    view = {"known": known, "choice": choice, "entropy": entropy, "nll": entropy / 2}
    return ViewedDocument(
        number=number,
        name=f"{number:032x}",
        source="chats.jsonl",
        ids=ids,
        mask=mask,
        turns=[("assistant", len(start), len(ids))],
        **(view if teacher else {}),
    )


def write_viewer(file, documents, tok):
    viewer = token_viewer(tok, documents, f"All {len(documents):,} documents are in this page.")
    section = Section(title="Tokens", parts=[viewer])
    return write_page(file, Page(title="viewer", kind="Dataset", sections=[section])).path


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    tok = tokenizer("chatml")
    documents = [
        document(tok, 0, "The capital?", "Paris.\n\n\tIt is  Paris 😀"),
        document(tok, 5, ATTACK, f"no {ATTACK}\u202e\u200b", teacher=False),
        document(tok, 10, "hello there", "the answer is Paris"),
    ]
    return write_viewer(tmp_path_factory.mktemp("viewer") / "page.html", documents, tok)


def test_a_document_is_shown_with_turns_special_tokens_and_white_space(browser, file):
    with open_page(browser, file) as tab:
        assert tab.locator(".turn h3").nth(0).inner_text().startswith("context, not supervised")
        assert tab.locator(".turn h3").nth(1).inner_text().startswith("assistant · ")
        assert tab.locator(".turn.learned").count() == 1
        assert tab.locator(".turn.learned .tok:not(.sup)").count() == 0
        assert tab.locator(".turn:not(.learned) .tok.sup").count() == 0
        assert tab.locator(".tokens .special").all_inner_texts()[0] == "<|im_start|>"
        whole = tab.evaluate("document.querySelector('.turn.learned .text').textContent")
        # the tokenizer has a token per byte: the last one has the character
        assert whole == "Paris.\n\n\tIt is  Paris ⟨F0⟩⟨9F⟩⟨98⟩😀<|im_end|>"
        assert tab.locator(".turn.learned .esc").count() == 3
        assert tab.locator(".turn.learned .nl").count() == 2
        assert tab.locator(".turn.learned .tab").count() == 1
        assert "46.7\u00a0% the target's first choice" in tab.locator(".head").inner_text()


def test_buttons_numbers_and_keys_move_between_documents(browser, file):
    with open_page(browser, file) as tab:
        head = tab.locator(".head")
        before, after = (
            tab.get_by_role("button", name="Previous"),
            tab.get_by_role("button", name="Next"),
        )
        assert before.is_disabled() and head.inner_text().startswith("Document 0 ·")
        after.click()
        assert head.inner_text().startswith("Document 5 ·")
        after.focus()
        tab.keyboard.press("n")
        assert head.inner_text().startswith("Document 10 ·") and after.is_disabled()
        tab.locator(".item").first.focus()
        tab.keyboard.press("p")
        assert head.inner_text().startswith("Document 5 ·")
        assert tab.evaluate("document.activeElement.classList.contains('item')")
        place = tab.get_by_label("Shown, of 3")
        place.fill("3")
        place.press("Enter")
        assert head.inner_text().startswith("Document 10 ·")
        place.fill("99")
        place.press("Enter")
        assert head.inner_text().startswith("Document 10 ·") and place.input_value() == "3"


def test_figures_of_a_token_by_mouse_and_by_keyboard(browser, file):
    with open_page(browser, file) as tab:
        detail = tab.locator(".detail")
        answer = tab.locator(".turn.learned .tok")
        answer.nth(0).hover()
        first = detail.inner_text()
        assert "supervised" in first and "turn of assistant" in first
        assert 'first choice: "<|im_start|>"' in first and "entropy 0.00 nats" in first
        tab.keyboard.press("Tab")
        tab.locator(".item[tabindex='0']").focus()
        tab.keyboard.press("ArrowRight")
        second = detail.inner_text()
        assert second != first and "The target's first choice. Prob" in second
        assert "Probability of this token" in second
        tab.keyboard.press("Home")
        assert "token 0, id" in detail.inner_text() and "context" in detail.inner_text()
        assert "No prediction of the target is stored" in detail.inner_text()
        tab.keyboard.press("End")
        assert "<|im_end|>" in detail.inner_text() and "entropy 4.00 nats" in detail.inner_text()
        tab.keyboard.press("ArrowRight")
        assert "<|im_end|>" in detail.inner_text(), "the last token has no next one"


def test_colours_can_be_chosen_where_there_is_something_to_show(browser, file):
    with open_page(browser, file) as tab:
        select = tab.locator(".viewer select")
        select.select_option(label="the target's first choice")
        assert tab.locator(".tokens.choice .wrong").count() > 0
        edge = "getComputedStyle(document.querySelector('.wrong')).borderBottomStyle"
        assert tab.evaluate(edge) == "dashed", "told by more than colour"
        select.select_option(label="the target's entropy")
        assert tab.locator(".tokens.entropy .e4").count() > 0
        tab.get_by_role("button", name="Next").click()
        assert tab.locator(".tokens.entropy .e0").count() == 0, "without figures of a target"


def test_search_finds_documents_and_marks_tokens(browser, file):
    with open_page(browser, file) as tab:
        box = tab.get_by_label("Search")
        box.fill("answer IS par")
        box.press("Enter")
        assert tab.locator(".head").inner_text().startswith("Document 10 ·")
        assert "answer is Par" in "".join(tab.locator(".hit").all_inner_texts())
        assert tab.get_by_role("status").inner_text().startswith("This text is in 1 document;")
        box.fill("paris")
        box.press("Enter")
        assert (
            "This text is in 2 documents; this is match 2" in tab.get_by_role("status").inner_text()
        )
        box.press("Enter")
        assert tab.locator(".head").inner_text().startswith("Document 0 ·")
        box.fill("nowhere")
        tab.get_by_role("button", name="Find").click()
        assert tab.get_by_role("status").inner_text().startswith("No document")
        assert tab.locator(".hit").count() == 0


def test_texts_of_documents_stay_texts(browser, file):
    with open_page(browser, file, PHONE) as tab:
        tab.get_by_role("button", name="Next").click()
        assert tab.locator("img").count() == 0 and tab.locator(".tokens b").count() == 0
        assert ATTACK in "".join(tab.locator(".tokens .text").all_text_contents())
        hidden = ["⟨E2⟩", "⟨80⟩", "\\u202e", "⟨E2⟩", "⟨80⟩", "\\u200b"]
        assert tab.locator(".esc").all_inner_texts() == hidden
        tab.locator(".turn.learned .tok").last.hover()
        assert tab.locator(".detail img").count() == 0


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_fits_every_window_and_can_be_read(browser, file, size, dark):
    with open_page(browser, file, size, dark) as tab:
        for mode in range(3):
            tab.locator(".viewer select").select_option(str(mode))
            assert not scrolls_sideways(tab)
            found = tab.evaluate(CONTRASTS)
            assert min(found) >= 4.5, (mode, sorted(found)[:3])


CONTRASTS = """() => {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const context = canvas.getContext("2d", { willReadFrequently: true });
  const luminance = (colours) => {
    context.clearRect(0, 0, 1, 1);
    for (const colour of colours) {
      context.fillStyle = colour;
      context.fillRect(0, 0, 1, 1);
    }
    const parts = [...context.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => v / 255);
    const [r, g, b] = parts.map((p) => (p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = getComputedStyle(document.body).backgroundColor;
  return [...document.querySelectorAll(".tok, .head, h3, .note, label")].map((element) => {
    const style = getComputedStyle(element);
    const behind = luminance([page, style.backgroundColor]);
    const text = luminance([page, style.color]);
    return (Math.max(behind, text) + 0.05) / (Math.min(behind, text) + 0.05);
  });
}"""
