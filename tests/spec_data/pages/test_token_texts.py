"""The texts of single tokens: together they are the document, for every tokenizer."""

import pytest

from spec_data.pages.token_texts import TokenTexts
from tests.spec_data.corpus.templates import tokenizer

TEXT = " The capital of  France.\n\n  def add(a):\n\treturn a + é "


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_texts_are_the_decoded_text(family):
    tok = tokenizer(family)
    ids = tok.encode(TEXT, add_special_tokens=False)
    before = tok.encode("a", add_special_tokens=False)
    whole = tok.decode([*before, *ids])[len(tok.decode(before)) :]
    texts = "".join(TokenTexts(tok).table(ids))
    assert texts == whole.replace("é", "\ufffd\ufffd" if "\ufffd" in texts else "é")


def test_special_tokens_are_told_and_tokens_without_text_have_a_name():
    tok = tokenizer("chatml")
    texts = TokenTexts(tok)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end in texts.special
    assert texts.table([end, len(tok) + 7]) == ["<|im_end|>", f"<token {len(tok) + 7}>"]
