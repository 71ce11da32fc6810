"""The texts of single tokens: together they are the document, for every tokenizer."""

import random
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from spec_data.pages.token_texts import Joiner, TokenTexts, marked
from tests.spec_data.corpus.templates import tokenizer

TEXTS = [
    "The capital of France is Paris.\n\n  def add(a, b):\n\treturn a + b",
    "漢字 and 😀😀 and é, ünïcödé 👩‍👩‍👧‍👦 end",
    " leading, trailing ",
    "\ufffd is a character of its own",
]
MARK = re.compile("⟨[0-9A-F]{2}(?: [0-9A-F]{2})*⟩")


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
def test_texts_join_to_the_decoded_text(family, text):
    tok = TOKENIZERS[family]
    ids = tok.encode(text, add_special_tokens=False)
    shown = list(map(Joiner().add, TokenTexts(tok).table(ids)))
    before = tok.encode("a", add_special_tokens=False)
    whole = tok.decode([*before, *ids])[len(tok.decode(before)) :]
    assert MARK.sub("", "".join(shown)) == whole
    if "漢" in text and family != "mistral":
        assert any(MARK.search(own) for own in shown) and "😀" in shown


def test_a_character_is_the_text_of_the_token_that_ends_it():
    texts = [marked(data) for data in (b"a\xf0\x9f", b"\x98", b"\x80\xe6", b"\xbc\xa2b")]
    assert texts == ["a⟨F0 9F⟩", "⟨98⟩", "⟨80 E6⟩", "⟨BC A2⟩b"]
    assert list(map(Joiner().add, texts)) == ["a⟨F0 9F⟩", "⟨98⟩", "😀⟨E6⟩", "漢b"]
    assert Joiner().later(texts) == {2: "😀⟨E6⟩", 3: "漢b"}
    assert Joiner(b"\xf0\x9f\x98").add("⟨81⟩") == "😁"


@pytest.mark.parametrize("family", ["chatml", "qwen"])
def test_tokens_in_any_order_keep_every_byte(family):
    """Against a slow loop: where each character of the bytes of all tokens ends."""
    tok = TOKENIZERS[family]
    known, draw = TokenTexts(tok), random.Random(1)
    odd = [i for i in range(len(tok)) if MARK.search(known.table([i])[0])]
    assert len(odd) > 60
    for _ in range(200):
        words = "漢字😀é a" * 3
        ids = tok.encode(words, add_special_tokens=False) + draw.choices(odd, k=12)
        draw.shuffle(ids)
        parts = [known._bytes(i) for i in ids]
        assert list(map(Joiner().add, known.table(ids))) == slowly(parts)


def slowly(parts: list[bytes]) -> list[str]:
    """The texts of tokens with these bytes."""
    owner = [place for place, part in enumerate(parts) for _ in part]
    data, at = b"".join(parts), 0
    shown: list[list[str | int]] = [[] for _ in parts]
    for character in data.decode("utf-8", "surrogateescape"):
        own = data[at : at + len(character.encode("utf-8", "surrogateescape"))]
        last = owner[at + len(own) - 1]
        broken = "\udc80" <= character <= "\udcff"
        for i, byte in enumerate(own, start=at):
            if broken or owner[i] != last:
                shown[owner[i]].append(byte)
        if not broken:
            shown[last].append(character)
        at += len(own)
    return ["".join(runs(one)) for one in shown]


def runs(items: list[str | int]) -> list[str]:
    """Characters as they are, neighbouring bytes as one mark."""
    found: list[str] = []
    for item in items:
        if isinstance(item, str):
            found.append(item)
        elif found and found[-1].startswith("⟨"):
            found[-1] = f"{found[-1][:-1]} {item:02X}⟩"
        else:
            found.append(f"⟨{item:02X}⟩")
    return found


def test_special_tokens_are_told_and_tokens_without_text_have_a_name():
    tok = TOKENIZERS["chatml"]
    known = TokenTexts(tok)
    end = tok.convert_tokens_to_ids("<|im_end|>")
    assert end in known.special
    assert known.table([end, len(tok) + 7]) == ["<|im_end|>", f"<token {len(tok) + 7}>"]


def test_a_character_that_was_cut_stays_a_mark():
    tok = TOKENIZERS["chatml"]
    ids = tok.encode("😀", add_special_tokens=False)[:-1]
    shown = list(map(Joiner().add, TokenTexts(tok).table([*ids, *tok.encode("a")])))
    assert shown == ["⟨F0⟩", "⟨9F⟩", "⟨98⟩", "a"]


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
