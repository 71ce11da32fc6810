"""An answer that was cut at a limit of tokens: the target never wrote the end after it."""

import pytest

from spec_data.corpus.chat import Renderer
from tests.spec_data.corpus.chat_cases import THOUGHT, TWO, answer, user
from tests.spec_data.corpus.templates import TEMPLATES, tokenizer
from tests.spec_data.corpus.test_chat import chat, expect, supervised_texts

CUT = "answers cut at a limit of tokens, their end not supervised"


def rendered(family, *messages):
    """Return (tokenizer, end-of-turn tokens, rendering) of a conversation."""
    tok = tokenizer(family)
    ends = [tok.convert_tokens_to_ids("<|user|>")] if family == "glm" else []
    renderer = Renderer(tok, eot_token_ids=ends)
    return tok, renderer.eot_token_ids, renderer.render(chat(*messages))


def cut(content, **more):
    return answer(content, finish_reason="length", **more)


def test_the_end_of_a_cut_answer_is_not_supervised():
    tok, _, result = rendered(
        "chatml", user("hello"), cut("Paris x"), user("and?"), answer("I think so.")
    )
    marked = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n«Paris x»<|im_end|>\n"
        "<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n«I think so.<|im_end|>»\n"
    )
    (document,) = result.documents
    assert (document.input_ids, document.loss_mask) == expect(tok, marked)
    assert result.counts == {CUT: 1, "turns without an end-of-turn token": 1}


@pytest.mark.parametrize("family", sorted(TEMPLATES.keys() - {"r1"}))  # r1 needs thinking
def test_in_every_template_only_the_end_is_taken_away(family):
    """Beside the same conversation uncut: equal but for end tokens of the answers that were cut."""
    shorter = [dict(m, finish_reason="length") if m["role"] == "assistant" else m for m in TWO]
    _, ends, plain = rendered(family, *TWO)
    _, _, cut_ones = rendered(family, *shorter)
    for one, other in zip(plain.documents, cut_ones.documents, strict=True):
        for turn, less in zip(one.turns, other.turns, strict=True):
            assert turn.start == less.start
            assert less.end == turn.end - (one.input_ids[turn.end - 1] in ends)
            assert other.input_ids[less.end - 1] not in ends
        assert one.input_ids[: len(other.input_ids)] == other.input_ids


def test_no_end_is_appended_to_a_cut_answer():
    """A template that closes no turn: the end that generate appends is not the target's."""
    tok, _, result = rendered("glm", user("hello"), cut("Paris"))
    (document,) = result.documents
    assert supervised_texts(tok, document)[-1].endswith("Paris")
    assert document.input_ids[document.turns[-1].end :] == []


def test_a_cut_answer_of_a_template_that_rewrites_history():
    messages = [user("hello"), dict(THOUGHT, finish_reason="length"), user("and?"), answer("no")]
    tok, _, result = rendered("qwen3", *messages)
    first, second = (supervised_texts(tok, d)[-1] for d in result.documents)
    assert "<|im_end|>" not in first and second.endswith("<|im_end|>")
