"""How far a loss with a teacher of K logits may be from the loss with all logits.

With t the missing mass of a slot, and w its share of the draft vocabulary, t / (s + t), where s is
the known probability in that vocabulary (w = t if the draft has the full vocabulary):

    loss         value                                     gradient for the logits (sum of |.|)
    ce, kl       full vocabulary: a lower bound            at most 2 w
    reverse-kl   full vocabulary: a lower bound            no bound
    jsd          full vocabulary: a lower bound, at most   at most 2 w
                 t / 2 (1 + log(1 + 1 / t)) too low
    tv           an upper bound, at most t too high        at most 2 t
    lk-alpha     an upper bound                            4 t / acceptance
    lk-lambda    no bound                                  at most 2 w + 4 scale decay t
    L1           at most 2 w away                          full vocabulary: at most 4 t

Why: the unknown tokens count as one token, so the divergences are those of a coarser partition,
which are never larger. The completed teacher (see `losses`) is at most 2 w from the true one in the
sum of absolute differences; the gradient of ce and kl is q - p, and that of jsd changes by at most
that distance. An acceptance counts no unknown token, which misses at most t of it, and t of the
probabilities q below p, each twice in the gradient. The cross-entropy has no upper bound: a draft
may have no probability at all where the target has some. A hard target is exact: it is one of the
K tokens.

Bounds of a mean over slots follow from the means of t and w: all are linear or concave in them.
"""

import math
from dataclasses import dataclass
from typing import Any

from spec_train.losses import LossKind
from spec_train.options.loss_options import MIXED


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
