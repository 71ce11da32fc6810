"""How many tokens a forward of the target takes: as many as are safe, and fewer out of memory.

Before the first shard, the longest documents are captured in growing batches, so that a run that
does not fit stops at once. Later another program may take memory: forwards are halved then.
"""

import logging
import math
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np

from spec_data.capture.backend import ForwardBatch, TargetBackend
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.generation.capture import forward_batches, forward_columns
from spec_data.generation.plan import BATCH_TOKENS, Plan
from spec_data.models.devices import SMALLER_PIECES, is_memory_error, memory_error_text
from spec_data.shards.errors import RunError
from spec_data.shards.schema import Column

logger = logging.getLogger(__name__)
T = TypeVar("T")

SAFE = 0.85
"""Largest share of a device's memory that a forward may take: batches differ in shape."""
_MOST = 131_072  # tokens per forward
_STEPS = 6  # of the search for the longest document that fits


def choose_batch_tokens(
    target: TargetBackend, plan: Plan, form: str, columns: tuple[Column, ...], asked: int | None
) -> int:
    """Return the tokens per forward: those of --batch-tokens (`asked`), or as many as are safe.

    Raises:
        RunError: the longest document, or `asked` tokens, do not fit; it says what does.
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
        if peak > (SAFE if size != asked else 1):
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
            "tokens, and one forward of it takes too much. "
            f"{length_that_fits(target, plan, columns)}. Or spread the target over several GPUs "
            "(--device-map auto, or --tp-plan auto under torchrun), or split the document over "
            "them (--context-parallel N)"
        )
    logger.info(
        "batch: %s tokens per forward, with %.0f %% of the device's memory at the peak",
        *(f"{best:,}", 100 * share),
    )
    return best


def in_memory(
    run: Callable[[int], T],
    target: TargetBackend,
    plan: Plan,
    form: str,
    columns: tuple[Column, ...],
    batch_tokens: int,
) -> tuple[T, int]:
    """Return what `run` does with so many tokens per forward, or fewer out of memory; and how many.

    Raises:
        RunError: one row does not fit.
    """
    while True:
        try:
            return run(batch_tokens), batch_tokens
        except RuntimeError as error:
            if not is_memory_error(error):
                raise
            problem = memory_error_text(error)
        # outside the handler, which keeps the tensors of the forward
        batch_tokens = fewer_tokens(target, plan, form, columns, batch_tokens, problem)


def fewer_tokens(
    target: TargetBackend,
    plan: Plan,
    form: str,
    columns: tuple[Column, ...],
    before: int,
    problem: str,
) -> int:
    """Return half as many tokens per forward as `before`, which were too many; warn.

    `problem` is what PyTorch said. Forwards have one row at least: a pack, or a longer document.

    Raises:
        RunError: one row does not fit; it says which length does.
    """
    target.peak_memory(lambda: None)  # frees what the allocator keeps
    row = _longest_row(plan, form)
    if form == SINGLE or before <= row:
        raise RunError(
            f"{problem} with one row of {row:,} tokens per forward. "
            f"{length_that_fits(target, plan, columns)}. Finished shards are kept: run the same "
            "command again where more memory is free, or with the target on several GPUs "
            "(--device-map auto). Another --max-length is another dataset, with another --out. "
            f"{SMALLER_PIECES} in the environment helps where free memory lies in pieces"
        )
    size = max(row, before // 2)
    logger.warning(
        "warning[memory]: %s: forwards have %s tokens from now on, not %s. Finished shards stay",
        *(problem, f"{size:,}", f"{before:,}"),
    )
    return size


def _longest_row(plan: Plan, form: str) -> int:
    longest = int(plan.lengths.max())
    return longest if form in (ROWS, SINGLE, REQUESTS) else max(plan.pack_length, longest)


def length_that_fits(target: TargetBackend, plan: Plan, columns: tuple[Column, ...]) -> str:
    """Say which beginning of the longest document fits in memory, alone in a forward."""
    longest = int(plan.lengths.max())
    document = np.array([int(plan.lengths.argmax())])
    fits, too_long = 0, longest + 1
    for middle in (longest, *[None] * _STEPS):
        middle = middle or (fits + too_long) // 2
        if middle <= fits:
            break
        batch = largest_batch(plan, SINGLE, middle, document)
        if _peak(target, batch, SINGLE, columns) <= SAFE:
            fits = middle
        else:
            too_long = middle
    if not fits:
        return f"Measured: not even its first {too_long:,} tokens fit"
    if fits == longest:
        return f"Measured: documents of {fits:,} tokens fit, one by one"
    return (
        f"Measured: documents of {fits:,} tokens fit, those of {too_long:,} do not: lower "
        f"--max-length to {fits}"
    )


def _sizes(plan: Plan, form: str, asked: int | None) -> Iterator[int]:
    """Yield the batch sizes to try, ascending: from one row on, up to `asked` if it is given."""
    size = _longest_row(plan, form)
    most = asked or _MOST
    while size < most:
        yield size
        if asked is None and size >= plan.tokens:
            return
        size *= 2
    yield most if asked else size


def largest_batch(
    plan: Plan, form: str, size: int, documents: np.ndarray | None = None
) -> ForwardBatch:
    """Return the forward with the most slots that `size` tokens allow.

    It is of the longest documents, or of the first `size` tokens of `documents`.
    """
    limit = None if documents is None else size
    if documents is None:
        order = np.argsort(-plan.lengths, kind="stable")
        documents = order[: int(np.searchsorted(np.cumsum(plan.lengths[order]), size)) + 1]
    offsets, tokens = plan.documents.beginnings(documents.tolist(), limit)
    given = (form, plan.pack_length, size, plan.documents.images_of(documents.tolist()))
    batches = forward_batches(offsets, tokens["input_ids"], *given)
    return max(batches, key=lambda batch: batch.input_ids.numel())


def _peak(
    target: TargetBackend, batch: ForwardBatch, form: str, columns: tuple[Column, ...]
) -> float:
    """Return the share of memory that a batch takes: infinite if it does not fit.

    0: it fits, and nobody measures how well.
    """
    following = np.zeros(batch.tokens, np.int64)  # the most: every token has a supervised next one

    def run() -> None:
        waiting = []  # what a forward returned is copied to the host while the next one runs
        for _ in range(2):
            values, _ = forward_columns(target, batch, form, columns, following)
            waiting.append(values)
            for value in values.values():
                if value.is_floating_point():
                    value.float().abs()  # what encoding a column takes: two copies in float32

    try:
        if (share := target.peak_memory(run)) is not None:
            return share
        run()
    except RuntimeError as error:
        if not is_memory_error(error):
            raise
        return math.inf
    return 0.0
