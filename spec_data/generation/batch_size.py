"""How many tokens a forward of the target takes: the largest number that is safe on the device.

Where a backend can measure its memory, the longest documents of the plan are captured in growing
batches before the first shard. So a run that does not fit stops at once.
"""

import logging
from collections.abc import Iterator

import numpy as np
import torch

from spec_data.capture.backend import ForwardBatch, TargetBackend
from spec_data.capture.mask_forms import ROWS, SINGLE
from spec_data.generation.capture import forward_batches, forward_columns
from spec_data.generation.plan import BATCH_TOKENS, Plan
from spec_data.shards.errors import RunError
from spec_data.shards.schema import Column

logger = logging.getLogger(__name__)

SAFE = 0.85
"""Largest share of a device's memory that a forward may take: batches differ in shape."""
_MOST = 131_072


def choose_batch_tokens(
    target: TargetBackend,
    plan: Plan,
    form: str,
    columns: tuple[Column, ...],
    asked: int | None,
) -> int:
    """Return the tokens per forward: those of --batch-tokens, or as many as are safe.

    Args:
        target: the loaded target.
        plan: its longest documents are captured.
        form: the proven mask form.
        columns: the columns of a shard.
        asked: of --batch-tokens; None for auto.

    Raises:
        RunError: the longest document, or `asked` tokens, do not fit.
    """
    idle = target.peak_memory(lambda: None)
    if idle is None:  # nothing can be measured
        return asked or BATCH_TOKENS
    best, share = 0, idle
    for size in _sizes(plan, form, asked):
        # Memory grows with the tokens at most linearly beyond the weights.
        if best and idle + (share - idle) * size / best > SAFE and size != asked:
            break
        peak = _peak(target, largest_batch(plan, form, size), form, columns)
        if peak is None or (peak > SAFE and size != asked):
            break
        best, share = size, peak
    if best == asked:
        return best
    if asked is not None:
        advice = f"the largest safe size here is {best}" if best else "use --batch-tokens auto"
        raise RunError(f"--batch-tokens {asked}: out of memory on {target.device}; {advice}")
    if not best:
        raise RunError(
            f"out of memory on {target.device}: the longest document has {plan.lengths.max():,} "
            "tokens, and one forward of it takes too much. Lower --max-length, or spread the "
            "target over several GPUs (--device-map auto, or --tp-plan auto under torchrun); a "
            "document is never split over GPUs by its tokens"
        )
    logger.info(
        "batch: %s tokens per forward, with %.0f %% of the device's memory at the peak",
        *(f"{best:,}", 100 * share),
    )
    return best


def _sizes(plan: Plan, form: str, asked: int | None) -> Iterator[int]:
    """Yield the batch sizes to try, ascending: from one row on, up to `asked` if it is given."""
    longest = int(plan.lengths.max())
    size = longest if form in (ROWS, SINGLE) else max(plan.pack_length, longest)
    most = asked or _MOST
    while size < most:
        yield size
        if asked is None and size >= plan.tokens:
            return
        size *= 2
    yield most if asked else size


def largest_batch(plan: Plan, form: str, size: int) -> ForwardBatch:
    """Return the forward of the longest documents with the most slots that `size` tokens allow."""
    order = np.argsort(-plan.lengths, kind="stable")
    count = int(np.searchsorted(np.cumsum(plan.lengths[order]), size)) + 1
    offsets, tokens = plan.documents.beginnings(order[:count].tolist())
    batches = forward_batches(offsets, tokens["input_ids"], form, plan.pack_length, size)
    return max(batches, key=lambda batch: batch.input_ids.numel())


def _peak(
    target: TargetBackend, batch: ForwardBatch, form: str, columns: tuple[Column, ...]
) -> float | None:
    """Return the share of memory that a batch takes; None if it does not fit."""
    following = np.zeros(batch.tokens, np.int64)  # the most: every token has a supervised next one

    def run() -> None:
        values, _ = forward_columns(target, batch, form, columns, following)
        for value in values.values():
            if value.is_floating_point():
                _ = value.float().abs()  # what encoding a column takes: two copies in float32

    try:
        return target.peak_memory(run)
    except torch.OutOfMemoryError:
        return None
