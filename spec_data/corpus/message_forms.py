"""In which form a chat template reads contents and the arguments of tool calls.

Some templates read a content as a list of parts (LLaVA, Idefics), most as text. Some write the
arguments of a call as an object, some join them to a text (DeepSeek). In the wrong form a template
fails, or writes an empty content or Python's repr without a word. So a conversation with marks in
it is rendered in one form after the other, once per template, and the first one whose marks come
out is used. That is what serving engines send: they find out the form of contents likewise, and
what a target generates as arguments is JSON.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from spec_data.corpus.records import Arguments, Message

_USER, _ANSWER, _SYSTEM, _TOOL = "Qzv7user", "Qzv7answer", "Qzv7system", "Qzv7tool"
_KEY, _VALUE, _NAME = "Qzv7key", "Qzv7value", "Qzv7name"
_CALL = {  # some templates check that an id has nine letters
    "id": "qzv7calls",
    "type": "function",
    "function": {"name": _NAME, "arguments": Arguments({_KEY: _VALUE})},
}
_TOOLS = [
    {
        "type": "function",
        "function": {
            "name": _NAME,
            "description": "?",
            "parameters": {"type": "object", "properties": {}},
        },
    }
]

Render = Callable[[Sequence[Message], "Sequence[Any] | None"], str]
"""Renders messages, in their final form, and tools; it may raise any exception."""


@dataclass(frozen=True)
class MessageForms:
    """`parts`: roles whose content is a list of parts; `text_arguments`: arguments are text."""

    parts: frozenset[str] = frozenset()
    text_arguments: bool = False

    def of(self, message: Message) -> Message:
        """Return a message as the template reads it."""
        changed: Message = {}
        if message["role"] in self.parts and isinstance(content := message.get("content"), str):
            changed["content"] = [{"type": "text", "text": content}]
        if calls := message.get("tool_calls"):
            changed["tool_calls"] = [self._call(call) for call in calls]
        if isinstance(call := message.get("function_call"), dict):
            changed["function_call"] = self._call(call)
        return message | changed if changed else message

    def _call(self, call: Message) -> Message:
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"])}
        arguments = call.get("arguments")
        if self.text_arguments and isinstance(arguments, (dict, list)):
            return {**call, "arguments": _text_of(arguments)}
        if isinstance(arguments, Arguments):
            return {**call, "arguments": dict(arguments)}
        return call


def find_forms(render: Render, calls: bool, tools: bool | None) -> MessageForms:
    """Return the forms that a template reads; those of most templates if none comes out whole.

    `calls`: it may write tool calls; `tools`: it is for chats with tools, or without (None: both).
    """
    given = _TOOLS if tools else None
    parts = _parts(lambda messages: render(messages, given))
    if not calls:
        return MessageForms(parts)
    both = MessageForms(parts), MessageForms(parts, text_arguments=True)
    for with_tools, forms in product((None, _TOOLS) if tools is None else (given,), both):

        def once(messages: Sequence[Message], given: Sequence[Any] | None = with_tools) -> str:
            return render(messages, given)

        text = _rendered(once, forms, _called()) or _rendered(once, forms, _called()[:2])
        if text and _has_arguments(text, forms):
            return forms
    return MessageForms(parts)


def _has_arguments(text: str, forms: MessageForms) -> bool:
    """Return whether arguments came out: as text unchanged, as an object in any form but repr."""
    if forms.text_arguments:
        return _text_of({_KEY: _VALUE}) in text
    return _VALUE in text and repr({_KEY: _VALUE}) not in text


def _parts(render: Callable[[Sequence[Message]], str]) -> frozenset[str]:
    """Return the roles whose content comes out as a list of parts only."""
    turns = [{"role": "user", "content": _USER}, {"role": "assistant", "content": _ANSWER}]
    system, tool = {"role": "system", "content": _SYSTEM}, {"role": "tool", "content": _TOOL}
    both = ("user", "assistant")
    chosen = _first(render, turns, [(), both, ("user",), ("assistant",)])
    for role, messages in ("system", [system, *turns]), ("tool", [*_called()[:2], tool]):
        others = [chosen | {role}, chosen] if chosen else [chosen, {role}]
        chosen = _first(render, messages, others)
    return chosen


def _first(
    render: Callable[[Sequence[Message]], str],
    messages: Sequence[Message],
    candidates: Sequence[Iterable[str]],
) -> frozenset[str]:
    """Return the first of some sets of roles with which most contents come out."""
    marks = [m["content"] for m in messages if m["content"]]
    found: dict[frozenset[str], int] = {}
    for roles in map(frozenset, candidates):
        text = _rendered(render, MessageForms(roles), messages) or ""
        found[roles] = sum(mark in text for mark in marks)
        if found[roles] == len(marks):
            break
    return max(found, key=lambda roles: found[roles])


def _rendered(
    render: Callable[[Sequence[Message]], str], forms: MessageForms, messages: Sequence[Message]
) -> str | None:
    """Return a render of messages in some forms; None: the template fails."""
    try:
        return render([forms.of(message) for message in messages])
    except MemoryError:
        raise
    except Exception:  # a template is a program of strangers; a real record then names the error
        return None


def _called() -> list[Message]:
    return [
        {"role": "user", "content": _USER},
        {"role": "assistant", "content": "", "tool_calls": [_CALL]},
        {"role": "tool", "tool_call_id": _CALL["id"], "name": _NAME, "content": _TOOL},
        {"role": "assistant", "content": _ANSWER},
    ]


def _text_of(arguments: Any) -> str:
    """Return arguments as the row wrote them, or as JSON in the form that templates write."""
    written = getattr(arguments, "written", None)
    return written if written is not None else json.dumps(arguments, ensure_ascii=False)
