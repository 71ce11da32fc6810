"""When the figures of training and those of serving part: the draft would disappoint as served."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np

PARTED = 0.15
"""Part of the drafted tokens that training counts and serving does not."""
LEAST = 0.1
"""Tokens per verification; less is no loss, however short the chains are."""
ENOUGH = 200
"""Verification steps; with fewer, the length of serving is known too badly."""


def uncut_length(accept_rate: Sequence[float | None]) -> float:
    """Return the acceptance length of chains that no end of an answer cuts, from rates by depth.

    It is counted like the product-limit length of training. The acceptance length of
    simulated decoding is smaller where answers are short: their ends cut steps.
    """
    rates = list(takewhile(lambda rate: rate is not None, accept_rate))
    return 1.0 + float(np.cumprod(np.array(rates, dtype=float)).sum())


def train_serve_gap(forced: Mapping[str, Any], served: float | None, rounds: int) -> str | None:
    """Return a warning if the length of training is clearly above that of serving; else None.

    Args:
        forced: figures of training, with "product_limit_length".
        served: `uncut_length` of simulated decoding on the same documents, over so many `rounds`.
    """
    length = forced.get("product_limit_length")
    if length is None or served is None or rounds < ENOUGH:
        return None
    if length - served <= max(PARTED * (length - 1), LEAST):
        return None
    return (
        f"training counts {length:.2f} tokens per verification, serving-like decoding {served:.2f} "
        "(both without the ends of answers): the draft does worse on its own tokens and states "
        "than on those of the documents. For EAGLE drafts more depths in training help "
        "(--ttt-steps); for all, texts that the target wrote itself (`spec-data regenerate`)"
    )
