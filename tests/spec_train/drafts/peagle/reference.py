"""A slow P-EAGLE loss: one document, element, layer and head at a time (see `slow_layer`)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer
from spec_train.drafts.peagle import reference as peagle
from spec_train.drafts.peagle.reference import Element, element_logits, reference_logits
from tests.spec_train.drafts.slot_loss import KL, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge, slot_counts

__all__ = ["ReferenceConfig", "reference_cod", "reference_logits", "reference_loss"]


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(peagle.Config):
    """Settings from the checkpoint's config.json and the training options."""

    loss: SlotLoss = KL


def reference_cod(
    supervised: Sequence[bool], uniforms: Sequence[Sequence[float]], ratio: float, floor: float
) -> list[Element]:
    """Sample one document by conditional drop; one row of numbers per depth from 1."""
    length, count = len(supervised), sum(map(bool, supervised))
    elements = [(t, 0) for t in range(length)]
    kept = list(range(length))
    for d, row in enumerate(uniforms, start=1):
        candidates = [p + 1 for p in kept if p + 1 < length and supervised[p + 1]]
        quota = int(max(count - d, 0) * max(ratio**d, floor))
        kept = sorted(sorted(candidates, key=lambda p, row=row: row[p])[:quota])
        elements += [(p - d, d) for p in kept]
    return elements


def reference_loss(
    state: State, config: ReferenceConfig, documents: Sequence[Document]
) -> tuple[Tensor, Sums]:
    """Compute the loss over all `documents`, whose `picks` are the sampled elements."""
    sums, ids = Sums(config.depths), slow_layer.draft_ids(state, len(state["lm_head.weight"]))
    total, weights = torch.zeros((), dtype=torch.float64), 0.0
    for document in documents:
        logits = element_logits(state, config, document, document.picks)
        hits = {}
        for t, d in sorted(document.picks):
            if not slot_counts(document.m, t + d):
                continue
            judged = judge(logits[t, d], document.z[t + 1 + d], ids)
            hits[t, d] = judged.hit
            loss = None
            if judged.label is not None:
                loss = config.loss(judged.p, judged.full, judged.log_q, judged.label)
                weight = config.loss.weight(d, 1.0)
                total, weights = total + weight * loss, weights + weight
            sums.add(d, judged, loss)
        sums.add_chains(hits)
    return total / weights, sums
