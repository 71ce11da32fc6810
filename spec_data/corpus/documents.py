"""A rendered document: token ids, the turns that may be supervised, and the loss mask; all pure.

The turns are kept beside the mask so that a trainer can apply another mask policy later without the
target: `loss_mask == loss_mask_from_turns(len(input_ids), turns, policy)` always holds for a
document that was not cut. Only supervisable turns are kept: a turn-by-turn document has one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from spec_data.shards.errors import ConfigError, CorpusError

MaskPolicy = Literal["assistant", "last-turn", "all"]


_NOTHING_TO_LEARN = frozenset({"no-assistant-turn", "nothing-supervised", "empty"})


class RenderError(CorpusError):
    """A record that gives no document; `reason` is a short slug to count it by."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def broken(self) -> bool:
        """Whether something is wrong with the record, rather than nothing to learn from it."""
        return self.reason not in _NOTHING_TO_LEARN


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The supervisable tokens [start, end) of a turn, the end-of-turn token included.

    `role` is "assistant" in conversations, "text" for plain text, "given" for a run of ones in a
    row's own loss mask.
    """

    role: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """One rendered document, in the token frame: `loss_mask[t]` is about `input_ids[t]`."""

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[Turn, ...]
    source: str
    where: str


def loss_mask_from_turns(length: int, turns: Sequence[Turn], policy: str) -> list[int]:
    """The loss mask of a document of `length` tokens under a mask policy.

    Raises:
        ConfigError: unknown policy, or a turn outside the document.
    """
    if policy not in get_args(MaskPolicy):
        raise ConfigError(f"mask = {policy!r}: choose from {', '.join(get_args(MaskPolicy))}")
    mask = [int(policy == "all")] * length
    for turn in turns[-1:] if policy == "last-turn" else turns:
        if not 0 <= turn.start < turn.end <= length:
            raise ConfigError(f"{turn} is outside a document of {length} tokens")
        mask[turn.start : turn.end] = [1] * (turn.end - turn.start)
    return mask


def cut_document(document: Document, length: int) -> Document:
    """The first `length` tokens of a document, turns clipped; it may have none left."""
    turns = tuple(
        replace(turn, end=min(turn.end, length)) for turn in document.turns if turn.start < length
    )
    return replace(
        document,
        input_ids=document.input_ids[:length],
        loss_mask=document.loss_mask[:length],
        turns=turns,
    )
