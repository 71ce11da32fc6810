"""A rendered document: token ids, loss mask, and the turns that may be supervised.

The turns are stored beside the mask, so that a trainer can apply another mask policy later without
the target: `loss_mask == loss_mask_from_turns(len(input_ids), turns, policy)` holds for every
document that was not cut. Only supervisable turns are stored: a document that was rendered turn by
turn has one. This module does no input or output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from spec_data.shards.errors import CorpusError
from spec_data.shards.turn_masks import supervised_spans

_NOTHING_TO_LEARN = frozenset({"no-assistant-turn", "nothing-supervised", "empty"})


class RenderError(CorpusError):
    """A record has no document; `reason` is a short slug under which it is counted."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason

    @property
    def broken(self) -> bool:
        """Whether the record is wrong; False when it only has nothing to learn from."""
        return self.reason not in _NOTHING_TO_LEARN


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The supervisable tokens [start, end) of a turn, including its end-of-turn token.

    `role` is "assistant" in conversations, "text" for plain text, and "given" for a run of ones in
    the loss mask of a corpus row.
    """

    role: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Document:
    """One rendered document in the token frame: `loss_mask[t]` belongs to `input_ids[t]`.

    `source` is the name of its file or dataset as the dataset stores it; `where` names its corpus
    row in messages.
    """

    input_ids: list[int]
    loss_mask: list[int]
    turns: tuple[Turn, ...]
    source: str
    where: str


def loss_mask_from_turns(length: int, turns: Sequence[Turn], policy: str) -> list[int]:
    """Return the loss mask (0 or 1 per token) of `length` tokens under a mask policy.

    Raises:
        ConfigError: the policy is unknown, or a turn lies outside the document.
    """
    mask = [0] * length
    plain = [(turn.role, turn.start, turn.end) for turn in turns]
    for start, end in supervised_spans(length, plain, policy):
        mask[start:end] = [1] * (end - start)
    return mask


def cut_document(document: Document, length: int) -> Document:
    """Return the first `length` tokens of a document with its turns clipped.

    Turns beyond the cut are removed; the result may have none.
    """
    turns = tuple(
        replace(turn, end=min(turn.end, length)) for turn in document.turns if turn.start < length
    )
    return replace(
        document,
        input_ids=document.input_ids[:length],
        loss_mask=document.loss_mask[:length],
        turns=turns,
    )
