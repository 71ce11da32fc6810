"""What the slow losses of all drafts share: documents with a teacher, and sums.

The arithmetic is that of `spec_train.drafts.slow_layer`, plain loops in float64, which are
written independently of the fast code and never used by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as layer
from spec_train.drafts.slow_layer import State

__all__ = ["Document", "Judged", "State", "Sums", "judge", "slot_counts"]


@dataclass(frozen=True, kw_only=True)
class Document(layer.Document):
    """A document and what its loss needs."""

    m: Sequence[int]  # loss mask, [T]
    z: Tensor | None = None  # [T, V] float64; z[t] are the target's logits for token t+1
    noise: Tensor | None = None  # [T, H], added to the input of EAGLE-1/2
    picks: Sequence[Any] = ()  # anchors of blocks; (anchor, depth) of the elements of P-EAGLE


def slot_counts(m: Sequence[int], slot: int) -> bool:
    """Whether the slot that knows token slot+1 and drafts token slot+2 counts; m: the loss mask."""
    return all(t < len(m) and bool(m[t]) for t in (slot + 1, slot + 2))


@dataclass(frozen=True)
class Judged:
    """A drafted token against the target's logits: nothing outside the vocabulary is drafted."""

    log_q: Tensor  # of the draft [Vd]
    p: Tensor  # the target's probabilities, renormalised over the draft vocabulary [Vd]
    full: Tensor  # the target's own probabilities of these tokens [Vd]
    wanted: int  # the target's choice
    label: int | None  # its draft index; None: outside the draft vocabulary, a miss
    hit: bool

    @property
    def acceptance(self) -> Tensor:
        return torch.minimum(self.full, self.log_q.detach().exp()).sum()


def judge(logits: Tensor, teacher: Tensor, ids: Sequence[int]) -> Judged:
    """Judge draft logits [Vd] of the target tokens `ids` by the target's logits [V]."""
    wanted, full = int(teacher.argmax()), torch.softmax(teacher, 0)
    label = ids.index(wanted) if wanted in ids else None
    p = torch.softmax(teacher[list(ids)], 0)
    hit = label is not None and int(logits.argmax()) == label
    return Judged(torch.log_softmax(logits, 0), p, full[list(ids)], wanted, label, hit)


class Sums(dict[str, Any]):
    """Sums of a loss, most of them by depth, under the names of the fast code."""

    def __init__(self, depth: int) -> None:
        names = "loss supervised drafted hits acceptance survive at_risk kept"
        super().__init__({name: [0.0] * depth for name in names.split()} | {"chains": 0.0})

    def add(self, depth: int, judged: Judged, loss: Tensor | None = None) -> None:
        """Add a draft that counts; `loss`, if it is trained."""
        self["drafted"][depth] += 1
        self["supervised"][depth] += judged.label is not None
        self["hits"][depth] += judged.hit
        self["acceptance"][depth] += float(judged.acceptance)
        self["loss"][depth] += 0.0 if loss is None else float(loss.detach())

    def add_chains(self, hits: Mapping[tuple[int, int], bool]) -> None:
        """Add the chains of a document: hits of the drafts that count, by (anchor, depth)."""
        depths = range(len(self["hits"]))
        for t in {t for t, _ in hits}:
            for d in depths:
                if (t, d) not in hits:
                    break
                self["at_risk"][d] += 1
                if not hits[t, d]:
                    break
                self["kept"][d] += 1
            if all((t, d) in hits for d in depths):
                self["chains"] += 1
                for d in depths:
                    self["survive"][d] += all(hits[t, e] for e in range(d + 1))
