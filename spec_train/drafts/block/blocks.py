"""Blocks: which are trained, which of their drafts count, their metrics.

Everything is in the token frame. A block starts at an anchor a: its token x_a is known, and the
target's states are known strictly before a. Draft d of the block (d = 0..D-1) is for x_{a+1+d}. Its
previous token is x_{a+d}, and its teacher is the target's distribution at position a+d. Serving
starts blocks where x_a and x_{a+1} are both in the response and a is not the first token: these are
the slots t = a - 1 of EAGLE drafts.

Blocks are drawn at random, and the denominators of a step are needed before the draw. So they are
the expectation over the draw, which makes the sampled loss an unbiased estimate of the loss over
all blocks. They are exact if every candidate is an anchor.

B packs, T tokens of a pack, N blocks of a pack, D drafts of a block, R drafts that count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.models.devices import sent
from spec_data.shards.packing import PADDING, shift_left
from spec_train.drafts.slots import document_offsets
from spec_train.losses.metrics import Sums, on_host
from spec_train.losses.metrics import summarise as summarise_chains


@dataclass(frozen=True)
class Blocks:
    """The blocks of every pack."""

    anchors: Tensor  # int64 [B, N]
    real: Tensor  # bool [B, N]: False where a pack has fewer blocks

    def slots(self, depth: int) -> Tensor:
        """Return the slots a+d of previous tokens and teachers, int64 [B, N, depth]."""
        return self.anchors[..., None] + torch.arange(depth, device=self.anchors.device)


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Return the slots that can be anchors, bool [B, T].

    The slot and the next one are supervised, and the slot is not the first of its document.
    `loss_mask` [B, T] is in the token frame; `document_ids` is int64 [B, T].
    """
    mask = loss_mask.bool() & (document_ids != PADDING)
    return mask & shift_left(mask, document_ids) & (document_offsets(document_ids) > 0)


def sample_blocks(loss_mask: Tensor, document_ids: Tensor, limit: int) -> Blocks:
    """Draw up to `limit` anchors of every pack without replacement, ascending.

    N is the largest number of anchors that a pack has, so packs with few supervised tokens are
    cheap. The draw takes one number per pack from torch's default CPU generator. So it depends
    neither on the device, nor on the padding, nor on the other packs.

    Args:
        loss_mask: [B, T], in the token frame.
        document_ids: int64 [B, T].
        limit: most blocks of a pack.
    """
    rows = []
    for candidates in anchor_candidates(loss_mask, document_ids).cpu():
        slots = candidates.nonzero().squeeze(1)  # [candidates of the pack]
        seed = int(torch.randint(1 << 62, ()))
        if len(slots) > limit:
            order = torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))
            slots = slots[order[:limit]].sort().values
        rows.append(slots)
    counts = torch.tensor([len(row) for row in rows])  # [B]
    real = torch.arange(int(counts.max())) < counts[:, None]  # [B, N]
    anchors = torch.zeros(real.shape, dtype=torch.long)  # [B, N]
    anchors[real] = torch.cat(rows)
    device = loss_mask.device
    return Blocks(sent(anchors, device), sent(real, device))


def drafted_mask(loss_mask: Tensor, document_ids: Tensor, depth: int) -> Tensor:
    """Return whether draft d of a block that starts at a slot counts, bool [B, T, depth].

    Its token must be in the document and supervised, and all earlier drafts of the block must
    count. `loss_mask` [B, T] is in the token frame; `document_ids` is int64 [B, T].
    """
    alive = loss_mask.bool() & (document_ids != PADDING)
    alive = shift_left(alive, document_ids)  # [B, T], for the token after each slot
    parts = [alive]
    for _ in range(depth - 1):
        parts.append(alive & shift_left(parts[-1], document_ids))
    return torch.stack(parts, dim=-1)


def expected_weights(
    loss_mask: Tensor,  # [B, T], in the token frame
    document_ids: Tensor,  # int64 [B, T]
    inside: Tensor,  # slots whose teacher (or label) can be learned, bool [B, T]; read at a+d
    weights: Tensor,  # of draft d, float64 [D]
    limit: int,  # most blocks of a pack
) -> Tensor:
    """Return the summed weights of all drafts of a batch, float64 []: the mean over the draw.

    Exact if no pack has more than `limit` candidates.
    """
    candidates = anchor_candidates(loss_mask, document_ids)  # [B, T]
    counted = drafted_mask(loss_mask, document_ids, len(weights))  # [B, T, D]
    total = weights.new_zeros(len(candidates))  # [B]
    for d, weight in enumerate(weights):
        # Draft d of the block at a reads slot a+d, which is in the document if the draft counts.
        at = torch.zeros_like(inside)  # [B, T], `inside` moved left by d
        at[:, : inside[:, d:].shape[1]] = inside[:, d:]  # nothing is left of a shorter pack
        total += weight * (candidates & counted[..., d] & at).sum(1)
    count = candidates.sum(1).double()  # [B]
    return (total * (count.clamp(max=limit) / count.clamp(min=1))).sum()


def pace_weights(
    entropy: Tensor,  # -log q of the token of each of the R drafts that count [R]; may be infinite
    trained: Tensor,  # whether a draft is, bool [R]
    drafted: Tensor,  # bool [B, N, D]
    rows: Tensor,  # flat index of the drafts in [B, N, D], int64 [R]
    smoothing: float,
) -> Tensor:
    """Return the weights of D-PACE (arXiv 2605.18810), float64 [R], without a gradient.

    With q_d the draft's probability of the token, and C_d the product of
    smoothing + (1 - smoothing) q over the drafts 0..d of the block, w_d is the sum of C_d, C_{d+1},
    ...: the expected number of accepted drafts that need this one. A draft that is not trained is
    left out of products and sums.
    """
    confidence = smoothing + (1 - smoothing) * torch.exp(-entropy.detach().double())
    factors = torch.ones(drafted.shape, dtype=torch.float64, device=rows.device)
    factors.view(-1)[rows] = torch.where(trained, confidence, 1.0)
    counted = torch.zeros_like(factors)
    counted.view(-1)[rows] = trained.double()
    reached = factors.cumprod(-1) * counted
    return reached.flip(-1).cumsum(-1).flip(-1).flatten()[rows]


# -- metrics ---------------------------------------------------------------------------------------
# The sums of `losses.metrics`, and some that only blocks have:
#
#     terms        [3] weighted sums of cross-entropy, L1 and the second stage's loss
#     term_weights [3] sums of their weights
#     term_shares  [3] those, times the terms' weights in the loss
#     tau, blocks  [] expected tokens per verification, 1 + sum_d prod_{j<=d} c*_j, summed over
#                  the blocks
#     kind, kind_weight, kind_share []  with another loss than ce+l1: its weighted sum, the sum of
#                  its weights, and that times the share of the loss in the whole one
#     confidence_* []  of trained drafts with a forecast, weighted like their loss: sum of weights
#                  (number), of confidence (sum) and of acceptance (accepted)
#
# c*_j is the acceptance of draft j, also where the target's choice is outside the draft vocabulary.
# A chain of `metrics` is a block here: draft d is a hit if it is the target's choice after the
# document's own tokens up to it. So `acceptance_length` is comparable with that of other drafts.


def summarise_blocks(sums: Sums, stage_term: str) -> dict[str, float | None]:
    """Turn added sums into metrics: those of `metrics.summarise`, and the following.

    "loss" is the whole loss; "cross_entropy", "l1" and `stage_term` are means of its terms over
    drafts, by the weights of drafts. With another loss than ce+l1, "distribution_loss" replaces
    the first two in it, and they are only measured. D-PACE divides the loss by the number of
    drafts, but no mean.
    "tau" is the expected number of tokens per verification if drafts are sampled.
    """
    out = summarise_chains(sums)
    values = on_host(sums)
    weight = values["term_weights"]
    means = torch.where(weight > 0, values["terms"] / weight.clamp_min(1e-30), 0.0)
    alphas = torch.where(weight > 0, values["term_shares"] / weight.clamp_min(1e-30), 0.0)
    loss = float((alphas * means).sum())
    if "kind" in values:
        weighed = float(values["kind_weight"])
        mean = float(values["kind"]) / weighed if weighed else 0.0
        drafts = float(values["part_weights"][0])
        out["distribution_loss"] = float(values["kind"]) / drafts if drafts else None
        share = float(values["kind_share"]) / weighed if weighed else 1.0
        loss += share * mean
    out["loss"] = loss if weight.any() else None
    names = "cross_entropy", "l1", stage_term
    for name, total, some in zip(names, values["terms"], values["part_weights"], strict=True):
        out[name] = float(total / some) if some else None
    blocks = float(values["blocks"])
    out["tau"] = float(values["tau"]) / blocks if blocks else None
    return out
