"""The modes that answers are given in: with a thought, with tools, and in which turn of a chat.

Acceptance differs between them, and serving may have another mixture of them than training. A
dataset does not store modes: its tokens tell them. Modes of one kind exclude one another; an answer
has none of a kind that cannot be told.
"""

import contextlib
import logging
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from spec_data.shards.packing import runs
from spec_data.shards.schema import Manifest
from spec_data.shards.serving import TOOLS
from spec_data.shards.thoughts import BLOCK, ENDS_EMPTY, THOUGHT_OPENED, thinks
from spec_data.shards.turn_masks import Turn
from spec_train.simulation.simulated_decoding import Arrays

log = logging.getLogger(__name__)

THINKING = ("without thinking", "with thinking")
WITH_TOOLS = ("without tools", "with tools")
TURNS = ("turn 1", "turn 2", "turn 3", "turn 4 or later")
KINDS = (THINKING, WITH_TOOLS, TURNS)
_SHORTEST = 6  # characters of a text that tells lists of tools

Modes = tuple[str, ...]


def modes_of(thinking: bool | None, tools: bool | None, turn: int | None) -> Modes:
    """Return the modes of an answer; `turn` counts those of its chat from 1. None: unknown."""
    told = [] if thinking is None else [THINKING[thinking]]
    told += [] if tools is None else [WITH_TOOLS[tools]]
    return (*told, *([] if turn is None else [TURNS[min(turn, len(TURNS)) - 1]]))


def ordered(modes: Sequence[str]) -> list[str]:
    """Return the modes of the kinds of which there are several, in the order of a table."""
    kinds = [[mode for mode in kind if mode in modes] for kind in KINDS]
    return [mode for kind in kinds if len(kind) > 1 for mode in kind]


class _Documents(Protocol):
    """What is read of a dataset, or of several as one."""

    manifest: Manifest

    def turns_of(self, index: int) -> list[Turn]: ...


class DocumentModes:
    """Tells the modes of the answers of documents.

    Without a `tokenizer` thoughts are unknown, and tools where some documents have lists of them.
    """

    def __init__(self, dataset: _Documents, tokenizer: Any) -> None:
        """Read nothing yet."""
        self._dataset, self._tokenizer = dataset, tokenizer
        self._known: dict[int, list[Modes]] = {}

    def of(self, document: int, arrays: Arrays) -> list[Modes]:
        """Return the modes of each run of supervised tokens; `arrays`: see `judge_chains`."""
        if document not in self._known:  # a validation measures the same ones again
            _, ids, _, mask = arrays
            self._known[document] = self._told(document, ids, mask)
        return self._known[document]

    def _told(self, document: int, ids: np.ndarray, mask: np.ndarray) -> list[Modes]:
        spans = runs(mask).tolist()
        turns = [
            start for role, start, _ in self._dataset.turns_of(document) if role == "assistant"
        ]
        if not turns:  # plain text, or token ids of others
            return [()] * len(spans)
        tools = self._has_tools(ids[: spans[0][0]])
        told, seen, turn = [], 0, 0
        for start, end in spans:
            if self._header:  # a template may spread the answers of a chat over documents
                turn += self._text(ids[seen:start]).count(self._header)
            else:
                turn = sum(first <= start for first in turns)
            told.append(modes_of(self._thinks(ids, start, end), tools, turn or None))
            seen = start
        return told

    def _thinks(self, ids: np.ndarray, start: int, end: int) -> bool | None:
        if self._tokenizer is None:
            return None
        before, answer = ids[max(0, start - BLOCK) : start], ids[start : min(end, start + BLOCK)]
        return thinks(self._text(before), self._text(answer))

    def _has_tools(self, prompt: np.ndarray) -> bool | None:
        used = {
            v for v, n in (self._dataset.manifest.identity.get("tools_used") or {}).items() if n
        }
        if len(used) == 1:
            return used == {TOOLS}
        if self._list is None:
            return None
        return self._list in self._text(prompt)

    def _text(self, ids: np.ndarray) -> str:
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))

    @cached_property
    def _header(self) -> str | None:
        return None if self._tokenizer is None else text_of_answers(self._tokenizer)

    @cached_property
    def _list(self) -> str | None:
        return None if self._tokenizer is None else text_of_tools(self._tokenizer)


def text_of_answers(tokenizer: Any) -> str | None:
    """Return the text that the chat template writes before every answer; None: there is none."""
    chat = [{"role": "user", "content": "1"}]
    try:
        without = str(tokenizer.apply_chat_template(chat, tokenize=False))
        whole = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template raises whatever it likes
        log.info("the turns of documents are counted where they are supervised: %s", error)
        return None
    added = whole.removeprefix(without) if whole.startswith(without) else ""
    return THOUGHT_OPENED.sub("", ENDS_EMPTY.sub("", added)).strip() or None


def text_of_tools(tokenizer: Any) -> str | None:
    """Return a text that the chat template writes beside a list of tools, and nowhere else.

    None: there is no such text, or no template.
    """
    probe = "zqprobe"
    parameters = {"type": "object", "properties": {probe: {"type": "string"}}, "required": [probe]}
    function = {"name": probe, "description": probe, "parameters": parameters}
    user, system = ({"role": role, "content": "1"} for role in ("user", "system"))

    def rendered(*chat: dict[str, str], **tools: Any) -> str:
        return str(tokenizer.apply_chat_template(list(chat), tokenize=False, **tools))

    try:
        some = rendered(user, tools=[{"type": "function", "function": function}])
        without = rendered(user)
    except Exception as error:  # a template raises whatever it likes
        log.info("lists of tools are not told apart: %s", error)
        return None
    with contextlib.suppress(Exception):  # not all take a system message
        without += rendered(system, user)
    keys = {*parameters, *function, "function", "string", "object"}
    before = some.partition(probe)[0] if probe in some else ""
    parts = [part.strip() for part in re.split(r'[\n{}"]', before)]
    own = [part for part in parts if part not in without and part not in keys]
    longest = max(own, key=len, default="")
    return longest if len(longest) >= _SHORTEST else None
