"""A slow EAGLE-1/2 loss with chains: one document, slot and head at a time (see `slow_layer`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec_train.drafts.eagle import reference as eagle
from spec_train.drafts.eagle.reference import head, predict
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge, slot_counts

__all__ = ["ReferenceConfig", "predict", "reference_logits", "reference_loss"]


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(eagle.Config):
    """Settings from the checkpoint's config.json, the target's head and the training options."""

    regression_weight: float = 1.0
    ce_weight: float = 0.1
    steps: int = 1
    loss: SlotLoss = CROSS_ENTROPY


def noisy(document: Document) -> Document:
    """Return a document whose states are those that training reads."""
    noise = document.noise
    return document if noise is None else replace(document, aux=document.aux + noise)


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [V] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    found = {}
    for a in anchors:
        steps = min(depth, len(document.x) - a)
        states = eagle.chain(state, config, noisy(document), a - 1, document.x[a + 1 :], steps)
        found |= {(a, d): head(config, row) for d, row in enumerate(states)}
    return found


def reference_loss(
    state: State, config: ReferenceConfig, documents: Sequence[Document]
) -> tuple[Tensor, Sums]:
    """Compute the loss over all `documents`, and the sums of all steps."""
    sums, ids = Sums(config.steps), range(len(config.head_weight))
    second = "cross_entropy" if config.loss.name == "ce" else "distribution_loss"
    sums |= {"smooth_l1": [0.0] * config.steps, second: [0.0] * config.steps}
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        hits = {}
        for t in range(len(document.x) - 1):
            counted = [s for s in range(config.steps) if slot_counts(document.m, t + s)]
            if not counted:
                continue
            steps = counted[-1] + 1
            states = eagle.chain(state, config, noisy(document), t, document.x[t + 2 :], steps)
            for s in counted:
                wanted = document.aux[t + 1 + s]
                judged = judge(head(config, states[s]), head(config, wanted), ids)
                gap = (states[s] - wanted).abs()
                distance = torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean()
                entropy = config.loss(judged.p, judged.full, judged.log_q, judged.wanted)
                loss = config.regression_weight * distance + config.ce_weight * entropy
                total = total + (loss if s == 0 else 0)
                sums.add(s, judged, loss)
                sums["smooth_l1"][s] += float(distance.detach())
                sums[second][s] += float(entropy.detach())
                hits[t, s] = judged.hit
        sums.add_chains(hits)
    return total / max(sums["supervised"][0], 1), sums
