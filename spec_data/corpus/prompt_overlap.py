"""Whether a document contains parts of prompts: n-grams of token ids.

`select --decontaminate` and `eval` have this rule in common. Prompts are tokenised with the
dataset's own tokenizer, without the blanks around them. Only the texts of user messages count: what
the chat template adds, and a system prompt, are in every document. A document overlaps if n token
ids in a row are those of a prompt. A shorter text counts as a whole, if it has 8 tokens or more. If
no text of a prompt has as many, the document must begin with all that serving sends for it.
The comparison is exact: hashes find candidates, and then the ids are compared.

Shapes: T tokens of a document, n tokens of an n-gram, K n-grams.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import Record
from spec_data.corpus.template import Chat, Template

NGRAM = 13
"""Token ids in a row that two texts share by chance only rarely."""
LEAST_TOKENS = 8
"""Shorter texts are too common to say anything."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BITS = 22


@dataclass
class Grams:
    """The n-grams of prompts; texts shorter than n (`size`) are n-grams of their own length.

    `prompts` were added, `short` of them were too short to compare.
    """

    size: int = NGRAM
    prompts: int = 0
    short: int = 0
    _owners: dict[bytes, set[int]] = field(default_factory=dict)
    _beginnings: dict[bytes, set[int]] = field(default_factory=dict)
    _tables: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, texts: Iterable[Sequence[int]], whole: Sequence[int] = ()) -> None:
        """Add a prompt: the token ids of each of its texts, and of all that serving sends."""
        number, self.prompts = self.prompts, self.prompts + 1
        added = False
        for ids in texts:
            if len(ids) < min(LEAST_TOKENS, self.size):
                continue
            added = True
            for gram in sliding_window_view(np.asarray(ids, np.int32), min(self.size, len(ids))):
                self._owners.setdefault(gram.tobytes(), set()).add(number)
        if not added and len(whole):
            added = True
            self._beginnings.setdefault(np.asarray(whole, np.int32).tobytes(), set()).add(number)
        self.short += not added
        self._tables = {}

    def matches(self, ids: np.ndarray) -> set[int]:
        """Return the numbers of the prompts that a document, int32 [T], overlaps."""
        if not self._tables:
            self._tables = self._hashes()
        numbers: set[int] = set()
        for size in {len(beginning) // 4 for beginning in self._beginnings}:
            numbers |= self._beginnings.get(ids[:size].tobytes(), set())
        for size, table in self._tables.items():
            if len(ids) >= size:
                grams = sliding_window_view(ids, size)  # [T - size + 1, size]
                for at in np.flatnonzero(table[_short_hashes(ids, size)]).tolist():
                    numbers |= self._owners.get(grams[at].tobytes(), set())
        return numbers

    def _hashes(self) -> dict[int, np.ndarray]:
        """Return which hashes the n-grams of each length have, bool [2 ** _BITS] each."""
        tables: dict[int, np.ndarray] = {}
        for gram in self._owners:
            size = len(gram) // 4
            table = tables.setdefault(size, np.zeros(1 << _BITS, bool))
            table[_short_hashes(np.frombuffer(gram, np.int32), size)] = True
        return tables


def _short_hashes(ids: np.ndarray, size: int) -> np.ndarray:
    """Return a hash of each run of `size` ids of int32 [T], uint64 [T - size + 1] below 2 ** _BITS.

    It is made of three of the ids: the first, the middle and the last one.
    """
    count = len(ids) - size + 1
    state = np.zeros(count, np.uint64)
    for at in (0, size // 2, size - 1):
        state = (state ^ ids[at : at + count].astype(np.uint64)) * _FACTOR
        state ^= state >> np.uint64(32)
    return (state * _FACTOR) >> np.uint64(64 - _BITS)


def add_prompt(grams: Grams, record: Record, template: Template) -> None:
    """Add the prompt of a row: its user messages, or the tokens or the text to continue."""
    if record.input_ids is not None:
        grams.add([record.input_ids], record.input_ids)
        return
    messages = record.messages or []
    texts = [m["content"] for m in messages if m["role"] == "user"] + list(record.follow_ups)
    texts = [record.text or ""] if record.messages is None else texts
    tokenizer = template.tokenizer
    ids = [list(tokenizer(t.strip(), add_special_tokens=False)["input_ids"]) for t in texts]
    short = max(map(len, ids), default=0) < LEAST_TOKENS
    grams.add(ids, _sent(record, template) if short else ())


def _sent(record: Record, template: Template) -> list[int]:
    """Return what serving sends for a prompt without blanks around its messages; [] if unknown."""
    messages = [
        m | {"content": m["content"].strip()} if isinstance(m.get("content"), str) else m
        for m in record.messages or ()
    ]
    try:
        if record.messages is None:
            return list(template.tokenizer((record.text or "").strip())["input_ids"])
        return Chat(template, record, messages).prompt(len(messages))
    except RenderError:
        return []
