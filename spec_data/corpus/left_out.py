"""What a chat template leaves out of a conversation: messages, reasoning and tool calls.

A template is free to drop a role that it does not know, the reasoning of earlier turns, or all tool
calls; the rendered document looks sound. So a conversation is rendered once more with a mark inside
every part, and a part is there if its mark is: whether the template strips it, escapes it or moves
it makes no difference, and a short text that occurs elsewhere does not count for it. A template may
act differently because of a mark. Then the text without marks is not that of the record, and the
part itself is searched for, without white space, also in the escaped form of JSON.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import REASONING, Message

REASONINGS, CALLS, TOOL_LISTS = "reasoning texts", "tool calls", "lists of tools"
_CLOSE, _OPEN = "</think>", "<think>"
_MARK = re.compile(r"Qzv\d+mark")


def left_out(
    messages: Sequence[Message],
    ends: Sequence[int],
    text: Callable[[Sequence[Message]], str],
) -> Counter[str]:
    """Count the parts of a conversation that are in none of its documents, by kind.

    Args:
        messages: the conversation up to its last supervised answer.
        ends: the documents: each renders `messages[:end]`. Ascending.
        text: renders messages; it may raise a RenderError.
    """
    parts: list[_Part] = []
    marked = [_marked(message, parts) for message in messages]
    for end in reversed(ends):
        if not parts:
            break
        parts = _missing(parts, messages[:end], marked[:end], text)
    return Counter(part.kind for part in parts)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message, from its own field or its content; "" without any."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        return reasoning if isinstance(reasoning, str) else json.dumps(reasoning)
    return _without_tags(_split(message.get("content") or "")[0])


def answer_of(message: Message) -> str:
    """Return the content of a message without its reasoning and white space around it."""
    return _split(message.get("content") or "")[1].strip()


@dataclass
class _Part:
    kind: str  # in the plural: "developer messages"
    texts: dict[str, str] = field(default_factory=dict)  # by their marks


def _missing(
    parts: Sequence[_Part],
    plain: Sequence[Message],
    marked: Sequence[Message],
    text: Callable[[Sequence[Message]], str],
) -> list[_Part]:
    """Return the parts that are not in the render of some messages."""
    try:
        rendered = text(marked)
    except RenderError:  # the template does not accept the marks
        rendered = ""
    missing = [part for part in parts if not all(mark in rendered for mark in part.texts)]
    if not missing:
        return []
    real = _squeezed(text(plain))
    if _squeezed(_MARK.sub("", rendered)) == real:
        return missing
    return [p for p in missing if not all(_holds(real, t) for t in p.texts.values())]


def _holds(real: str, text: str) -> bool:
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return any(_squeezed(form) in real for form in (text, escaped))


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _split(content: str) -> tuple[str, str]:
    """Return (reasoning with its tags, the answer) of a content; templates split it there too."""
    before, close, after = content.rpartition(_CLOSE)
    return before + close, after


def _without_tags(reasoning: str) -> str:
    return reasoning.replace(_OPEN, "").replace(_CLOSE, "").strip()


# -- marks -----------------------------------------------------------------------------------------


def _marked(message: Message, parts: list[_Part]) -> Message:
    """Return a copy of a message with marks, and add its parts to `parts`."""

    def add(kind: str, text: str) -> str:
        parts.append(_Part(kind))
        return _mark(text, parts)

    result, kind = dict(message), f"{message['role']} messages"
    content = message.get("content")
    if isinstance(content, str):
        before, after = _split(content) if message["role"] == "assistant" else ("", content)
        if _without_tags(before):
            head, _, thought = before.removesuffix(_CLOSE).rpartition(_OPEN)
            opening = _OPEN if _OPEN in before else ""
            before = f"{head}{opening}{add(REASONINGS, thought)}{_CLOSE}"
        result["content"] = before + (add(kind, after) if after.strip() else after)
    names = [n for n in REASONING if isinstance(message.get(n), str) and message[n].strip()]
    if names:
        marked = add(REASONINGS, message[names[0]])
        result |= {n: marked for n in names if message[n] == message[names[0]]}
    if message.get("tool_calls"):
        result["tool_calls"] = [_marked_call(call, parts) for call in message["tool_calls"]]
    return result


def _marked_call(call: Message, parts: list[_Part]) -> Message:
    """Return a copy of a tool call with a mark in its name and in the first of its arguments."""
    inner = call.get("function")
    function = dict(inner if isinstance(inner, dict) else call)
    parts.append(_Part(CALLS))
    for key in ("name", "arguments"):
        if key in function:
            function[key] = _mark_first(function[key], parts)
    if not parts[-1].texts:
        parts.pop()
    return {**call, "function": function} if isinstance(inner, dict) else function


def _mark_first(value: Any, parts: list[_Part]) -> Any:
    """Return nested arguments with a mark in the first text that is not blank."""
    if isinstance(value, str):
        return _mark(value, parts) if value.strip() else value
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            marked = _mark_first(item, parts)
            if marked is not item:
                copy: Any = value.copy()
                copy[key] = marked
                return copy
    return value


def _mark(text: str, parts: list[_Part]) -> str:
    """Put a mark of the last part between two words in the middle: both ends of the text stay."""
    mark = f"Qzv{sum(len(part.texts) for part in parts)}mark"
    parts[-1].texts[mark] = text
    middle = len(text) // 2
    at = text.find(" ", middle)
    at = middle if at < 0 else at
    return f"{text[:at]}{mark}{text[at:]}"
