"""Figures of block drafts as sums: those of `metrics`, and what blocks have besides.

    terms        [3] weighted sums of cross-entropy, L1 and the confidence's BCE
    term_weights [3] sums of their weights
    term_shares  [3] those, times the terms' weights in the loss
    tau, blocks  [] expected tokens per round, 1 + sum_d prod_{j<=d} c*_j, summed over the blocks
    confidence_* [10] of trained drafts by their confidence, in tenths: number, and sums of
                 confidence and acceptance; confidence_gap [] sum of their absolute difference

A chain of `metrics` is a block: draft d is a hit when it is the target's choice after the
document's own tokens up to it. So `acceptance_length` is comparable with that of other drafts.

N blocks, D drafts of a block, R trained drafts.
"""

import torch
from torch import Tensor

from spec_train.drafts.dspark.head_loss import RowFigures
from spec_train.metrics import Sums, chain_sums
from spec_train.metrics import summarise as summarise_chains

BINS = 10
TERMS = ("cross_entropy", "l1", "confidence_bce")


@torch.no_grad()
def block_sums(
    figures: RowFigures,
    confidence: tuple[Tensor, Tensor] | None,
    *,
    hit: Tensor,
    rows: Tensor,
    drafted: Tensor,
    trained: Tensor,
    weights: Tensor,
    has_token: Tensor,
    alphas: tuple[float, float, float],
) -> Sums:
    """Sums of a batch.

    Args:
        figures: of the R trained drafts. confidence: forecasts [R] and their BCE [R], or None.
        hit: bool [R], the draft's choice is the target's.
        rows: flat index of the R drafts in [B, N, D].
        drafted, trained: bool [B, N, D], drafts that count; those whose teacher is in the draft
            vocabulary.
        weights: of draft d, float64 [D]. has_token: bool [R], the cross-entropy counts.
        alphas: weights of the terms in the loss.
    """
    depth = len(weights)
    d = rows % depth
    w = weights[d]
    acceptance = figures.acceptance.double()
    cross_entropy = figures.cross_entropy.double()
    bce = torch.zeros_like(acceptance) if confidence is None else confidence[1].double()
    ce_weights = w * has_token
    forecast_weight = w.sum() if confidence is not None else w.new_zeros(())
    terms = [(ce_weights * cross_entropy).sum(), (w * 2 * (1 - acceptance)).sum(), (w * bce).sum()]
    term_weights = torch.stack([ce_weights.sum(), w.sum(), forecast_weight])
    hits, shares = (torch.zeros_like(drafted, dtype=kind) for kind in (torch.bool, torch.float64))
    hits.view(-1)[rows] = hit
    shares.view(-1)[rows] = acceptance  # a draft outside the vocabulary is never accepted
    expected = 1 + torch.cumprod(shares, dim=-1).sum(-1)
    live = drafted.any(-1)
    supervised = trained.sum((0, 1)).double()

    def by_depth(values: Tensor) -> Tensor:
        return torch.zeros_like(weights).index_add_(0, d, values.double())

    sums = {
        "loss": by_depth(cross_entropy * has_token),
        "supervised": supervised,
        "weighted": supervised * weights,
        "drafted": drafted.sum((0, 1)).double(),
        "hits": by_depth(hit),
        "acceptance": by_depth(acceptance),
        "terms": torch.stack(terms),
        "term_weights": term_weights,
        "term_shares": term_weights * term_weights.new_tensor(alphas),
        "tau": expected[live].sum(),
        "blocks": live.sum().double(),
        **chain_sums(hits.movedim(-1, 0), drafted.movedim(-1, 0)),
    }
    if confidence is not None:
        forecast = confidence[0].double()
        place = (forecast * BINS).long().clamp(max=BINS - 1)
        zero = torch.zeros(BINS, dtype=torch.float64, device=rows.device)
        sums["confidence_number"] = zero.index_add(0, place, torch.ones_like(forecast))
        sums["confidence_sum"] = zero.index_add(0, place, forecast)
        sums["confidence_accepted"] = zero.index_add(0, place, acceptance)
        sums["confidence_gap"] = (forecast - acceptance).abs().sum()
    return sums


def summarise_blocks(sums: Sums) -> dict[str, float | None]:
    """Figures of added-up sums: those of `metrics.summarise`, with

    "loss" the whole loss; "cross_entropy", "l1", "confidence_bce" its terms, unweighted; "tau" the
    expected tokens per round if drafts were sampled; "confidence_calibration" the expected
    calibration error over ten bins, |mean confidence - mean acceptance| by the drafts in the bin;
    "confidence_error" the mean |confidence - acceptance|, "confidence_bias" the mean difference.
    """
    out = summarise_chains(sums)
    values = {name: value.double().cpu() for name, value in sums.items()}
    weight = values["term_weights"]
    means = torch.where(weight > 0, values["terms"] / weight.clamp_min(1e-30), 0.0)
    alphas = torch.where(weight > 0, values["term_shares"] / weight.clamp_min(1e-30), 0.0)
    out["loss"] = float((alphas * means).sum())
    for name, mean, some in zip(TERMS, means.tolist(), weight.tolist(), strict=True):
        out[name] = mean if some else None
    blocks = float(values["blocks"])
    out["tau"] = float(values["tau"]) / blocks if blocks else None
    if "confidence_gap" in values:
        number = values["confidence_number"]
        drafts = float(number.sum())
        gap = values["confidence_sum"] - values["confidence_accepted"]
        for name, total in (
            ("confidence_calibration", gap.abs().sum()),
            ("confidence_error", values["confidence_gap"]),
            ("confidence_bias", gap.sum()),
        ):
            out[name] = float(total) / drafts if drafts else None
    return out
