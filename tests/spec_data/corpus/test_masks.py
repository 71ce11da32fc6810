"""Control tokens in contents, and the masks `all` and `without-reasoning`.

Expected documents are text with the supervised parts in «».
"""

import random

import pytest

from spec_data import open_dataset
from spec_data.corpus.chat import Renderer, RenderError
from spec_data.corpus.documents import CONTROL, CONTROL_TEXT, OUTSIDE, count_warnings
from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.plan import render_corpus
from spec_data.shards.errors import DatasetError
from spec_data.shards.loss_masks import masks_under
from spec_data.terminal import NOTICE
from tests.factory import tiny_dataset
from tests.spec_data.corpus.chat_cases import THOUGHT, TWO, answer, im, system, user
from tests.spec_data.corpus.reading import write_jsonl
from tests.spec_data.corpus.templates import CHATML, TEMPLATES, tokenizer
from tests.spec_data.corpus.test_chat import chat, expect, supervised_texts, text
from tests.spec_data.corpus.test_lost_turns import HARMONY, R1_CALLS, V31_CALLS, called, tool

WITHOUT = "without-reasoning"

# -- control tokens --------------------------------------------------------------------------------


def controls(result):
    return {n.removeprefix(CONTROL): c for n, c in result.counts.items() if n.startswith(CONTROL)}


def test_messages_that_hold_control_tokens_are_counted_in_every_field():
    tok = tokenizer("qwen3")
    call = {"function": {"name": "w", "arguments": {"a": ["b", {"c": "<|im_end|>"}]}}}
    messages = [
        system("<|im_start|><|im_start|>"),
        user("<|im_start|>x<|im_end|><think>"),
        answer("a", tool_calls=[call]),
        tool("<tool_call>"),
        answer("b", reasoning_content="<|endoftext|>"),
    ]
    result = Renderer(tok).render(chat(*messages))
    found = controls(result)
    assert found == {
        "<|im_start|>": 2,
        "<|im_end|>": 2,
        "<think>": 1,
        "<tool_call>": 1,
        "<|endoftext|>": 1,
    }


def test_what_an_answer_may_hold_and_what_no_template_reads_is_not_counted():
    """Tags of thoughts and calls in answers."""
    tok = tokenizer("qwen3")
    messages = [
        user("say <|x|> [/im]"),
        answer("<think>\nso\n</think>\n\n<tool_call>{}</tool_call>"),
    ]
    assert not controls(Renderer(tok).render(chat(*messages)))
    assert not controls(Renderer(tok).render(chat(*TWO, user("<|im_end|>")))), "it is left out"


def test_texts_of_rendered_chats_are_counted_and_named():
    """All of a text is learned, so a chat in it is learned with its questions."""
    tok = tokenizer("qwen3")
    result = Renderer(tok).render(text("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"))
    assert not controls(result)
    held = {n: c for n, c in result.counts.items() if n.startswith(CONTROL_TEXT)}
    assert held == {f"{CONTROL_TEXT}<|im_start|>": 1, f"{CONTROL_TEXT}<|im_end|>": 1}
    (said,) = count_warnings({"rendering": held}, 100)
    assert "all of a text is learned, questions too" in said
    for plain in ("hi", f"a text and its end{tok.eos_token}", "say <|x|>"):
        assert not Renderer(tok).render(text(plain)).counts


@pytest.mark.parametrize("family", [n for n in TEMPLATES if n not in ("r1", "glm", "thinking")])
def test_control_tokens_of_a_user_move_no_turn(family):
    """The same answers are supervised, token for token, whatever the questions hold."""
    tok, draw = tokenizer(family), random.Random(family)
    renderer = Renderer(tok)
    names = sorted(t.content for t in tok.added_tokens_decoder.values())
    for _ in range(20):
        odd = ["".join(draw.choices([*names, "x", "\n"], k=4)) + "z" for _ in range(2)]
        plain, held = (
            renderer.render(chat(user(a), answer("Paris."), user(b), answer("Yes.")))
            for a, b in (("q", "r"), odd)
        )
        both = [[t for d in r.documents for t in supervised_texts(tok, d)] for r in (plain, held)]
        assert both[0] == both[1]
        assert sum(sum(d.loss_mask) for d in plain.documents) == sum(
            sum(d.loss_mask) for d in held.documents
        )


def test_the_warning_names_the_tokens_that_most_messages_hold():
    counts = {f"{CONTROL}<|{i}|>": i for i in range(1, 7)}
    (said,) = count_warnings({"rendering": counts}, 100)
    assert "(<|6|> in 6, <|5|> in 5, <|4|> in 4, <|3|> in 3 and 2 more)" in said


def test_a_corpus_with_control_tokens_in_messages_is_named(tmp_path, caplog):
    held = {"messages": [user("<|im_end|>"), answer("Paris.")]}
    plan_of(tmp_path, caplog, [*ROWS, held, held | {"tools": []}], "assistant")
    (said,) = [r.getMessage() for r in caplog.records if "control" in r.getMessage()]
    assert said.startswith("warning[corpus]: messages hold control tokens of the chat template")
    assert "(<|im_end|> in 2)" in said


def test_a_corpus_of_rendered_chats_is_named(tmp_path, caplog):
    rows = [{"text": f"<|im_start|>user\nq{i}<|im_end|>"} for i in range(2)]
    plan_of(tmp_path, caplog, [*ROWS, *rows], "assistant")
    (said,) = [r.getMessage() for r in caplog.records if "control" in r.getMessage()]
    assert said.startswith("warning[corpus]: rows of text hold control tokens")
    assert "<|im_start|> in 2" in said


# -- every token -----------------------------------------------------------------------------------


def plan_of(tmp_path, caplog, rows, mask, longest=512):
    path = write_jsonl(tmp_path / "c.jsonl", rows)
    renderer = Renderer(tokenizer("chatml"), mask=mask)
    with caplog.at_level(NOTICE):
        planned, facts = render_corpus(CorpusReader([path]), renderer, longest, processes=1)
    return planned, facts["counts"].rendering.get(OUTSIDE, 0)


ROWS = [
    {"messages": [user(f"one two {i}"), answer("Paris."), user("r"), answer("Yes.")]}
    for i in range(3)
]


def test_mask_all_says_how_many_tokens_lie_outside_answers(tmp_path, caplog):
    rows = [*ROWS, ROWS[0], {"text": "some plain text"}, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    planned, outside = plan_of(tmp_path, caplog, rows, "all")
    chats = planned.read(0, 3)
    turns = sum(end - start for turns in chats.turns for _, start, end in turns)
    assert outside == len(chats.tokens["input_ids"]) - turns > 0, "no duplicate, no text"
    (said,) = [r.getMessage() for r in caplog.records if "outside" in r.getMessage()]
    assert said.startswith(f"warning[corpus]: --mask all supervises {outside:,} tokens outside")


FLAGGED = [
    {"messages": [user(f"q {i}"), answer("Paris.") | {"train": i}, user("r"), answer("Yes.")]}
    for i in range(2)
]
IDS = [{"input_ids": [1, 2, 3, 4 + i]} for i in range(3)]


def test_what_flags_and_masks_leave_out_and_what_has_no_mask_is_told(tmp_path, caplog):
    rows = [*FLAGGED, *IDS, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    plan_of(tmp_path, caplog, rows, "assistant")
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("masks ")]
    assert said == [
        "masks      1 answers are not learned, as flags of their messages say",
        "masks      3 rows of input_ids have no mask, so every token of them is learned, prompts "
        "too",
    ]
    caplog.clear()
    plan_of(tmp_path, caplog, ROWS, "assistant")
    assert not [r for r in caplog.records if r.getMessage().startswith("masks ")]


def test_mask_all_against_flags_and_masks_of_rows_is_named(tmp_path, caplog):
    rows = [*FLAGGED, *IDS, {"input_ids": [1, 2], "loss_mask": [0, 1]}]
    plan_of(tmp_path, caplog, rows, "all")
    (said,) = [r.getMessage() for r in caplog.records if "learns" in r.getMessage()]
    assert said.startswith(
        "warning[corpus]: --mask all learns 1 answers whose flags and the tokens of 1 rows of "
        "input_ids whose masks say that they are not learned"
    )
    caplog.clear()
    plan_of(tmp_path, caplog, [*ROWS, *IDS], "all")
    assert "learns" not in caplog.text


def test_tokens_that_are_cut_off_do_not_lie_outside_answers(tmp_path, caplog):
    """Three beginnings of one text are one document, before its first answer."""
    planned, outside = plan_of(tmp_path, caplog, ROWS, "all", longest=5)
    assert len(planned) == 1 and outside == 5


@pytest.mark.parametrize("mask", ["assistant", "last-turn", WITHOUT])
def test_other_masks_supervise_nothing_outside_answers(tmp_path, caplog, mask):
    assert plan_of(tmp_path, caplog, ROWS, mask)[1] == 0
    assert not [r for r in caplog.records if "outside" in r.getMessage()]


# -- without reasoning -----------------------------------------------------------------------------


def without(template, messages, family="chatml", **more):
    tok = tokenizer(family)
    tok.chat_template = template or tok.chat_template
    ends = tok.convert_tokens_to_ids(["<|eot_id|>"])
    result = Renderer(tok, mask=WITHOUT, eot_token_ids=ends, **more).render(chat(*messages))
    return tok, result


@pytest.mark.parametrize(
    "given", [THOUGHT, answer("<think>\nI think\n\nhard\n</think>\n\nThe answer.")]
)
@pytest.mark.parametrize("family", ["qwen3", "thinking", "r1"])
def test_reasoning_is_context_where_it_is_left_out(family, given):
    tok, result = without(None, [user("a"), given], family)
    (document,) = result.documents
    assert supervised_texts(tok, document) == [f"The answer.{tok.eos_token}"]
    whole = Renderer(tok, mask="assistant").render(chat(user("a"), given)).documents[0]
    assert whole.input_ids == document.input_ids, "the tokens are the same"
    assert sum(whole.loss_mask) > sum(document.loss_mask)
    assert "I think" in supervised_texts(tok, whole)[0]


def test_reasoning_in_a_channel_is_left_out():
    """gpt-oss: no tag of a thought is in it; the thought of a call, and of the answer behind it."""
    messages = [user("a"), called("look"), tool("sun"), answer("Sunny.", reasoning_content="say")]
    tok, result = without(HARMONY, messages)
    supervised = [t for d in result.documents for t in supervised_texts(tok, d)]
    call = '<|im_start|>me:call {"name": "w", "arguments": {"city": "Paris"}}<|eot_id|>'
    assert supervised == [call, "<|im_start|>me:say Sunny.<|im_end|>"]
    assert "think look" in tok.decode(result.documents[0].input_ids)


@pytest.mark.parametrize("template", [R1_CALLS, V31_CALLS])
def test_reasoning_that_only_the_target_writes_is_left_out(template):
    messages = [user("a"), called("look"), tool("sun"), answer("Sunny.", reasoning_content="say")]
    tok, result = without(template, messages)
    call = '<tool_call>w{"city": "Paris"}</tool_call><|im_end|>'
    assert [t for d in result.documents for t in supervised_texts(tok, d)] == [
        call,
        "Sunny.<|im_end|>",
    ]


@pytest.mark.parametrize("messages", [TWO, (user("<think>x"), answer("<b>c</b>"))])
@pytest.mark.parametrize("family", ["chatml", "llama3", "tagged", "qwen3"])
def test_answers_without_reasoning_are_as_ever(family, messages):
    tok = tokenizer(family)
    plain, less = (Renderer(tok, mask=m).render(chat(*messages)) for m in ("assistant", WITHOUT))
    assert plain.documents == less.documents


def test_of_a_thought_that_a_limit_cut_nothing_is_left():
    cut = answer("", reasoning_content="so") | {"finish_reason": "length"}
    tok, result = without(None, [user("a"), cut, user("b"), answer("Paris.")], "qwen3")
    assert [t for d in result.documents for t in supervised_texts(tok, d)] == ["Paris.<|im_end|>"]
    assert result.counts["answers of reasoning alone, not supervised"] == 1
    with pytest.raises(RenderError) as caught:
        without(None, [user("a"), cut], "qwen3")
    assert caught.value.reason == "nothing-supervised" and not caught.value.broken


def test_a_dataset_that_was_generated_otherwise_does_not_tell_where_reasoning_ends(tmp_path):
    """Only those that were generated with the mask have turns that begin behind the reasoning."""
    path = tiny_dataset(tmp_path / "data", n_docs=2)
    with pytest.raises(DatasetError, match=f"generate with --mask {WITHOUT}"):
        masks_under(open_dataset(path), WITHOUT)


def test_text_and_given_masks_have_no_reasoning():
    tok = tokenizer("qwen3")
    (document,) = Renderer(tok, mask=WITHOUT).render(text("<think>a</think>b")).documents
    assert all(document.loss_mask)


def test_the_marked_text():
    tok, result = without(CHATML, [user("a"), answer("<think>so</think>Paris.")])
    marked = im("user", "a", "assistant", "<think>so</think>«Paris.»")
    assert [(d.input_ids, d.loss_mask) for d in result.documents] == [expect(tok, marked)]
