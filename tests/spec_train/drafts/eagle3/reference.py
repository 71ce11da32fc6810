"""A slow EAGLE-3 loss: one document, slot, unroll step and head at a time (see `slow_layer`)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer
from spec_train.drafts.eagle3 import reference as eagle3
from spec_train.drafts.eagle3.reference import unrolled
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge, slot_counts

__all__ = ["ReferenceConfig", "reference_logits", "reference_loss", "unrolled"]


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(eagle3.Config):
    """Settings from the checkpoint's config.json and the training options."""

    decay: float = 0.8
    loss: SlotLoss = CROSS_ENTROPY


def reference_loss(
    state: State, config: ReferenceConfig, documents: Sequence[Document]
) -> tuple[Tensor, Sums]:
    """Compute the loss over all `documents`, and the sums of all steps."""
    sums, ids = Sums(config.steps), slow_layer.draft_ids(state, len(state["lm_head.weight"]))
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(config.steps)]
    for document in documents:
        hits = {}
        for (t, s), (logits, _) in unrolled(state, config, document.x, document.aux).items():
            if not slot_counts(document.m, t + s):
                continue
            judged = judge(logits, document.z[t + 1 + s], ids)
            hits[t, s] = judged.hit
            loss = None
            if judged.label is not None:
                loss = config.loss(judged.p, judged.full, judged.log_q, judged.label)
                losses[s] = losses[s] + loss
            sums.add(s, judged, loss)
        sums.add_chains(hits)
    weights = [config.loss.weight(s, config.decay**s) for s in range(config.steps)]
    counts = [max(count, 1) for count in sums["supervised"]]
    means = (w * loss / n for w, loss, n in zip(weights, losses, counts, strict=True))
    return sum(means, torch.zeros(())) / sum(weights), sums


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    found = unrolled(state, config, document.x, document.aux)
    return {(t + 1, s): z for (t, s), (z, _) in found.items() if t + 1 in anchors and s < depth}
