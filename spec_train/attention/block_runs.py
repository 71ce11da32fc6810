"""Attention of blocks for back ends that make the table of who sees what: in runs of blocks.

A row packs many documents and hundreds of blocks, and a block sees little of that: the part of its
document before its anchor, and itself. One table over the whole row is nearly all False, and as
costly as if it were not. So blocks are taken in runs of neighbours of one document, each with the
context up to the last anchor of the run and the run's own slots. What is seen is `block_mask`'s, as
ever. flex_attention skips what nothing sees by itself.

B rows, T tokens, N blocks of a row, S slots of a block, Q = N * S, h / g query / key-value heads,
d head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING
from spec_train.attention.masked import Attending, default_backend
from spec_train.attention.masks import block_mask

RUN = 32  # blocks: their own slots are a table of 224 x 224 at seven slots each


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of one document (or ones that are not kept) and what they can see."""

    slots: slice  # of the row's Q
    context: slice  # of the row's T
    attending: Attending


class RunAttending:
    """An attention over context and blocks, like `Attending` of the whole row's `block_mask`."""

    def __init__(self, rows: list[list[Run]]) -> None:
        """Take the runs of every row, which cover its slots in order."""
        self._rows = rows

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Heads [B, h, Q, d] of queries [B, h, Q, d] over keys and values [B, g, T + Q, d]."""
        length = k.shape[2] - q.shape[2]
        (k0, k1), (v0, v1) = (x.split([length, q.shape[2]], dim=2) for x in (k, v))
        heads = []
        for b, runs in enumerate(self._rows):
            one = slice(b, b + 1)
            parts = []
            for run in runs:
                keys, values = (
                    torch.cat([x0[one, :, run.context], x1[one, :, run.slots]], dim=2)
                    for x0, x1 in ((k0, k1), (v0, v1))
                )
                parts.append(run.attending(q[one, :, run.slots], keys, values, scale))
            heads.append(torch.cat(parts, dim=2))
        return torch.cat(heads)


def block_attending(
    document_ids: Tensor, anchors: Tensor, kept: Tensor, size: int, head_dim: int, backend: str
) -> Attending | RunAttending:
    """Make `block_mask` of a batch ready for a back end; arguments as there, and `attend`'s.

    Blocks whose anchor is padding may see nothing but themselves.
    """
    if backend == "auto":
        backend = default_backend(anchors.device.type, head_dim)
    if backend == "flex":
        mask = block_mask(document_ids, anchors, kept, size)
        return Attending.prepare(mask, head_dim, backend)
    owners = torch.where(kept, document_ids.gather(1, anchors), PADDING).tolist()
    documents = document_ids.tolist()
    rows = []
    for b, row in enumerate(owners):
        runs, first = [], 0
        while first < len(row):
            last = first + 1
            while last < min(len(row), first + RUN) and row[last] == row[first]:
                last += 1
            chosen, real = anchors[b : b + 1, first:last], kept[b : b + 1, first:last]
            # From the start of the document to the last anchor, which nobody sees: a table must
            # have a column. Blocks that are not kept see nothing of it.
            outside = row[first] == PADDING
            start = 0 if outside else documents[b].index(row[first])
            end = 1 if outside else int(chosen.max()) + 1
            context = document_ids[b : b + 1, start:end]
            mask = block_mask(context, (chosen - start).clamp_max(end - start - 1), real, size)
            slots = slice(first * size, last * size)
            runs.append(Run(slots, slice(start, end), Attending.prepare(mask, head_dim, backend)))
            first = last
        rows.append(runs)
    return RunAttending(rows)
