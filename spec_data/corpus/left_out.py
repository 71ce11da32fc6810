"""What a chat template leaves out of a conversation: messages, reasoning and tool calls.

A template is free to drop a role that it does not know, the reasoning of earlier turns, or all tool
calls; the rendered document looks sound. So a conversation is rendered once more with a mark inside
every part, and a part is there if its mark is: whether the template strips it, escapes it or moves
it makes no difference, and a short text that occurs elsewhere does not count for it.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import REASONING, Message
from spec_data.shards.thoughts import CLOSE, OPEN

TOOL_LISTS = "lists of tools"
REASONING_TEXTS, _TOOL_CALLS = "reasoning texts", "tool calls"

_MARK = re.compile(r"Qzv\d+mark")


def left_out(
    messages: Sequence[Message], ends: Sequence[int], text: Callable[[Sequence[Message]], str]
) -> Counter[str]:
    """Count the parts of a conversation that are in none of its documents, by kind.

    Each document renders `messages[:end]`, of ascending `ends`. If `text`, which renders messages,
    raises a RenderError because of the marks, nothing is counted.
    """
    marks: dict[str, str] = {}
    marked = [_marked(message, marks) for message in messages]
    for end in reversed(ends):
        if marks:
            try:
                rendered = text(marked[:end])
            except RenderError:
                return Counter()
            found = set(_MARK.findall(rendered))
            marks = {mark: kind for mark, kind in marks.items() if mark not in found}
    return Counter(marks.values())


def is_empty(answer: Message) -> bool:
    """Return whether an answer holds nothing that the target would generate."""
    before, after = _split(answer.get("content") or "")
    given = reasoning_of(answer)
    reasoning = _without_tags(before) if given is None else given
    return not (after.strip() or reasoning != "" or answer.get("tool_calls"))


def reasoning_of(answer: Message) -> str | None:
    """Return the reasoning of an answer beside its content; None: it has none."""
    return next((answer[name] for name in REASONING if answer.get(name) is not None), None)


def _split(content: str) -> tuple[str, str]:
    """Return (reasoning with its tags, the answer) of a content; templates split it there too."""
    before, close, after = content.rpartition(CLOSE)
    return before + close, after


def _without_tags(reasoning: str) -> str:
    return reasoning.replace(OPEN, "").replace(CLOSE, "").strip()


# -- marks -----------------------------------------------------------------------------------------


def _marked(message: Message, marks: dict[str, str]) -> Message:
    """Return a copy of a message with marks, and add them to `marks`, each with its kind."""
    result, kind = dict(message), f"{message['role']} messages"
    content = message.get("content")
    if isinstance(content, str):
        before, after = _split(content) if message["role"] == "assistant" else ("", content)
        if _without_tags(before):
            head, tag, thought = before.removesuffix(CLOSE).rpartition(OPEN)
            before = f"{head}{tag}{_with_mark(thought, REASONING_TEXTS, marks)}{CLOSE}"
        result["content"] = before + _with_mark(after, kind, marks)
    names = [n for n in REASONING if isinstance(message.get(n), str) and message[n].strip()]
    if names:
        marked = _with_mark(message[names[0]], REASONING_TEXTS, marks)
        result |= {n: marked for n in names if message[n] == message[names[0]]}
    if message.get("tool_calls"):
        result["tool_calls"] = [_marked_call(call, marks) for call in message["tool_calls"]]
    if isinstance(call := message.get("function_call"), dict):  # as APIs once had it
        result["function_call"] = _marked_call(call, marks)
    return result


def _marked_call(call: Message, marks: dict[str, str]) -> Message:
    """Return a copy of a tool call with a mark in the name of the function."""
    if isinstance(call.get("function"), dict):
        return {**call, "function": _marked_call(call["function"], marks)}
    name = call.get("name")
    return {**call, "name": _with_mark(name, _TOOL_CALLS, marks)} if isinstance(name, str) else call


def _with_mark(text: str, kind: str, marks: dict[str, str]) -> str:
    """Put a mark between two words in the middle, so that both ends of the text stay."""
    if not text.strip():
        return text
    mark = f"Qzv{len(marks)}mark"  # as _MARK finds it
    marks[mark] = kind
    middle = len(text) // 2
    at = text.find(" ", middle)
    at = middle if at < 0 else at
    return f"{text[:at]}{mark}{text[at:]}"
