"""Agents' logs are given to the chat template in the form in which servers give it."""

import pytest

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.chat import Renderer
from spec_data.corpus.facts import Layout
from spec_data.corpus.records import parse_row
from tests.spec_data.corpus.templates import tokenizer

U, A = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "w", "description": "weather"}
IN_API = {"type": "function", "function": FUNCTION | {"parameters": SCHEMA}}


def parse(messages, layout=None, **columns):
    row = {"messages": messages, **columns}
    return parse_row(row, source="f", where="f:1", **({"layout": layout} if layout else {}))


# -- tools and calls -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["input_schema", "inputSchema", "args_schema"])
def test_schemas_of_tools_under_other_names_are_their_parameters(name):
    """Anthropic's, MCP's and LangChain's; templates read `parameters` alone."""
    for tool in (
        FUNCTION | {name: SCHEMA},
        {"type": "function", "function": FUNCTION | {name: SCHEMA}},
        {"type": "function", "function": FUNCTION | {name: SCHEMA, "parameters": None}},
    ):
        for row in ({"tools": [tool]}, {"functions": [tool]}):
            record = parse([U, A], **row)
            given = record.tools[0]["function"]
            assert given["parameters"] == SCHEMA
            assert name not in given
            assert any(note.startswith(f"{name} of a tool") for note in record.notes)
        inside = parse([U | {"tools": [tool]}, A])
        assert inside.tools[0]["function"]["parameters"] == SCHEMA


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"required": ["city"]}, "required of a tool"),
        ({"inputSchema": {"type": "object"}}, "inputSchema of a tool"),
        ({"parameters": {"city": {"type": "string"}}}, "no JSON schema"),
        ({"parameters": "city: string"}, "no JSON schema"),
        ({"strict": True}, None),
        ({"parameters": {"type": "object"}}, None),
        ({"parameters": {}}, None),
    ],
)
def test_what_servers_or_templates_may_drop_of_a_tool_is_named(more, named):
    tool = {"type": "function", "function": IN_API["function"] | more}
    record = parse([U, A], tools=[tool])
    assert record.tools == [tool]
    assert [named in note for note in record.notes] == ([True] if named else [])


@pytest.mark.parametrize(
    "call",
    [
        {"name": "w", "args": {"city": "Paris"}, "id": "c1", "type": "tool_call"},
        {"name": "w", "arguments": '{"city": "Paris"}', "id": "c1"},
        {"id": "c1", "type": "function", "function": {"name": "w", "args": {"city": "Paris"}}},
    ],
)
def test_bare_calls_are_given_as_servers_give_them(call):
    (given,) = parse([U, A | {"tool_calls": [call]}]).messages[1]["tool_calls"]
    function = {"name": "w", "arguments": {"city": "Paris"}}
    assert given == {"id": "c1", "type": "function", "function": function}


@pytest.mark.parametrize("arguments", ['"{}"', "{'city': 'Paris'}", '{"city": ', "3", [1]])
def test_arguments_that_are_no_object_are_named(arguments):
    call = {"type": "function", "function": {"name": "w", "arguments": arguments}}
    (note,) = parse([U, A | {"tool_calls": [call]}]).notes
    assert note.startswith("arguments of a tool call that are no JSON object")
    good = {"type": "function", "function": {"name": "w", "arguments": "{}"}}
    assert not parse([U, A | {"tool_calls": [good]}]).notes


# -- messages by channel ---------------------------------------------------------------------------


def of(channel, content, **more):
    return {"role": "assistant", "channel": channel, "content": content, **more}


PARTS = [{"type": "text", "text": "it is "}, {"type": "text", "text": "1"}]
CALL = {"type": "function", "function": {"name": "w", "arguments": {"city": "Paris"}}}
THOUGHT = {"role": "assistant", "reasoning_content": "hm"}
TO_W = {"recipient": "functions.w", "content_type": "<|constrain|> json"}


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([of("analysis", "hm"), of("final", "it is 1")], [THOUGHT | {"content": "it is 1"}]),
        ([of("final", PARTS)], [{"role": "assistant", "content": "it is 1"}]),
        (
            [of("analysis", "h"), of("analysis", "m"), of("final", "1")],
            [THOUGHT | {"content": "1", "reasoning_content": "h\nm"}],
        ),
        (
            [of("analysis", "hm"), of("commentary", '{"city": "Paris"}', **TO_W)],
            [THOUGHT | {"content": "", "tool_calls": [CALL]}],
        ),
        (
            [{"role": "assistant", "content": '{"city": "Paris"}', "recipient": "functions.w"}],
            [{"role": "assistant", "content": "", "tool_calls": [CALL]}],
        ),
        ([of("analysis", "hm")], [THOUGHT | {"content": ""}]),
        ([of("analysis", "hm"), U, of("final", "1")], [THOUGHT | {"content": ""}, U, A]),
    ],
)
def test_messages_of_one_answer_by_channel_are_one_answer(messages, wanted):
    wanted = [m | {"content": "1"} if m is A else m for m in wanted]
    record = parse([U, *messages])
    assert record.messages == [U, *wanted]
    assert not record.unread


def test_flags_of_channels_are_of_the_whole_answer():
    off = [of("analysis", "hm", loss_mask=0), of("final", "1", loss_mask=0)]
    assert parse([U, *off]).messages[1]["weight"] == 0
    with pytest.raises(BadRow, match=r"loss_mask of messages\[2\] is not that of its thought"):
        parse([U, of("analysis", "hm", loss_mask=0), of("final", "1")])


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (of("commentary", "I look."), "a commentary for the user"),
        (of("analysis", "print(1)", recipient="python"), "goes to 'python'"),
        (of("analysis", [{"type": "image"}]), "is no text"),
    ],
)
def test_what_no_message_of_the_api_is_makes_the_row_bad(message, why):
    with pytest.raises(BadRow, match=why):
        parse([U, message, A])


def test_other_channels_and_recipients_are_named_and_those_of_a_template_stay():
    assert parse([U, A | {"channel": "mail"}]).unread == ("messages.channel",)
    assert parse([U, A | {"recipient": "python"}]).unread == ("messages.recipient",)
    assert not parse([U, A | {"recipient": "all", "end_turn": True}]).unread
    messages = [U, of("analysis", "hm"), of("final", "1")]
    for layout in (Layout(keys=frozenset({"channel"})), Layout(keys=None)):
        assert parse(messages, layout).messages == messages


def test_a_chat_by_channel_has_the_tokens_of_the_chat_by_messages():
    render = Renderer(tokenizer("qwen3")).render
    by_channel = parse([U, of("analysis", "hm"), of("final", "it is 1")])
    plain = parse([U, THOUGHT | {"content": "it is 1"}])
    assert render(by_channel).documents == render(plain).documents
