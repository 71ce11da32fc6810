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
from dataclasses import dataclass
from typing import Any

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import REASONING

REASONINGS, CALLS, TOOL_LISTS = "reasoning texts", "tool calls", "lists of tools"
_CLOSE, _OPEN = "</think>", "<think>"
_MARK = re.compile(r"Qzv\d+mark")

Message = dict[str, Any]


@dataclass(frozen=True)
class _Part:
    message: int
    kind: str  # in the plural: "developer messages"
    marks: tuple[str, ...]
    texts: tuple[str, ...]


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
    marked, missing = _marked(messages)
    for end in reversed(ends):
        if not missing:
            break
        missing = _missing(missing, messages[:end], marked[:end], text)
    return Counter(part.kind for part in missing)


def reasoning_of(message: Message) -> str:
    """Return the reasoning of a message, from its own field or its content; "" without any."""
    found = next((message[name] for name in REASONING if message.get(name) is not None), None)
    if found is not None:
        return found if isinstance(found, str) else json.dumps(found)
    return _without_tags(_split(message.get("content") or "")[0])


def answer_of(message: Message) -> str:
    """Return the content of a message without its reasoning and white space around it."""
    return _split(message.get("content") or "")[1].strip()


def _missing(
    parts: Sequence[_Part],
    plain: Sequence[Message],
    marked: Sequence[Message],
    text: Callable[[Sequence[Message]], str],
) -> list[_Part]:
    """Return the parts that are not in the render of some messages."""
    try:
        found = text(marked)
    except RenderError:  # the template does not accept the marks
        found = ""
    missing = [part for part in parts if not all(mark in found for mark in part.marks)]
    if not missing:
        return []
    real = _squeezed(text(plain))
    if _squeezed(_MARK.sub("", found)) == real:
        return missing
    return [part for part in missing if not all(_holds(real, t) for t in part.texts)]


def _holds(real: str, text: str) -> bool:
    escaped = json.dumps(text, ensure_ascii=False)[1:-1]
    return any(_squeezed(form) in real for form in (text, escaped))


def _squeezed(text: str) -> str:
    return "".join(text.split())


class _Marker:
    """Hands out marks, and puts them into texts."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []
        self._count = 0

    def add(self, message: int, kind: str, *texts: str) -> list[str]:
        """Record a part; return its texts, each with a mark inside."""
        marks = [f"Qzv{self._count + i}mark" for i in range(len(texts))]
        self._count += len(texts)
        self.parts.append(_Part(message, kind, tuple(marks), texts))
        return [_with_mark(*pair) for pair in zip(texts, marks, strict=True)]


def _with_mark(text: str, mark: str) -> str:
    """Put a mark between two words in the middle, so that both ends of the text stay."""
    middle = len(text) // 2
    at = text.find(" ", middle)
    at = middle if at < 0 else at
    return f"{text[:at]}{mark}{text[at:]}"


def _marked(messages: Sequence[Message]) -> tuple[list[Message], list[_Part]]:
    """Return a copy of a conversation with marks, and its parts."""
    marker = _Marker()
    return [_marked_message(i, m, marker) for i, m in enumerate(messages)], marker.parts


def _marked_message(index: int, message: Message, marker: _Marker) -> Message:
    result, kind = dict(message), f"{message['role']} messages"
    content = message.get("content")
    if isinstance(content, str):
        before, after = _split(content) if message["role"] == "assistant" else ("", content)
        if _without_tags(before):
            head, _, thought = before.removesuffix(_CLOSE).rpartition(_OPEN)
            (thought,) = marker.add(index, REASONINGS, thought)
            before = f"{head}{_OPEN if _OPEN in before else ''}{thought}{_CLOSE}"
        if after.strip():
            (after,) = marker.add(index, kind, after)
        result["content"] = before + after
    names = [n for n in REASONING if isinstance(message.get(n), str) and message[n].strip()]
    if names:
        (marked,) = marker.add(index, REASONINGS, message[names[0]])
        result |= {n: marked for n in names if message[n] == message[names[0]]}
    if message.get("tool_calls"):
        result["tool_calls"] = [_marked_call(index, c, marker) for c in message["tool_calls"]]
    return result


def _split(content: str) -> tuple[str, str]:
    """Return (reasoning with its tags, the answer) of a content; templates split it there too."""
    before, close, after = content.rpartition(_CLOSE)
    return before + close, after


def _without_tags(reasoning: str) -> str:
    return reasoning.replace(_OPEN, "").replace(_CLOSE, "").strip()


def _marked_call(index: int, call: Message, marker: _Marker) -> Message:
    inner = call.get("function")
    function = inner if isinstance(inner, dict) else call
    found = {key: _first_text(function.get(key)) for key in ("name", "arguments")}
    texts = {key: text for key, text in found.items() if text is not None}
    if not texts:
        return call
    changed = dict(function)
    for key, marked in zip(texts, marker.add(index, CALLS, *texts.values()), strict=True):
        changed[key] = _replaced(function[key], texts[key], marked)[0]
    return {**call, "function": changed} if function is inner else changed


def _first_text(value: Any) -> str | None:
    """Return the first text in nested arguments that is not blank."""
    if isinstance(value, str):
        return value if value.strip() else None
    inner = value.values() if isinstance(value, dict) else value
    if not isinstance(value, (dict, list)):
        return None
    return next((found for v in inner if (found := _first_text(v)) is not None), None)


def _replaced(value: Any, old: str, new: str) -> tuple[Any, bool]:
    """Return nested arguments with the first text `old` replaced, and whether it was there."""
    if value == old:
        return new, True
    if isinstance(value, dict):
        done, result = False, {}
        for name, inner in value.items():
            result[name], done = (inner, True) if done else _replaced(inner, old, new)
        return result, done
    if isinstance(value, list):
        done, items = False, []
        for inner in value:
            item, done = (inner, True) if done else _replaced(inner, old, new)
            items.append(item)
        return items, done
    return value, False
