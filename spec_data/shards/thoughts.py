"""The tags around a thought, and whether an answer has one: text of templates, not of a model."""

import re

CLOSE, OPEN = "</think>", "<think>"
"""Tags of a thought in the content of a message."""
BLOCK = 16
"""Tokens of an empty thought at most, where its tags are no tokens of their own."""
_THOUGHTS = [
    tuple(map(re.escape, tags))
    for tags in (
        (OPEN, CLOSE),
        ("<|channel>thought", "<channel|>"),  # Gemma 4
        ("<|START_THINKING|>", "<|END_THINKING|>"),  # Command
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    )
]
TAGS = re.compile("|".join(tag for tags in _THOUGHTS for tag in tags))
_OPENS, _CLOSES = ("|".join(tags) for tags in zip(*_THOUGHTS, strict=True))
_EMPTY = "|".join(rf"{opens}\s*{closes}" for opens, closes in _THOUGHTS)
THOUGHT_OPENED, THOUGHT_CLOSED = re.compile(rf"({_OPENS})\s*\Z"), re.compile(rf"\s*({_CLOSES})\s*")
EMPTY_THOUGHT = re.compile(rf"\s*({_EMPTY})\s*")
ENDS_EMPTY = re.compile(rf"({_EMPTY})\s*\Z")
STARTS_OPEN = re.compile(rf"\s*({_OPENS})")
THOUGHT_CLOSES = re.compile(rf"({_CLOSES})\s*")
STARTS_CLOSED = re.compile(rf"\s*{CLOSE}(\s*)")
# Of Mistral and gpt-oss, whose templates write a thought only where there is one.
_OTHERS_START = re.compile(r"\s*(\[THINK\]|<\|channel\|>analysis)")
_BEHIND = re.compile(rf"({_CLOSES}|\[/THINK\])\s*\Z")


def thinks(before: str, answer: str) -> bool:
    """Return whether an answer has a thought, or follows one.

    Args:
        before: the text before the first token of the answer that is drafted, BLOCK tokens or more.
        answer: what comes then, as many.
    """
    if THOUGHT_OPENED.search(before):
        return THOUGHT_CLOSED.match(answer) is None
    if STARTS_OPEN.match(answer):
        return EMPTY_THOUGHT.match(answer) is None
    if _OTHERS_START.match(answer):
        return True
    return _BEHIND.search(before) is not None and ENDS_EMPTY.search(before) is None
