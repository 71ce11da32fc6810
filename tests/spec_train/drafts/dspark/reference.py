"""A slow loss of block drafts: one document, block, slot and head at a time (see `slow_layer`)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import slow_layer
from spec_train.drafts.block import reference as blocks
from spec_train.drafts.block.reference import block_logits, block_states
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge

__all__ = ["ReferenceConfig", "block_logits", "block_states", "draft_counts"]
__all__ += ["reference_logits", "reference_loss"]


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(blocks.Config):
    """Settings from the checkpoint's config.json and the training options."""

    gamma: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss: SlotLoss | None = None  # another loss in place of cross-entropy and L1
    against: str = "soft"  # what that loss, or the cross-entropy, compares with: or hard, tokens
    weights: tuple[float, ...] = ()  # of the drafts of a block, instead of exp(-d / gamma)
    smoothing: float | None = None  # of D-PACE, instead of both
    stage: ModuleType | None = None  # a second stage that judges drafts and has a loss of its own
    lattice_weights: tuple[float, ...] = ()  # of cross-entropy, margin and penalty
    base_share: float = 0.0  # of the loss: of the logits without a recurrent head


def reference_logits(
    state: State, config: blocks.Config, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    made = {a: block_logits(state, config, document, a)[0] for a in anchors}
    return {(a, d): z for a, logits in made.items() for d, z in enumerate(logits[:depth])}


def draft_counts(m: Sequence[int], anchor: int, d: int) -> bool:
    """Return whether draft d of a block counts: tokens anchor+1..anchor+1+d are supervised."""
    tokens = range(anchor + 1, anchor + 2 + d)
    return all(t < len(m) and bool(m[t]) for t in tokens)


def reference_loss(
    state: State,
    config: ReferenceConfig,
    documents: Sequence[Document],
    counts: Sequence[float] | None = None,
) -> tuple[Tensor, Sums]:
    """Compute the loss of documents, whose `picks` are the anchors of their blocks.

    `counts` replaces the denominators: of the cross-entropy, and of the other two terms.
    """
    ids, confident = slow_layer.draft_ids(state, len(config.head_rows)), "confidence_head.proj.bias"
    sums, zero = Sums(config.depth), torch.zeros((), dtype=torch.float64)
    terms, term_weights, kind = [zero, zero, zero], [0.0, 0.0, 0.0], zero
    part_weights = [0.0, 0.0, 0.0]
    tau, blocks, forecasts = 0.0, 0, torch.zeros(3, dtype=torch.float64)
    right, compared = 0.0, 0.0
    for document in documents:
        hits = {}
        for anchor in document.picks:
            here = (state, config, document, anchor)
            states = block_states(*here)
            logits, confidences = block_logits(*here, states=states)
            stage = config.stage and config.stage.Block(*here, states)
            alone = [config.head_rows @ y for y in states[-config.depth :]]
            product, expected = 1.0, 1.0
            pace = paced(config, document, anchor, ids, logits, None)
            own = paced(config, document, anchor, ids, logits, stage)
            for d in range(config.depth):
                if not draft_counts(document.m, anchor, d):
                    break
                judged = served = judge(logits[d], document.z[anchor + d], ids)
                if stage is not None:
                    served = stage.judge(d, logits[d], judged)
                accepted = served.acceptance
                product *= float(accepted)
                expected += product
                hits[anchor, d] = served.hit
                entropy = None
                if judged.label is not None:
                    fixed = config.weights[d] if config.weights else math.exp(-d / config.gamma)
                    w, count = (fixed, fixed) if config.smoothing is None else (pace[d], 1.0)
                    token = document.x[anchor + 1 + d]
                    label = {"tokens": token, "hard": judged.wanted, "soft": None}[config.against]
                    if label is None or label in ids:
                        at = 0 if label is None else ids.index(label)
                        entropy = -judged.log_q[at]
                        if label is None:
                            entropy = -(judged.p * judged.log_q).sum()
                        terms[0] = terms[0] + w * entropy
                        term_weights[0] += count
                        part_weights[0] += float(w)
                        if config.loss is not None:
                            loss = config.loss(judged.p, judged.full, judged.log_q, at)
                            kind = kind + w * loss
                    terms[1] = terms[1] + w * (judged.log_q.exp() - judged.p).abs().sum()
                    term_weights[1] += count
                    part_weights[1] += float(w)
                    if config.base_share:
                        base = judge(alone[d], document.z[anchor + d], ids)
                        at = 0 if label is None else ids.index(label)
                        loss = -base.log_q[at] if label is not None else -base.p @ base.log_q
                        if config.loss is not None:
                            loss = config.loss(base.p, base.full, base.log_q, at)
                        terms[2] = terms[2] + w * loss
                        term_weights[2] += count
                        part_weights[2] += float(w)
                        right += base.hit
                        compared += 1
                    if stage is not None:
                        token = document.x[anchor + 1 + d]
                        right = token if config.against == "tokens" else judged.wanted
                        weight = stage.weigh(d, w if config.smoothing is None else own[d])
                        terms[2] = terms[2] + weight * stage.loss(d, logits[d], right)
                        term_weights[2] += count
                        part_weights[2] += float(weight)
                    if confident in state:
                        c = confidences[d]
                        bce = -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c))
                        terms[2] = terms[2] + fixed * bce
                        term_weights[2] += count
                        part_weights[2] += fixed
                        forecast = float(c.detach())
                        summed = [fixed, fixed * forecast, fixed * float(accepted)]
                        forecasts += forecasts.new_tensor(summed)
                sums.add(d, served, entropy)
                if stage is not None:
                    stage.count(sums, d, logits[d], judged, served)
            if draft_counts(document.m, anchor, 0):
                tau, blocks = tau + expected, blocks + 1
        sums.add_chains(hits)
        if config.stage:
            config.stage.count_chains(sums, document)
    sums |= {"terms": [float(x.detach()) for x in terms], "term_weights": term_weights}
    sums["part_weights"] = part_weights
    sums |= {"tau": tau, "blocks": float(blocks)}
    if config.loss is not None:
        sums |= {"kind": float(kind.detach()), "kind_weight": term_weights[0]}
        sums["kind_share"] = (1 - config.base_share) * term_weights[0]
    if config.base_share:
        sums |= {"base_right": right, "base_number": compared}
    if confident in state:
        names = ("confidence_number", "confidence_sum", "confidence_accepted")
        sums |= dict(zip(names, forecasts.tolist(), strict=True))
    alphas = config.ce_weight, config.l1_weight, config.confidence_weight
    if config.loss is not None:
        terms[0], alphas = kind, (1.0, 0.0, config.confidence_weight)
    if config.base_share:
        rest = 1 - config.base_share
        alphas = rest * alphas[0], rest * alphas[1], config.base_share
    divisors = term_weights if counts is None else [counts[0], counts[1], counts[1]]
    parts = zip(alphas, terms, divisors, strict=True)
    return sum((a * x / n for a, x, n in parts if n), zero), sums


def paced(
    config: ReferenceConfig,
    document: Document,
    anchor: int,
    ids: Sequence[int],
    logits: list[Tensor],
    stage: Any,
) -> list[float]:
    """Return D-PACE's weights of the drafts of a block, by the losses of a stage or by the logits.

    Of a draft: over all drafts from it on, the product of the smoothed confidences up to there.
    """
    reached: list[float] = []
    product = 1.0
    for d in range(config.depth):
        if config.smoothing is None or not draft_counts(document.m, anchor, d):
            break
        judged, token = judge(logits[d], document.z[anchor + d], ids), document.x[anchor + 1 + d]
        label = {"tokens": token, "hard": judged.wanted, "soft": None}[config.against]
        if judged.label is None or not (label is None or label in ids):
            reached.append(0.0)
            continue
        if stage is not None:
            right = judged.wanted if label is None else label
            loss = stage.loss(d, logits[d], right).detach()
        else:  # of a distribution, the token that the document goes on with
            wanted = token if label is None else label
            loss = -judged.log_q[ids.index(wanted)].detach() if wanted in ids else math.inf
        product *= config.smoothing + (1 - config.smoothing) * math.exp(-float(loss))
        reached.append(product)
    return [sum(reached[d:]) for d in range(len(reached))]
