"""Rows of agents' logs in the form of the API of chats, which servers hand to the chat template.

Tools and calls are written in many forms: bare functions, schemas under the names of Anthropic and
MCP, messages of gpt-oss by channel. A request of the API has one form, so any other would make
prompts that serving never has. What a form loses, or a server may, is returned as a note.
"""

from collections.abc import Iterator
from typing import Any

from spec_data.corpus.bad_rows import BadRow
from spec_data.corpus.facts import ROLES, filled, keys

# -- tools -----------------------------------------------------------------------------------------

_SCHEMAS = ("input_schema", "inputSchema", "args_schema")  # Anthropic, MCP, LangChain
_OF_FUNCTION = ("name", "description", "parameters", "strict")
_BARE = (
    'tools are bare functions; servers take only {"type": "function", "function": ...}, and the '
    "chat template gets them so, here as in serving"
)


def tool_in_api(tool: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a tool of the API, from a bare function or the flat form of Responses, and notes."""
    notes = []
    if "name" in tool and "function" not in tool and tool.get("type", "function") == "function":
        tool = {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        notes.append(_BARE)
    function = tool.get("function")
    if not isinstance(function, dict):
        return tool, notes
    other = next((name for name in _SCHEMAS if filled(function.get(name))), None)
    if other and not filled(function.get("parameters")):
        function = {("parameters" if k == other else k): v for k, v in function.items()}
        tool = {**tool, "function": function}
        notes.append(f"{other} of a tool: given to the chat template as its parameters")
    for name in (k for k, v in function.items() if filled(v) and k not in _OF_FUNCTION):
        notes.append(
            f"{name} of a tool, which the API does not have: servers and chat templates may drop it"
        )
    schema = function.get("parameters")
    if filled(schema) and not (isinstance(schema, dict) and _is_schema(schema)):
        notes.append(
            "parameters of a tool that are no JSON schema (without properties): a template that "
            "lists properties writes none"
        )
    return tool, notes


def _is_schema(table: dict[str, Any]) -> bool:
    return isinstance(table.get("properties"), dict) or isinstance(table.get("type"), str)


# -- messages of gpt-oss, by channel ---------------------------------------------------------------

CHANNELS = ("analysis", "commentary", "final")
TO_ALL = (None, "", "all", "user", "assistant")
_FUNCTIONS = "functions."


def by_channel(messages: list[Any], column: str) -> Iterator[tuple[str, Any]]:
    """Yield messages and their names; those of one answer of gpt-oss are one message.

    In its own form an answer is a message of the channel `analysis`, the thought, and one that goes
    to a function or into the channel `final`.

    Raises:
        BadRow: a message has no place in the API, or flags of one answer differ.
    """
    thought: dict[str, Any] | None = None
    for number, message in enumerate(messages):
        name = f"{column}[{number}]"
        answer = isinstance(message, dict) and _speaker(message) == "assistant"
        if not answer or not _has_channel(message):
            if thought is not None:
                yield f"{column}[{number - 1}]", thought
            thought = None
            yield name, message
            continue
        kept = {k: v for k, v in message.items() if k not in _OF_CHANNELS}
        recipient = message.get("recipient")
        if recipient not in TO_ALL:
            kept = _called(kept, recipient, name)
        elif message.get("channel") == "analysis":
            text = _text(kept, name)
            if thought is not None:  # one thought in two messages
                text = f"{thought[_THOUGHT]}\n{text}"
            thought = kept | {_content(kept): "", _THOUGHT: text}
            continue
        elif message.get("channel") == "commentary":
            raise BadRow(
                f"{name} is a commentary for the user, which no message of the API is; store such "
                "rows as input_ids"
            )
        if thought is not None:
            for key in (*keys("learned"), *keys("masked")):
                if thought.get(key) != kept.get(key):
                    raise BadRow(
                        f"{key} of {name} is not that of its thought; only whole answers can be "
                        "left out"
                    )
            kept = {_THOUGHT: thought[_THOUGHT]} | kept
        thought = None
        yield name, kept
    if thought is not None:
        yield f"{column}[{len(messages) - 1}]", thought


_THOUGHT = "reasoning_content"
_OF_CHANNELS = ("channel", "recipient", "content_type")


def _speaker(message: dict[str, Any]) -> str | None:
    speaker = next((message[n] for n in keys("role") if message.get(n) is not None), None)
    return ROLES.get(speaker.lower()) if isinstance(speaker, str) else None


def _has_channel(message: dict[str, Any]) -> bool:
    to_function = str(message.get("recipient")).startswith(_FUNCTIONS)
    return message.get("channel") in CHANNELS or to_function


def _content(message: dict[str, Any]) -> str:
    return next((n for n in keys("content") if message.get(n) is not None), "content")


def _text(message: dict[str, Any], name: str) -> str:
    """Return the text of a message, whose parts may be texts."""
    value = message.get(_content(message))
    parts = value if isinstance(value, list) else [value]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    result = ""
    for text in texts:
        if not isinstance(text, str):
            raise BadRow(f"the content of {name} is no text")
        result += text
    return result


def _called(message: dict[str, Any], recipient: Any, name: str) -> dict[str, Any]:
    """Return the answer that calls a function; its content has the arguments."""
    function = str(recipient).removeprefix(_FUNCTIONS)
    if function == str(recipient):
        raise BadRow(
            f"{name} goes to {recipient!r}, which is no function (functions.NAME): no message of "
            "the API is; store such rows as input_ids"
        )
    call = {"type": "function", "function": {"name": function, "arguments": _text(message, name)}}
    return message | {_content(message): "", "tool_calls": [call]}
