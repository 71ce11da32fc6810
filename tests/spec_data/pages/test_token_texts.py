"""The texts of single tokens: together they are the document, for every tokenizer."""

import random
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spec_data.pages.token_texts import TokenTexts
from tests.spec_data.corpus.templates import tokenizer

TEXTS = [
    "The capital of France is Paris.\n\n  def add(a, b):\n\treturn a + b",
    "漢字 and 😀😀 and é, ünïcödé 👩‍👩‍👧‍👦 end",
    " leading, trailing ",
    "\ufffd is a character of its own",
]
MARK = re.compile("⟨([0-9A-F]{2}(?: [0-9A-F]{2})*)⟩")


def qwen_like() -> PreTrainedTokenizerFast:
    """A byte-level BPE whose tokens hold parts of characters, and parts of two of them."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False)
    draw = random.Random(0)
    lines = ["".join(chr(draw.randint(0x4E00, 0x9FFF)) for _ in range(30)) for _ in range(200)]
    lines += ["".join(chr(draw.randint(0x1F600, 0x1F64F)) for _ in range(30)) for _ in range(50)]
    core.train_from_iterator(lines, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


TOKENIZERS = {name: tokenizer(name) for name in ("chatml", "llama3", "mistral")}
TOKENIZERS["qwen"] = qwen_like()


@pytest.mark.parametrize("family", TOKENIZERS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_and_marks_are_the_bytes_of_the_decoded_text(family, text):
    tok = TOKENIZERS[family]
    ids = tok.encode(text, add_special_tokens=False)
    shown = TokenTexts(tok).table(ids)
    before = tok.encode("a", add_special_tokens=False)
    whole = tok.decode([*before, *ids])[len(tok.decode(before)) :]
    parts = MARK.split("".join(shown))
    pairs = zip(parts[::2], [*parts[1::2], ""], strict=True)
    assert b"".join(own.encode() + bytes.fromhex(mark) for own, mark in pairs) == whole.encode()
    if "漢" in text and family != "mistral":
        assert any(MARK.search(own) for own in shown)


def test_special_tokens_are_told_and_tokens_without_text_have_a_name():
    tok = TOKENIZERS["chatml"]
    known = TokenTexts(tok)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end in known.special
    assert known.table([end, len(tok) + 7]) == ["<|im_end|>", f"<token {len(tok) + 7}>"]


def test_a_tokenizer_that_does_not_tell_its_bytes_has_the_sign_for_them():
    class Silent:
        all_special_ids = ()

        def encode(self, text, add_special_tokens):
            return [0]

        def decode(self, ids, skip_special_tokens):
            return "".join({0: "a", 1: "é", 2: "\ufffd"}[i] for i in ids)

        def convert_ids_to_tokens(self, token):
            return {0: "a", 1: "é", 2: "漢?"}[token]

    assert TokenTexts(Silent()).table([0, 1, 2]) == ["a", "é", "\ufffd"]
