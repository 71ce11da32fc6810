"""How much of the target's probability the K logits of a dataset miss, measured before a run.

The first documents are read: a mean over some thousand slots is precise enough for a log line, and
the exact figure of every slot enters its loss anyway (see `drafts.teacher.topk_teacher`).
"""

import logging
import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.data.mixture import Documents
from spec_train.data.splits import Splits
from spec_train.drafts import Draft
from spec_train.drafts.teacher import TOPK, missing_mass
from spec_train.losses.menu import LossKind
from spec_train.options.loss_options import MIXED

# -- topk bounds -----------------------------------------------------------------------------------
# How far a loss with a teacher of K logits may be from the loss with all logits.
#
# With t the missing mass of a slot, and w its share of the draft vocabulary, t / (s + t), where s
# is the known probability in that vocabulary (w = t if the draft has the full vocabulary):
#
#     loss         value                                     gradient for the logits (sum of |.|)
#     ce, kl       full vocabulary: a lower bound            at most 2 w
#     reverse-kl   full vocabulary: a lower bound            no bound
#     jsd          full vocabulary: a lower bound, at most   at most 2 w
#                  t / 2 (1 + log(1 + 1 / t)) too low
#     tv           an upper bound, at most t too high        at most 2 t
#     lk-alpha     an upper bound                            4 t / acceptance
#     lk-lambda    no bound                                  at most 2 w + 4 scale decay t
#     L1           at most 2 w away                          full vocabulary: at most 4 t
#
# Why: the unknown tokens count as one token, so the divergences are those of a coarser partition,
# which are never larger. The completed teacher (see `losses`) is at most 2 w from the true one in
# the sum of absolute differences; the gradient of ce and kl is q - p, and that of jsd changes by at
# most that distance. An acceptance counts no unknown token, which misses at most t of it, and t of
# the probabilities q below p, each twice in the gradient. The cross-entropy has no upper bound: a
# draft may have no probability at all where the target has some. A hard target is exact: it is one
# of the K tokens.
#
# Bounds of a mean over slots follow from the means of t and w: all are linear or concave in them.


@dataclass(frozen=True)
class Bounds:
    """How far a loss may be off; None: no bound."""

    value: float | None
    gradient: float | None
    side: str  # which bound the loss is of the loss with all logits: "lower", "upper", or ""


EXACT = Bounds(0.0, 0.0, "")


def kind_bounds(kind: LossKind, missing: float, share: float, full: bool) -> Bounds:
    """Return the bounds of one loss; `full`: the draft has the target's full vocabulary."""
    if kind.hard:
        return EXACT
    lower = "lower" if full else ""
    if kind.name in ("ce", "kl"):
        return Bounds(None, 2 * share, lower)
    if kind.name == "reverse-kl":
        return Bounds(None, None, lower)
    if kind.name == "jsd":
        most = missing * (1 + math.log1p(1 / missing)) / 2 if missing else 0.0
        return Bounds(most if full else None, 2 * share, lower)
    if kind.name == "tv":
        return Bounds(missing, 2 * missing, "upper")
    if kind.name == "lk-alpha":
        return Bounds(None, None, "upper")
    return Bounds(None, 2 * share + 4 * kind.scale * kind.decay * missing, "")


def bounds_of(options: Any, missing: float, share: float, full: bool) -> Bounds:
    """Return the bounds of the loss that the options of a draft name.

    `missing` and `share` are means of t and w. The loss of a confidence head is not in it: its
    label is an acceptance, so it is too low by at most `missing`.
    """
    if options.loss != MIXED:
        return kind_bounds(LossKind.of(options), missing, share, full)
    entropy = EXACT
    if options.compared_with == "soft":
        entropy = kind_bounds(LossKind(), missing, share, full)
    value, gradient = 2 * share, 4 * missing if full else None
    return Bounds(
        _weighted((options.ce_weight, entropy.value), (options.l1_weight, value)),
        _weighted((options.ce_weight, entropy.gradient), (options.l1_weight, gradient)),
        "",
    )


def _weighted(*terms: tuple[float, float | None]) -> float | None:
    """Return the weighted sum of bounds; None if a term that counts has none."""
    found = 0.0
    for weight, bound in terms:
        if weight and bound is None:
            return None
        found += weight * (bound or 0.0)
    return found


# -- missing mass ----------------------------------------------------------------------------------


log = logging.getLogger(__name__)

DOCUMENTS = 64
"""Most documents that are read."""


@dataclass(frozen=True)
class MissingMass:
    """Means over supervised slots of the first documents."""

    slots: int
    missing: float  # probability of all tokens but the K
    largest: float
    share: float  # its share of the draft vocabulary, all of it assumed to be inside
    bounds: Bounds

    def note(self) -> dict[str, Any]:
        """Return the figures for run.json."""
        return {
            "slots": self.slots,
            "mean": round(self.missing, 8),
            "largest": round(self.largest, 8),
            "share_of_draft_vocabulary": round(self.share, 8),
            "loss_bound": self.bounds.value,
            "loss_side": self.bounds.side,
            "gradient_bound": self.bounds.gradient,
        }


def measure_missing_mass(draft: Draft, dataset: Documents, splits: Splits) -> MissingMass | None:
    """Return the figures of a dataset of K logits for a draft; None for other datasets.

    Held-out documents and those of the first batch are read: the first step needs them anyway, so a
    dataset that is still being generated is not waited for any longer.
    """
    if not dataset.manifest.supervision.startswith("topk"):
        return None
    first = next(iter(splits.train.iter_batches(0)), [])
    rows = [*splits.validation.rows.tolist(), *(row for pack in first for row in pack)][:DOCUMENTS]
    dataset.wait_for(rows, threading.Event())
    inside = torch.ones(draft.config.vocab_size, dtype=torch.bool)
    if not draft.full_vocabulary:
        inside = torch.zeros_like(inside)
        inside[draft.draft_ids.cpu()] = True
    parts = [_document(dataset, row, int(splits.train.lengths[row]), inside) for row in rows]
    missing, share = (torch.cat(column).double() for column in zip(*parts, strict=True))
    if not len(missing):
        return None
    means = float(missing.mean()), float(share.mean())
    bounds = bounds_of(draft.options, *means, draft.full_vocabulary)
    return MissingMass(len(missing), means[0], float(missing.max()), means[1], bounds)


def _document(dataset: Documents, row: int, count: int, inside: Tensor) -> tuple[Tensor, Tensor]:
    """Return missing mass and share, [n] each, of the n supervised slots of a document.

    `inside` is bool [V], true in the draft vocabulary. A slot counts if its next token is
    supervised, and if it knows a token of the draft vocabulary (others train nothing).
    """
    width = next(c.width for c in dataset.manifest.columns if c.name == TOPK[0]) or 1
    out = {
        "loss_mask": torch.zeros(count, dtype=torch.bool),
        TOPK[0]: torch.zeros(count, width, dtype=torch.int32),
        TOPK[1]: torch.zeros(count, width),
        "target_logsumexp": torch.zeros(count),
    }
    dataset.read_into(row, out, 0, count)
    slots = out["loss_mask"][1:].nonzero()[:, 0]
    ids, logits, total = (out[name][slots] for name in (*TOPK, "target_logsumexp"))
    own = (logits - total[:, None]).exp() * inside[ids.long()]  # [n, K]
    missing, known = missing_mass(logits, total), own.sum(-1)
    some = known > 0
    return missing[some], (missing / (known + missing))[some]


def log_missing_mass(found: MissingMass, options: Any, supervision: str) -> None:
    """Log what the K logits miss, and what that does to the loss and to the metrics."""
    bounds, other = found.bounds, "the loss with all logits"
    far = "with no bound of the distance"
    if bounds.value is not None:
        far = f"at most {bounds.value:.2g} away"
    if bounds.value == 0:
        loss = f"equals {other}: its target is one of the K tokens"
    elif bounds.side:
        loss = f"is {'a' if bounds.side == 'lower' else 'an'} {bounds.side} bound of {other}, {far}"
    else:
        loss = f"differs from {other}, {far}"
    slope = "no bound" if bounds.gradient is None else f"at most {bounds.gradient:.2g} per slot"
    log.info(
        "teacher    %s: the logits miss %.2g of the target's probability on average (largest %.2g, "
        "%s slots). Loss %s %s; error of its gradient for the draft's logits: %s. Expected "
        "acceptance is a lower bound, at most %.2g too low",
        *(supervision, found.missing, found.largest, f"{found.slots:,}"),
        *(options.loss, loss, slope, found.missing),
    )
