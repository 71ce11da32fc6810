"""Intervals of acceptance lengths, and a paired comparison of two drafts, by resampling prompts.

An acceptance length is a ratio of sums: tokens over verifications. The rounds of one response are
not independent, so whole prompts are drawn, with replacement (the cluster bootstrap: Davison and
Hinkley, Bootstrap Methods and their Application, section 3.8). Two drafts are compared on the same
prompts. The p-value is that of a permutation test: were the drafts equal, each prompt's two results
could be exchanged (Good, Permutation Tests, chapter 3).

Shapes: N prompts, B resamples. Counts are int64 [N, 2]: verifications, and their tokens.
"""

from dataclasses import dataclass

import numpy as np

FEWEST = 8
"""Resamples of fewer prompts or documents differ too little: two of one length have no spread."""
RESAMPLES = 4000
FEWER = 1000
"""Resamples for each of many parts."""
LEVEL = 0.95
_CHUNK = 500  # resamples that are drawn at a time

Interval = tuple[float, float]


def length_interval(
    counts: np.ndarray, seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Return the interval of the acceptance length of `counts`.

    None: fewer than `FEWEST` prompts with a verification.
    """
    counts = counts[counts[:, 0] > 0]
    if len(counts) < FEWEST:
        return None
    return middle(_lengths(resampled(counts, seed, resamples)))


def ratio_interval(rows: np.ndarray, seed: int = 0) -> Interval | None:
    """Return the interval of a ratio of rates, (a/b) / (c/d), of sums of `rows` [N, 4].

    None: there are fewer than `FEWEST` rows.
    """
    if len(rows) < FEWEST:
        return None
    sums = resampled(rows, seed)
    return middle(sums[:, 0] / sums[:, 1] * sums[:, 3] / sums[:, 2])


def resampled(counts: np.ndarray, seed: int = 0, resamples: int = RESAMPLES) -> np.ndarray:
    """Return the sums of B resamples of N rows of counts, float64 [B, C] of [N, C]."""
    generator, rows = np.random.default_rng(seed), counts.astype(np.float64)
    even = np.full(len(rows), 1 / len(rows))
    draws = (generator.multinomial(len(rows), even, _CHUNK) for _ in range(resamples // _CHUNK))
    return np.concatenate([weights @ rows for weights in draws])


@dataclass(frozen=True)
class Comparison:
    """Two drafts on the same prompts: `difference` is the acceptance length of B minus that of A.

    `p_value` is the probability of a difference at least as large, of either sign, between equal
    drafts.
    """

    prompts: int
    lengths: tuple[float, float]
    intervals: tuple[Interval, Interval]
    difference: float
    interval: Interval
    p_value: float


def compare(a: np.ndarray, b: np.ndarray, seed: int = 0) -> Comparison:
    """Compare two drafts by their counts on the same N prompts, in the same order.

    Raises:
        ValueError: the shapes differ, or fewer than two prompts have a verification in both.
    """
    if a.shape != b.shape:
        raise ValueError(f"{len(a)} and {len(b)} prompts: the counts must be of the same ones")
    both = (a[:, 0] > 0) & (b[:, 0] > 0)
    a, b = a[both], b[both]
    if len(a) < 2:
        raise ValueError(f"{len(a)} prompts have a verification with both drafts; at least 2")
    drawn = resampled(np.hstack([a, b]), seed)
    drawn_a, drawn_b = _lengths(drawn[:, :2]), _lengths(drawn[:, 2:])
    return Comparison(
        prompts=len(a),
        lengths=(_length(a), _length(b)),
        intervals=(middle(drawn_a), middle(drawn_b)),
        difference=_length(b) - _length(a),
        interval=middle(drawn_b - drawn_a),
        p_value=_exchanged(a, b, seed),
    )


def _exchanged(a: np.ndarray, b: np.ndarray, seed: int) -> float:
    """Return the share of exchanges, and the one observed, that differ at least as much."""
    observed = abs(_length(b) - _length(a))
    generator = np.random.default_rng(seed)
    total, change = a.sum(0), b - a  # [2], [N, 2]
    rest = total + b.sum(0)
    extreme, done = 1, 1
    for start in range(0, RESAMPLES, _CHUNK):
        size = min(_CHUNK, RESAMPLES - start)
        swapped = total + generator.integers(0, 2, (size, len(a))) @ change  # [size, 2]
        others = rest - swapped
        gaps = np.abs(_lengths(others) - _lengths(swapped))
        extreme += int((gaps >= observed - 1e-12).sum())
        done += size
    return extreme / done


def _length(counts: np.ndarray) -> float:
    return float(counts[:, 1].sum() / counts[:, 0].sum())


def _lengths(sums: np.ndarray) -> np.ndarray:
    return sums[:, 1] / sums[:, 0]


def middle(values: np.ndarray) -> Interval:
    """Return the ends of the middle LEVEL of the values of resamples."""
    low, high = np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
