"""Teachers: the target's distribution at a slot, over the draft vocabulary.

In: the target's final hidden states with its head, or all its logits. Out: a function of flat slot
indices (b * T + t), so that only the rows of supervised slots are ever computed.

B packs, T slots, n slots asked for, V / Vd target / draft vocabulary, H hidden size.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from spec_data.shards.schema import FINAL
from spec_train.data.batch import DraftBatch
from spec_train.drafts.base import BaseDraft
from spec_train.head import TargetHead
from spec_train.losses import wide

Teacher = Callable[[Tensor], Tensor]
"""Flat slots, int64 [n] -> probabilities [n, Vd], float32 (float64 for float64 inputs)."""

LOGITS = "logits"
"""The column, and the supervision, of a dataset that holds all logits of the target."""


def proposed_ids(draft: BaseDraft) -> Tensor | None:
    """Return the target ids of the draft vocabulary, int64 [Vd]; None: all of them."""
    return None if draft.full_vocabulary else draft.draft_ids


def head_teacher(head: TargetHead, states: Tensor, ids: Tensor | None, shift: int = 0) -> Teacher:
    """Return the teacher of final hidden states [B*T, H]: slot r reads state r + `shift`.

    `ids` are the target ids of the draft vocabulary, int64 [Vd]; None: the full vocabulary.
    """
    return lambda r: torch.softmax(head.logits(states[r + shift], ids), -1)


def logits_teacher(logits: Tensor, ids: Tensor | None, shift: int = 0) -> Teacher:
    """Return the teacher of the target's logits [B*T, V]: slot r reads row r + `shift`.

    `ids` as for `head_teacher`.
    """

    def teacher(r: Tensor) -> Tensor:
        rows = logits[r + shift]
        return torch.softmax(wide(rows if ids is None else rows[:, ids]), -1)

    return teacher


def teacher_of(draft: BaseDraft, batch: DraftBatch, head: TargetHead, shift: int) -> Teacher:
    """Return the teacher of a batch, from its logits if it has them, else from its final states.

    `shift` is 1 for slots of the shifted frame, 0 for slots of the token frame.
    """
    ids = proposed_ids(draft)
    if LOGITS in batch.hidden:
        return logits_teacher(batch.hidden[LOGITS].flatten(0, 1), ids, shift)
    return head_teacher(head, batch.hidden[FINAL].flatten(0, 1), ids, shift)


class SharedTeacher:
    """Teacher of rows of which neighbours share a slot: computes each slot once per chunk."""

    def __init__(self, teacher: Teacher, slots: Tensor) -> None:
        """Prepare for rows at flat `slots`, int64 [n], in which equal slots are neighbours."""
        self._teacher = teacher
        self.slots, self.index = torch.unique_consecutive(slots, return_inverse=True)
        self._bounds = self.index.tolist()

    def __call__(self, part: slice) -> Tensor:
        """Return the probabilities [n, Vd] of a slice of n rows."""
        first, last = self._bounds[part.start], self._bounds[part.stop - 1]
        p = self.distributions(slice(first, last + 1))
        return p[self.index[part] - first]

    def distributions(self, part: slice) -> Tensor:
        """Return the probabilities [m, Vd] of a slice of m distinct slots."""
        return self._teacher(self.slots[part])
