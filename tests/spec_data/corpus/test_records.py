"""Rows of every format become the same record, and a bad row has a reason."""

import json

import pytest

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.records import Record, parse_row

QA = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FORMATS = [
    ("messages", {"messages": QA, "text": "ready made", "prompt": "x"}, QA),
    (
        "conversations",
        {
            "system": "s",
            "conversations": [
                {"from": "human", "value": "q"},
                {"from": "gpt", "value": "a"},
                {"from": "observation", "value": "t"},
            ],
        },
        [{"role": "system", "content": "s"}, *QA, {"role": "tool", "content": "t"}],
    ),
    ("conversations", {"conversations": QA}, QA),
    ("messages", {"messages": json.dumps(QA)}, QA),
    (
        "conversations",
        {"conversations": '[{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]'},
        QA,
    ),
    ("prompt+completion", {"prompt": "q", "completion": "a"}, QA),
    ("prompt+completion", {"prompt": QA[:1], "completion": QA[1:]}, QA),
    ("prompt+completion", {"prompt": QA[:1], "completion": "a"}, QA),
    ("prompt+response", {"prompt": "q", "response": "a"}, QA),
    ("question+answer", {"question": "q", "answer": "a"}, QA),
    ("instruction", {"instruction": "q", "input": "", "output": "a"}, QA),
    (
        "instruction",
        {"instruction": "q", "input": "i", "output": "a", "history": [["h", "b"]], "system": "s"},
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "h"},
            {"role": "assistant", "content": "b"},
            {"role": "user", "content": "q\n\ni"},
            {"role": "assistant", "content": "a"},
        ],
    ),
]


@pytest.mark.parametrize(("kind", "row", "messages"), FORMATS)
def test_conversation_formats(kind, row, messages):
    record = parse_row(row, source="f", where="f:3")
    assert (record.kind, record) == (kind, Record(source="f", where="f:3", messages=messages))


LOGS = [
    {"messages": [*QA, *QA], "finish_reason": "length"},
    {"messages": [*QA, *QA, QA[0]], "stop_reason": "max_tokens", "finish_reason": None},
    {"messages": [*QA, QA[0], QA[1] | {"stop_reason": "MAX_TOKENS"}], "finish_reason": "stop"},
]


@pytest.mark.parametrize("row", LOGS)
def test_the_finish_reason_beside_messages_is_that_of_the_last_answer(row):
    record = parse_row(row, source="f", where="f:1")
    cut = [m.get("finish_reason") == "length" for m in record.messages]
    assert [i for i, one in enumerate(cut) if one] == [3] and record.unused == ()


@pytest.mark.parametrize("reason", ["stop", "tool_calls", None, 3])
def test_other_finish_reasons_end_no_answer(reason):
    row = {"prompt": "q", "completion": "a", "finish_reason": reason}
    assert parse_row(row, source="f", where="f:1").messages == QA


def test_text_and_token_rows():
    assert parse_row({"text": "hi"}, source="f", where="f:1").text == "hi"
    record = parse_row({"input_ids": [1, 2], "loss_mask": [0, True]}, source="f", where="")
    assert (record.kind, record.input_ids, record.loss_mask) == ("input_ids", [1, 2], [0, 1])


def test_tools_thinking_and_kwargs_are_kept():
    call = {"type": "function", "function": {"name": "w", "arguments": '{"city": "Paris"}'}}
    tool = {"type": "function", "function": {"name": "w"}}
    row = {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "sun", "name": "w"},
            {"role": "assistant", "content": "c", "reasoning_content": "r", "weight": None},
        ],
        "tools": json.dumps([tool]),
        "chat_template_kwargs": {"enable_thinking": False},
    }
    record = parse_row(row, source="f", where="f:1")
    parsed = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
    assert record.messages == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "tool_calls": [parsed]},
        {"role": "tool", "content": "sun", "name": "w"},
        {"role": "assistant", "content": "c", "reasoning_content": "r"},
    ]
    assert record.tools == [tool]
    assert record.template_kwargs == {"enable_thinking": False}


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
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "u"}]}]},
            "part of type 'image_url'",
        ),
        ({"conversations": QA, "image": "a.png"}, "the row has 'image'"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "surrogate"),
        ({"text": "  "}, "text is empty"),
        ({"input_ids": [1, "2"]}, "not a list of integers"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"messages": QA, "tools": "nonsense"}, "not JSON"),
        ({"prompt": 3, "completion": "a"}, "prompt is a number"),
        ({"instruction": "", "input": "", "output": "a"}, "both empty"),
    ],
)
def test_bad_rows_say_why(row, why):
    with pytest.raises(BadRow, match=why):
        parse_row(row, source="f", where="f:1")
