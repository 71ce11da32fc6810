"""Which prompt a document answers, as a number: equal for all answers to it.

Of a conversation it is a hash of the text of its first user message, without its blanks and letter
cases; so other answers, system prompts, templates and data sets have the same number. Later turns
do not count: many conversations have a "continue". Conversations that are alike in their first
message only stay together, which costs nothing; a question that opens one conversation and comes
later in another may be on both sides. Of plain text it is a hash of the beginning.

`generate` makes the number of the messages. Where only tokens are known (rows of ids, converted
states, datasets of format 1.0), the text is looked for between what the chat template writes
before and after the content of a user message; without that, all before the first answer counts.
"""

import itertools
import unicodedata
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from spec_data.shards.turn_masks import Turn

_BEGINNING = 512  # characters of plain text
_MARKS = ("Qzuserone", "Qzanswerone", "Qzusertwo", "Qzanswertwo")


def text_key(text: str) -> int:
    """Return the number of a text, below 2**64."""
    plain = " ".join(unicodedata.normalize("NFKC", text).split()).casefold()
    return _number(plain.encode("utf-8", "surrogatepass"))


def _number(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def answer_start(turns: Sequence[Turn], first_supervised: int) -> int:
    """Return where the first answer of a document begins; 0: it is plain text."""
    if any(role == "text" for role, _, _ in turns):
        return 0
    starts = [start for role, start, _ in turns if role in ("assistant", "given")]
    return min(starts, default=first_supervised)


class PromptKeys:
    """Makes the numbers of the documents of one tokenizer; None: they are made of token ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._before, self._after = _around_user_texts(tokenizer)

    def of_messages(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return the number of a conversation."""
        texts = [_text_of(m) for m in messages if m.get("role") == "user"]
        first = next((text for text in texts if text.strip()), None)
        if first is None:  # all before the first answer
            roles = [m.get("role") for m in messages]
            end = roles.index("assistant") if "assistant" in roles else len(roles)
            first = "\n".join(_text_of(message) for message in messages[:end])
        return text_key(first)

    def of_text(self, text: str) -> int:
        """Return the number of a plain text, which may be a conversation already rendered."""
        user = self._user_text(text)
        return text_key(" ".join(text.split())[:_BEGINNING] if user is None else user)

    def of_tokens(self, ids: Sequence[int] | np.ndarray, start: int) -> int:
        """Return the number of a document of which the first answer begins at token `start`."""
        ids = np.asarray(ids, np.int32)
        if self._tokenizer is None:
            return _number((ids[:start] if start else ids[: _BEGINNING // 4]).tobytes())
        some = ids[:start] if start else ids[:_BEGINNING]  # a token is a character or more
        text = self._tokenizer.decode(some.tolist(), skip_special_tokens=False)
        user = self._user_text(text)
        if user is None and start:
            return text_key(text)
        if user is None:
            text = self._tokenizer.decode(some.tolist(), skip_special_tokens=True)
        return text_key(" ".join(text.split())[:_BEGINNING] if user is None else user)

    def _user_text(self, text: str) -> str | None:
        """Return the first user message of a rendered conversation; None: there is none."""
        if not self._before or (at := text.find(self._before)) < 0:
            return None
        rest = text[at + len(self._before) :]
        end = rest.find(self._after) if self._after else -1
        found = rest if end < 0 else rest[:end]
        return found if found.strip() else None


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, Mapping))


def _around_user_texts(tokenizer: Any) -> tuple[str, str]:
    """Return what the chat template writes before and after a user message; "": not known."""
    if not getattr(tokenizer, "chat_template", None):
        return "", ""
    roles = ("user", "assistant", "user", "assistant")
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, _MARKS, strict=True)]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        before, between, second, after, _ = _parts(text)
    except Exception:  # of a program of strangers; a real row's error names it
        return "", ""
    closing = _common(between, after).strip()
    opening = _common(before[::-1], second[::-1])[::-1].lstrip()
    return opening, closing.splitlines()[0] if closing else ""


def _parts(text: str) -> list[str]:
    """Return what lies before, between and after the marks."""
    parts = []
    for mark in _MARKS:
        part, found, text = text.partition(mark)
        if not found:
            raise ValueError(f"{mark} is not written")
        parts.append(part)
    return [*parts, text]


def _common(one: str, other: str) -> str:
    """Return how both texts begin."""
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
