"""Tokens of beginnings, taken from one tokenisation, are those of every text by itself."""

import random
from itertools import product

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.records import Record
from spec_data.corpus.tokens import Tokens
from tests.spec_data.corpus.chat_cases import CASES
from tests.spec_data.corpus.templates import TEMPLATES, tokenizer

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|", "<|im", "<s>", "</s>", "\n\n", "word", "<|strip|>")
SPECIAL += ("lo<|imq",)
PIECES = (*SPECIAL, " ", "\n", "hello", "a b", "Ü", "é", "🦊", "12", "start|>", "_end|>", "wor")
PIECES += ("ｗｏｒｄ", "<s", "  ", ">", "|", "WORD", "lo", "q")
ADDED = (
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False, rstrip=True),
    AddedToken("<|im", special=False, normalized=False),
    AddedToken("<s>", special=True, normalized=False, lstrip=True),
    AddedToken("lo<|imq", special=False, normalized=False),  # takes in the beginning of another
    AddedToken("</s>", special=True, normalized=True),
    AddedToken("\n\n", special=False, normalized=False),
    AddedToken("word", special=False, normalized=False, single_word=True),
    AddedToken("<|strip|>", special=True, normalized=False, lstrip=True, rstrip=True),
)
NORMALIZERS = {
    "none": None,
    "nfkc lower": normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()]),
    "prepend": normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
    "strip": normalizers.Sequence([normalizers.Strip(), normalizers.NFD()]),
}
PRE_TOKENIZERS = {
    "none": None,
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "metaspace first": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "words": pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits()]),
}


def backend(normalizer=None, pre_tokenizer=None, dropout=None):
    """Return a BPE over characters with a few merges; its own vocabulary has an added token too."""
    letters = sorted({c for p in PIECES for c in p} | set(pre_tokenizers.ByteLevel.alphabet()))
    letters += ["▁", "e", "̈", "́"]
    merges = [("▁", "h"), ("h", "e"), ("l", "l"), ("w", "o"), ("r", "d"), ("wo", "rd"), ("<", "s")]
    merges += [(" ", " "), ("\n", "\n"), ("_", "s"), ("a", "r")]
    vocab = dict.fromkeys([*letters, "<unk>", *(a + b for a, b in merges)])
    vocab = {piece: i for i, piece in enumerate(vocab)}
    model = models.BPE(vocab, merges, unk_token="<unk>", dropout=dropout)
    made = Tokenizer(model)
    made.add_tokens(list(ADDED))
    if normalizer is not None:
        made.normalizer = normalizer
    if pre_tokenizer is not None:
        made.pre_tokenizer = pre_tokenizer
    return made


def wrapped(made):
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.mark.parametrize(
    ("normalizer", "pre_tokenizer"),
    [*product(["none"], PRE_TOKENIZERS), *product(NORMALIZERS, ["none"])],
)
def test_beginnings_have_the_tokens_of_plain_tokenisation(normalizer, pre_tokenizer):
    tok = wrapped(backend(NORMALIZERS[normalizer], PRE_TOKENIZERS[pre_tokenizer]))
    tokens = Tokens(tok)
    assert set(tokens.cut_tokens.values()) == set(SPECIAL) - {"<|", "</s>", "word"}
    plain, rng = tok.backend_tokenizer, random.Random(f"{normalizer} {pre_tokenizer}")
    found = 0
    for _ in range(60):
        text = "".join(rng.choices(PIECES, k=rng.randint(1, 14)))
        whole = tokens.tokenise(text)
        assert whole.ids == plain.encode(text, add_special_tokens=False).ids
        for _ in range(8):
            other = text[: rng.randint(0, len(text))]
            if rng.random() < 0.6:
                other += "".join(rng.choices(PIECES, k=rng.randint(1, 4)))
            ids = tokens.beginning(whole, other)
            found += ids is not None
            if ids is not None:
                assert ids == plain.encode(other, add_special_tokens=False).ids, (text, other)
    assert found > 100


def test_an_added_token_that_ends_after_the_common_text_may_take_in_a_cut_token():
    tokens = Tokens(wrapped(backend()))
    whole = tokens.tokenise("hello<|im!")
    assert whole.cut_before(9) == (5, len(whole.ids) - 2)
    other = "hello<|imq"
    assert tokens.tokenise(other).ids[-1] == tokens.tokenise("lo<|imq").ids[0]
    assert tokens.beginning(whole, other) in (None, tokens.tokenise(other).ids)


def test_tokenizers_that_do_not_treat_pieces_alone_tokenise_every_text():
    class Own:
        def pre_tokenize(self, text):
            text.split(lambda i, piece: [piece])

    class Rendering(PreTrainedTokenizerFast):
        def apply_chat_template(self, *args, **options):
            return super().apply_chat_template(*args, **options)

    assert not Tokens(wrapped(backend(dropout=0.5))).cut_tokens
    own = wrapped(backend())
    own.backend_tokenizer.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Own())
    assert Tokens(own).direct and not Tokens(own).cut_tokens
    split = PreTrainedTokenizerFast(
        tokenizer_object=backend(), eos_token="</s>", split_special_tokens=True
    )
    assert not Tokens(split).cut_tokens
    rendering = Rendering(tokenizer_object=backend(), eos_token="</s>")
    assert not Tokens(rendering).direct and not Tokens(rendering).cut_tokens


def test_probes_refuse_a_tokenizer_whose_pieces_are_not_independent(monkeypatch):
    assert Tokens(wrapped(backend())).cut_tokens
    monkeypatch.setattr("spec_data.corpus.tokens._treats_pieces_alone", lambda backend: True)
    made = Tokens(wrapped(backend(dropout=0.9)))  # pieces have other tokens each time
    assert made.direct and not made.cut_tokens


WORDS = ("hello", "Paris 🦊\n\n x", " and? ", "<|im_start|>assistant\nhi<|im_end|>\n", "12\n")
WORDS += ("<|im_", "end|>", "<think>\nhm\n</think>\n\n", "</s>", "<|eot_id|>", "[INST] ", "\n\n")


def conversation(rng):
    messages = [{"role": "system", "content": rng.choice(WORDS)}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 5)):
        for role in ("user", "assistant"):
            content = "".join(rng.choices(WORDS, k=rng.randint(1, 3)))
            messages.append({"role": role, "content": content})
            if role == "assistant" and rng.random() < 0.2:
                messages[-1]["reasoning_content"] = rng.choice(WORDS)
    return Record(source="s", where="s:1", messages=messages)


def outcomes(renderer, records):
    """Return what every record is rendered to, or its error."""
    results = []
    for record in records:
        try:
            results.append(renderer.render(record))
        except RenderError as error:
            results.append((error.reason, str(error)))
    return results


@pytest.mark.parametrize("family", TEMPLATES)
def test_documents_are_those_of_tokenising_every_render(family):
    rng = random.Random(family)
    records = [conversation(rng) for _ in range(12)]
    records += [
        Record(
            source="s", where="s:2", messages=list(messages), tools=tools, template_kwargs=kwargs
        )
        for own, messages, kwargs, tools, _ in CASES.values()
        if own == family
    ]
    tok = tokenizer(family)
    slow = Renderer(tok)
    slow.template.tokens.direct = False  # apply_chat_template tokenises every render
    assert outcomes(Renderer(tok), records) == outcomes(slow, records)


def test_a_conversation_is_tokenised_once(monkeypatch):
    renderer = Renderer(tokenizer("chatml"))
    tokens, texts = renderer.template.tokens, []
    tokenise = tokens.tokenise
    monkeypatch.setattr(tokens, "tokenise", lambda text: texts.append(text) or tokenise(text))
    messages = [
        {"role": role, "content": f"{role} {i} says this"}
        for i in range(20)
        for role in ("user", "assistant")
    ]
    (document,) = renderer.render(Record(source="s", where="s:1", messages=messages)).documents
    assert len(document.turns) == 20 and len(texts) == 1
