"""Attention of a block draft, computed for runs of blocks. For back ends that build mask tables.

A pack has many documents and hundreds of draft blocks, but a block sees only the part of its
document before its anchor, and itself. A table over the whole pack is nearly all False and costs as
much as a full one. So neighbouring blocks of one document are computed together, as a run: over the
context up to the run's last anchor, and the run's own slots. The mask is that of `block_mask`.
flex_attention does not need this: it skips unseen parts itself.

B packs, T tokens of a pack, N blocks of a pack, S slots of a block, Q = N * S, h / g query /
key-value heads, d head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING
from spec_train.attention.masked import Attending, default_backend
from spec_train.attention.masks import BlockWindow, block_mask

RUN = 32  # blocks of a run at most; with 7 slots each, their own slots make a 224 x 224 table


@dataclass(frozen=True)
class Run:
    """Neighbouring blocks of one document, or blocks that are not kept, and what they can see."""

    slots: slice  # of the Q slots of the pack
    context: slice  # of the T tokens of the pack
    attending: Attending


class RunAttending:
    """Attention over context and blocks: equal to `Attending` of the whole pack's `block_mask`."""

    def __init__(self, packs: list[list[Run]]) -> None:
        """Take the runs of every pack; they cover its slots in order."""
        self._packs = packs

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Attend from queries [B, h, Q, d] to keys and values [B, g, T + Q, d]: [B, h, Q, d]."""
        length = k.shape[2] - q.shape[2]  # T
        # of the context [B, g, T, d] and of the blocks [B, g, Q, d]
        (k0, k1), (v0, v1) = (x.split([length, q.shape[2]], dim=2) for x in (k, v))
        heads = []
        for b, runs in enumerate(self._packs):
            one = slice(b, b + 1)
            parts = []
            for run in runs:
                # [1, g, tokens + slots, d]: context of the run, then its own slots
                keys, values = (
                    torch.cat([x0[one, :, run.context], x1[one, :, run.slots]], dim=2)
                    for x0, x1 in ((k0, k1), (v0, v1))
                )
                parts.append(run.attending(q[one, :, run.slots], keys, values, scale))
            heads.append(torch.cat(parts, dim=2))
        return torch.cat(heads)


def block_attending(
    document_ids: Tensor,
    anchors: Tensor,
    kept: Tensor,
    size: int,
    head_dim: int,
    backend: str,
    window: BlockWindow | None = None,
) -> Attending | RunAttending:
    """Prepare the `block_mask` of a batch for a back end.

    Args:
        document_ids, anchors, kept, size: as for `block_mask`. A block whose anchor is in padding
            may see only itself here, and not the padding before it.
        head_dim: d.
        backend: as for `Attending.prepare`.
        window: of the layer; None: no limit.
    """
    if backend == "auto":
        backend = default_backend(anchors.device.type, head_dim)
    if backend == "flex":
        mask = block_mask(document_ids, anchors, kept, size, window)
        return Attending.prepare(mask, head_dim, backend)
    # [B, N], the document of each block; PADDING for a block that is not kept
    owners = torch.where(kept, document_ids.gather(1, anchors), PADDING).tolist()
    documents = document_ids.tolist()
    packs = []
    for b, pack in enumerate(owners):
        runs, first = [], 0
        while first < len(pack):
            last = first + 1
            while last < min(len(pack), first + RUN) and pack[last] == pack[first]:
                last += 1
            # [1, n] of the n blocks of this run
            chosen, real = anchors[b : b + 1, first:last], kept[b : b + 1, first:last]
            # The context runs from the start of the document, or of the first block's window, to
            # the last anchor. No block sees the last anchor, but a table needs at least one
            # column. Blocks that are not kept get a context of one token, which they do not see.
            outside = pack[first] == PADDING
            start = 0 if outside else documents[b].index(pack[first])
            end = 1 if outside else int(chosen.max()) + 1
            if window is not None and not outside:
                start = max(start, int(chosen.min()) - window.size + 1)
            context = document_ids[b : b + 1, start:end]  # [1, tokens]
            # anchors [1, n] as indices into this context; clamped only where nothing of it is seen
            places = (chosen - start).clamp_max(end - start - 1)
            mask = block_mask(context, places, real, size, window)
            slots = slice(first * size, last * size)
            runs.append(Run(slots, slice(start, end), Attending.prepare(mask, head_dim, backend)))
            first = last
        packs.append(runs)
    return RunAttending(packs)
