"""Rows of every format become the same record, and a bad row has a reason."""

import json

import pytest

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.records import Record, parse_row

Q, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
QA, S = [Q, A], {"role": "system", "content": "s"}
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
OBSERVED = [*SHAREGPT, {"from": "observation", "value": "t"}]
ALPACA = {"instruction": "q", "input": "i", "output": "a", "history": [["q", "a"]], "system": "s"}
FORMATS = [
    ("messages", {"messages": QA, "text": "ready made", "prompt": "x"}, QA),
    (
        "conversations",
        {"system": "s", "conversations": OBSERVED},
        [S, *QA, {"role": "tool", "content": "t"}],
    ),
    ("conversations", {"conversations": QA}, QA),
    ("messages", {"messages": json.dumps(QA)}, QA),
    ("prompt+completion", {"prompt": "q", "completion": "a"}, QA),
    ("prompt+completion", {"prompt": [Q], "completion": [A]}, QA),
    ("prompt+completion", {"prompt": [Q], "completion": "a"}, QA),
    ("prompt+response", {"prompt": "q", "response": "a"}, QA),
    ("question+answer", {"question": "q", "answer": "a"}, QA),
    ("instruction", {"instruction": "q", "input": "", "output": "a"}, QA),
    ("instruction", ALPACA, [S, *QA, Q | {"content": "q\n\ni"}, A]),
]


@pytest.mark.parametrize(("kind", "row", "messages"), FORMATS)
def test_conversation_formats(kind, row, messages):
    record = parse_row(row, source="f", where="f:3")
    assert record == Record(source="f", where="f:3", messages=messages) and record.kind == kind


LOGS = [
    ({"finish_reason": "length"}, {}, True),
    ({"stop_reason": "max_tokens", "finish_reason": None}, {}, True),
    ({"finish_reason": "stop"}, {"stop_reason": "MAX_TOKENS"}, True),
    *(({"finish_reason": reason}, {}, False) for reason in ("stop", "tool_calls", None, 3)),
]


@pytest.mark.parametrize(("row", "own", "cut"), LOGS)
def test_the_finish_reason_beside_messages_is_that_of_the_last_answer(row, own, cut):
    record = parse_row({"messages": [*QA, Q, A | own, Q]} | row, source="f", where="f:1")
    reasons = [m.get("finish_reason") for m in record.messages]
    assert reasons == [None, None, None, "length" if cut else None, None]
    assert record.unused == ()


def test_tools_thinking_and_kwargs_are_kept():
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Paris"}'}}
    parsed = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
    tool = {"type": "function", "function": {"name": "w"}}
    sun = {"role": "tool", "content": "sun", "name": "w"}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        sun,
        A | {"reasoning_content": "r", "weight": None},
    ]
    kwargs = {"enable_thinking": False}
    row = {"messages": messages, "tools": json.dumps([tool]), "chat_template_kwargs": kwargs}
    record = parse_row(row, source="f", where="f:1")
    assert record.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [parsed]},
        sun,
        A | {"reasoning_content": "r"},
    ]
    assert (record.tools, record.template_kwargs) == ([tool], kwargs)


@pytest.mark.parametrize("empty", [None, "", " "])
def test_what_calls_nothing_is_no_call_and_no_arguments_are_none(empty):
    """Templates take an empty list for calls: they then write no answer, or refuse the row."""
    call = {"type": "function", "function": {"name": "now", "arguments": empty}}
    messages = [
        {"role": "user", "content": "q", "tool_calls": []},
        {"role": "assistant", "content": "a", "tool_calls": []},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    found = parse_row({"messages": messages}, source="s", where="w").messages
    assert found is not None
    assert found[:2] == [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert found[3]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("key", ["loss", "train", "training"])
def test_answers_that_other_trainers_leave_out_have_weight_0(key):
    for value in (False, True, None, "false"):
        answer = {"role": "assistant", "content": "a", "weight": 1, key: value}
        messages = [{"role": "user", "content": "q"}, answer]
        found = parse_row({"messages": messages}, source="s", where="w").messages
        assert found is not None and found[1]["weight"] == (value in (True, None))


def test_labels_and_padding_of_transformers_are_a_mask():
    row = {"input_ids": [0, 5, 6, 7, 0], "labels": [-100, -100, 6, 7, -100]}
    record = parse_row(row, source="f", where="f:1")
    assert (record.input_ids, record.loss_mask) == (row["input_ids"], [0, 0, 1, 1, 0])
    padded = row | {"attention_mask": [0, 1, 1, 1, 0]}
    record = parse_row(padded, source="f", where="f:1")
    assert (record.input_ids, record.loss_mask) == ([5, 6, 7], [0, 1, 1]) and not record.unused
    record = parse_row(padded | {"loss_mask": [0, 1, 0, 0, 1]}, source="f", where="f:1")
    assert record.loss_mask == [1, 0, 0]  # it counts, and no labels
    record = parse_row(padded | {"labels": [9, -100, 6, 7, 9]}, source="f", where="f:1")
    assert record.loss_mask == [0, 1, 1]  # padding has any label
    record = parse_row({"input_ids": [5, 6], "labels": 1}, source="f", where="f:1")
    assert record.loss_mask is None  # of a classifier
    record = parse_row({"text": "a", "labels": [1]}, source="f", where="f:1")
    assert record.unused == ("labels",)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ([], "expected an object"),
        ({"question": "q"}, r"no known columns \(found: question; known formats: messages"),
        ({"messages": []}, "messages is empty"),
        ({"messages": "q"}, "messages is a string but not JSON"),
        ({"messages": '"q"'}, "messages is a string, not a list of messages"),
        ({"messages": " "}, "messages is null, not a list of messages"),
        ({"conversations": "[" * 100_000}, "conversations is a string but not JSON"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "unknown role 'narrator'"),
        ({"messages": [{"role": "user", "content": 3}]}, "is a number, not text"),
        ({"messages": [{"role": "user", "content": None}]}, "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "part of type 'image'"),
        ({"conversations": QA, "image": "a.png"}, "the row has 'image'"),
        ({"messages": [{"role": "user", "content": "q", "images": ["a"]}]}, r"\[0\] has 'images'"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
        ({"text": "  "}, "text is empty"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": [1, 2], "labels": [-100, 3]}, "neither -100 nor the tokens of input_ids"),
        ({"input_ids": [1, 2], "labels": [2]}, "neither -100 nor"),
        ({"input_ids": [1, 2], "attention_mask": [1]}, "input_ids has 2 values, attention_mask 1"),
        ({"input_ids": [1], "attention_mask": [0]}, "attention_mask is all zero"),
        ({"messages": QA, "tools": "nonsense"}, "not JSON"),
        ({"prompt": 3, "completion": "a"}, "prompt is a number"),
        ({"instruction": "", "input": "", "output": "a"}, "both empty"),
    ],
)
def test_bad_rows_say_why(row, why):
    with pytest.raises(BadRow, match=why):
        parse_row(row, source="f", where="f:1")
