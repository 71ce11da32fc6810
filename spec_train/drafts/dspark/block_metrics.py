"""Metrics of block drafts as sums: those of `metrics`, and some that only blocks have.

In: figures of the drafts that count. Out: float64 sums that add up over batches, and from their
totals the metrics. The additional sums are

    terms        [3] weighted sums of cross-entropy, L1 and the confidence's BCE
    term_weights [3] sums of their weights
    term_shares  [3] those, times the terms' weights in the loss
    tau, blocks  [] expected tokens per round, 1 + sum_d prod_{j<=d} c*_j, summed over the blocks
    kind, kind_weight []  with another loss than ce+l1: its weighted sum, and the sum of its weights
    confidence_* [10] of trained drafts by their confidence, in tenths, weighted like their loss:
                 sum of weights (number), of confidence and of acceptance; confidence_gap [] sum of
                 their absolute difference

c*_j is the acceptance of draft j: the probability that a draw from the draft is kept, given the
target's full distribution (see `head_loss`). It counts at every draft, also where the target's
choice is outside the draft vocabulary.

A chain of `metrics` is a block here: draft d is a hit if it is the target's choice after the
document's own tokens up to it. So `acceptance_length` is comparable with that of other drafts.

B packs, N blocks of a pack, D drafts of a block, R drafts that count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts.dspark.head_loss import RowFigures
from spec_train.drafts.dspark.trained_rows import TrainedRows
from spec_train.metrics import Sums, chain_sums
from spec_train.metrics import summarise as summarise_chains

BINS = 10
TERMS = ("cross_entropy", "l1", "confidence_bce")


@dataclass(frozen=True)
class Forecasts:
    """What the confidence head forecasts for the R drafts that count, no gradients."""

    confidence: Tensor  # probability of acceptance [R]
    bce: Tensor  # its binary cross-entropy with the acceptance [R]


@torch.no_grad()
def block_sums(
    figures: RowFigures,
    forecasts: Forecasts | None,
    chosen: TrainedRows,
    weights: Tensor,
    alphas: tuple[float, float, float],
) -> Sums:
    """Return the sums of a batch.

    Args:
        figures: of the R drafts that count.
        forecasts: of the same; None without a confidence head.
        chosen: which drafts these are, and which of them are trained.
        weights: of draft d, float64 [D].
        alphas: weights of the three terms in the loss.
    """
    depth, rows, drafted = len(weights), chosen.rows, chosen.drafted
    d = rows % depth  # [R], depth of each draft
    w = weights[d] * chosen.trained  # [R]
    hit = figures.best == chosen.choice  # [R]
    acceptance, overlap = figures.acceptance.double(), figures.overlap.double()
    cross_entropy = figures.cross_entropy.double()
    bce = torch.zeros_like(acceptance) if forecasts is None else forecasts.bce.double()
    ce_weights = w * chosen.has_token
    forecast_weight = w.sum() if forecasts is not None else w.new_zeros(())
    terms = [(ce_weights * cross_entropy).sum(), (w * 2 * (1 - overlap)).sum(), (w * bce).sum()]
    term_weights = torch.stack([ce_weights.sum(), w.sum(), forecast_weight])  # [3]
    hits, shares = (torch.zeros_like(drafted, dtype=kind) for kind in (torch.bool, torch.float64))
    hits.view(-1)[rows] = hit  # [B, N, D]
    shares.view(-1)[rows] = acceptance  # [B, N, D]; 0 where no draft counts
    expected = 1 + torch.cumprod(shares, dim=-1).sum(-1)  # [B, N]
    live = drafted.any(-1)  # [B, N]

    def by_depth(values: Tensor) -> Tensor:
        """Sum values [R] by the depth of their draft: [D]."""
        return torch.zeros_like(weights).index_add_(0, d, values.double())

    supervised = by_depth(chosen.trained)
    sums = {
        "loss": by_depth(cross_entropy * chosen.has_token),
        "supervised": supervised,
        "weighted": supervised * weights,
        "drafted": drafted.sum((0, 1)).double(),
        "hits": by_depth(hit),
        "acceptance": by_depth(acceptance),
        "terms": torch.stack(terms),
        "term_weights": term_weights,
        "term_shares": torch.stack([x * a for x, a in zip(term_weights, alphas, strict=True)]),
        "tau": (expected * live).sum(),
        "blocks": live.sum().double(),
        **chain_sums(hits.movedim(-1, 0), drafted.movedim(-1, 0)),
    }
    if forecasts is not None:
        sums |= _calibration_sums(forecasts.confidence.double(), acceptance, w)
    return sums


@torch.no_grad()
def kind_sums(figures: RowFigures, chosen: TrainedRows) -> Sums:
    """Return the sums "kind" and "kind_weight" of the R drafts that count."""
    weight = chosen.weight * chosen.has_token  # [R]
    return {"kind": (weight * figures.loss.double()).sum(), "kind_weight": weight.sum()}


def _calibration_sums(confidence: Tensor, acceptance: Tensor, weights: Tensor) -> Sums:
    """Return the sums "confidence_*" of drafts with these figures, float64 [R] each."""
    place = (confidence * BINS).long().clamp(max=BINS - 1)  # [R]
    zero = torch.zeros(BINS, dtype=torch.float64, device=confidence.device)
    return {
        "confidence_number": zero.index_add(0, place, weights),
        "confidence_sum": zero.index_add(0, place, weights * confidence),
        "confidence_accepted": zero.index_add(0, place, weights * acceptance),
        "confidence_gap": (weights * (confidence - acceptance).abs()).sum(),
    }


def summarise_blocks(sums: Sums) -> dict[str, float | None]:
    """Turn added sums into metrics: those of `metrics.summarise`, and the following.

    "loss" is the whole loss; "cross_entropy", "l1" and "confidence_bce" are its terms, unweighted.
    With another loss than ce+l1, "distribution_loss" replaces the first two in it, and they are
    only measured.
    "tau" is the expected number of tokens per round if drafts are sampled.
    "confidence_calibration" is the expected calibration error over ten bins: |mean confidence -
    mean acceptance|, weighted by the bin's sum of weights. "confidence_error" is the mean
    |confidence - acceptance|, "confidence_bias" the mean difference. The means of these three have
    the weights of the loss, exp(-d / gamma), so that the figure is what the loss minimises.
    """
    out = summarise_chains(sums)
    values = {name: value.double().cpu() for name, value in sums.items()}
    weight = values["term_weights"]
    means = torch.where(weight > 0, values["terms"] / weight.clamp_min(1e-30), 0.0)
    alphas = torch.where(weight > 0, values["term_shares"] / weight.clamp_min(1e-30), 0.0)
    out["loss"] = float((alphas * means).sum())
    if "kind" in values:
        weighed = float(values["kind_weight"])
        mean = float(values["kind"]) / weighed if weighed else 0.0
        out["distribution_loss"] = mean if weighed else None
        out["loss"] = float((alphas * means).sum()) + mean
    for name, mean, some in zip(TERMS, means.tolist(), weight.tolist(), strict=True):
        out[name] = mean if some else None
    blocks = float(values["blocks"])
    out["tau"] = float(values["tau"]) / blocks if blocks else None
    if "confidence_gap" in values:
        number = values["confidence_number"]
        total_weight = float(number.sum())
        gap = values["confidence_sum"] - values["confidence_accepted"]
        for name, total in (
            ("confidence_calibration", gap.abs().sum()),
            ("confidence_error", values["confidence_gap"]),
            ("confidence_bias", gap.sum()),
        ):
            out[name] = float(total) / total_weight if total_weight else None
    return out
