"""Teachers: the target's distribution at a slot, over the draft vocabulary.

In: the target's final hidden states with its head, all its logits, or the K largest. Out: a
function of flat slot indices (b * T + t), so that only the rows of the slots that count are ever
computed.

A teacher of a reduced draft vocabulary also knows how much of the target's probability lies in it,
because serving accepts with the target's full distribution. Final hidden states of a dataset need
all V rows of the head for that: a codec rounds the states, and a quotient of rounded logits and the
stored, exact `target_logsumexp` is wrong by 0.1 on average with the default codec. The errors of a
quotient of two sums over the same rounded logits cancel (0.004). In training most losses need none
of this: only the figure does, so it is measured at a sample of the slots (`measured_at`).

The K logits and the logsumexp of all V logits are exact, so the target's probability m p of these K
tokens is exact, and how much the others share is known, but not how: the missing mass. It is never
renormalised away. See `topk_teacher`, and docs/losses.md for what a loss makes of it.

B packs, T slots, n slots asked for, V / Vd target / draft vocabulary, H hidden size.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from spec_train.losses.head import TargetHead
from spec_train.losses.menu import rows_per_chunk, wide
from spec_train.losses.teacher_rows import SharedRows, SlotRows, TeacherLogits, TeacherRows
from spec_train.losses.tiles import log_sums

Teacher = Callable[[Tensor], SlotRows]
"""Flat slots, int64 [n] -> their distributions, float32 (float64 for float64 inputs)."""

TOPK = ("topk_ids", "topk_logits")
"""The columns of a dataset of supervision topk:K; `target_logsumexp` completes them."""

LOGITS = "logits"
"""The column, and the supervision, of a dataset that holds all logits of the target."""


def head_teacher(
    head: TargetHead,
    states: Tensor,
    ids: Tensor | None,
    logsumexp: Tensor | None = None,
    shift: int = 0,
) -> Teacher:
    """Return the teacher of final hidden states [B*T, H]: slot r reads state r + `shift`.

    `ids` are the target ids of the draft vocabulary, int64 [Vd]; None: the full vocabulary.
    `logsumexp` [B*T] is that of the target's logits over the full vocabulary, from states as exact
    as `states`, NaN where no mass is wanted; None: computed from all rows of the head, if `ids`
    need it.
    """

    def teacher(r: Tensor) -> SlotRows:
        rows = states[r + shift]
        if ids is None:
            return TeacherRows.of_logits(head.logits(rows, narrow=True), None)
        if logsumexp is None:
            return _of_whole_head(head, rows, ids)
        return TeacherRows.of_logits(head.logits(rows, ids, narrow=True), logsumexp[r + shift])

    return teacher


def _of_whole_head(head: TargetHead, states: Tensor, ids: Tensor) -> SlotRows:
    """Return the teacher of states [n, H] over `ids`, from all logits, a few rows at a time."""
    parts = []
    for some in states.split(rows_per_chunk(len(head.head_weight), states.device)):
        logits = head.logits(some, narrow=True)  # [k, V]
        parts.append((logits[:, ids], log_sums(logits)))
    selected, sums = (torch.cat(column) for column in zip(*parts, strict=True))
    return TeacherRows.of_logits(selected, sums)


def sums_at(head: TargetHead, states: Tensor, slots: Tensor) -> Tensor:
    """Return the log-sum-exp [n] of all logits of states [n, H] at `slots`; NaN elsewhere."""
    sums = torch.full_like(wide(states[:, 0]), math.nan)
    for some in slots.split(rows_per_chunk(len(head.head_weight), states.device)):
        if len(some):
            sums[some] = log_sums(head.logits(states[some], narrow=True)).to(sums)
    return sums


def measured_at(teacher: Teacher, measured: Tensor) -> Teacher:
    """Return a teacher whose mass is NaN except at `measured` slots, bool [B*T]."""

    def some(r: Tensor) -> SlotRows:
        rows = teacher(r)
        like = rows.total if isinstance(rows, TeacherLogits) else rows.p
        mass = like.new_ones(len(r)) if rows.mass is None else rows.mass
        return replace(rows, mass=mass.masked_fill(~measured[r], math.nan))

    return some


def logits_teacher(logits: Tensor, ids: Tensor | None, shift: int = 0) -> Teacher:
    """Return the teacher of the target's logits [B*T, V]: slot r reads row r + `shift`.

    `ids` as for `head_teacher`.
    """

    def teacher(r: Tensor) -> SlotRows:
        rows = logits[r + shift]
        if ids is None:
            return TeacherRows.of_logits(rows, None)
        few = rows.split(rows_per_chunk(rows.shape[1], rows.device))  # bounds the float32 copies
        sums = torch.cat([log_sums(some) for some in few])
        return TeacherRows.of_logits(rows[:, ids], sums)

    return teacher


def missing_mass(logits: Tensor, logsumexp: Tensor) -> Tensor:
    """Return the target's probability [...] of all tokens but the K with `logits` [..., K].

    `logsumexp` [...] is over the full vocabulary. The result is exact up to the rounding of both,
    some 1e-6 in float32.
    """
    covered = (wide(logits) - wide(logsumexp)[..., None]).exp().sum(-1)
    return (1 - covered).clamp_min_(0.0)


def topk_teacher(
    ids: Tensor,  # target ids, [B*T, K]
    logits: Tensor,  # their logits [B*T, K]
    logsumexp: Tensor,  # of all logits [B*T]
    index: Tensor,  # draft index of every target id, -1 outside the draft vocabulary, int64 [V]
    size: int,  # Vd
    shift: int = 0,  # 1 for slots of the shifted frame, 0 for slots of the token frame
) -> Teacher:
    """Return the teacher of K logits: slot r reads row r + `shift`.

    With s the exact probability of those of the K tokens that are in the draft vocabulary, and t
    the missing mass, the target's probability m of the draft vocabulary is between s and s + t, and
    m = s + t is assumed: no known token looks more probable than it is. The tokens of the draft
    vocabulary that are not among the K share `rest` = t / (s + t). Of the full vocabulary, m is 1
    and `rest` is t, both exact. If all tokens of the draft vocabulary are known, m is s and `rest`
    is 0.
    """

    def teacher(r: Tensor) -> TeacherRows:
        rows = r + shift
        z, total = wide(logits[rows]), wide(logsumexp[rows])
        probabilities = (z - total[:, None]).exp()  # [n, K], m p of the K tokens
        chosen = index[ids[rows].long()]  # [n, K]
        inside = chosen >= 0
        inner = probabilities * inside
        full = inner.new_zeros(len(rows), size).scatter_add_(1, chosen.clamp_min(0), inner)
        missing = missing_mass(z, total) * (inside.sum(-1) < size)  # [n]
        mass = (inner.sum(-1) + missing).clamp_min_(torch.finfo(inner.dtype).tiny)
        return TeacherRows(
            full.div_(mass[:, None]),
            None if size == len(index) else mass.clamp(max=1.0),
            missing / mass,
        )

    return teacher


class SharedTeacher:
    """Teacher of rows of which neighbours share a slot: computes each slot once per chunk."""

    def __init__(self, teacher: Teacher, slots: Tensor, entropy: bool = False) -> None:
        """Prepare for rows at flat `slots`, int64 [n], in which equal slots are neighbours.

        `entropy`: compute the entropy of every slot too, once.
        """
        self._teacher, self._entropy = teacher, entropy
        self.slots, self.index = torch.unique_consecutive(slots, return_inverse=True)
        self.bounds = self.index.tolist()

    def __call__(self, part: slice) -> SharedRows:
        """Return the distributions of a slice of n rows."""
        first, last = self.bounds[part.start], self.bounds[part.stop - 1]
        rows = self._teacher(self.slots[first : last + 1])
        rows = rows.with_entropy() if self._entropy else rows
        return SharedRows(rows, self.index[part] - first)
