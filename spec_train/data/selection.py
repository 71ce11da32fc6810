"""Which documents a run can train on, and why it leaves others out.

A slot of a draft is a known token i >= 1 and the token after it. Under `--slots serving`, and for
drafts of blocks, both must be supervised; under `--slots shifted`, only the known one. A document
without a slot has no loss: it would make batches smaller than they look. The index of a dataset
tells for nearly every document whether it has a slot; the loss masks of the few others are read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

SHIFTED = "shifted"
"""The value of --slots under which one supervised token makes a slot."""

NO_SLOT = {
    "serving": "supervised tokens, but never two in a row: no slot to train on",
    SHIFTED: "no supervised token but the first: no slot to train on",
}
"""Why a document has no slot, by --slots."""

ReadMask = Callable[[int], np.ndarray]
"""Returns the loss mask of a document, bool [T], cut to the pack length."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents a trainer can use at a given pack length, and why it leaves others out."""

    usable: np.ndarray  # bool [N]
    cut: int  # usable documents cut to the pack length
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> documents


def select_documents(
    lengths: np.ndarray,
    supervised: np.ndarray,
    first_supervised: np.ndarray,
    seq_len: int,
    slots: str = "",
    read_mask: ReadMask | None = None,
) -> Selection:
    """Leave out documents that have nothing to train on once they are cut to `seq_len`.

    Args:
        lengths, supervised, first_supervised: of the dataset, int64 [N].
        seq_len: tokens of a pack.
        slots: "serving" or "shifted": also leave out documents without a slot. "": keep them, as
            runs do that began with version 1 of the order.
        read_mask: reads a loss mask where the index does not tell; needed with `slots`.
    """
    nothing = supervised == 0
    beyond = ~nothing & (first_supervised >= seq_len)
    usable = ~(nothing | beyond)
    reasons = {
        "no supervised token": int(nothing.sum()),
        f"first supervised token past --seq-len {seq_len}": int(beyond.sum()),
    }
    if slots and read_mask is not None:
        slotless = _without_slot(
            lengths, supervised, first_supervised, seq_len, usable, slots, read_mask
        )
        usable[slotless] = False
        reasons[NO_SLOT[slots]] = len(slotless)
    return Selection(
        usable=usable,
        cut=int((usable & (lengths > seq_len)).sum()),
        left_out={reason: count for reason, count in reasons.items() if count},
    )


def has_slot(mask: np.ndarray, slots: str) -> bool:
    """Return whether a document with loss mask bool [T] has a slot."""
    known = mask[1:]
    return bool(known.any() if slots == SHIFTED else (known[:-1] & known[1:]).any())


def _without_slot(
    lengths: np.ndarray,
    supervised: np.ndarray,
    first_supervised: np.ndarray,
    seq_len: int,
    usable: np.ndarray,
    slots: str,
    read_mask: ReadMask,
) -> np.ndarray:
    """Return the usable documents without a slot, int64 [M]. Arguments as in `select_documents`."""
    inside = supervised - (first_supervised == 0)  # supervised tokens that can be known
    room = np.minimum(lengths, seq_len) - np.maximum(first_supervised, 1)  # places for them
    most = np.minimum(inside, room)
    least = np.maximum(inside - (lengths - seq_len).clip(0), first_supervised > 0)
    if slots == SHIFTED:
        sure, never = least >= 1, most < 1
    else:  # without neighbours, at most every second place is supervised
        sure, never = least > (room + 1) // 2, most < 2
    unclear = np.flatnonzero(usable & ~sure & ~never)
    found = [row for row in unclear.tolist() if not has_slot(read_mask(row), slots)]
    return np.union1d(np.flatnonzero(usable & never), np.array(found, np.int64))
