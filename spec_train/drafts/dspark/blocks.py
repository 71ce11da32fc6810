"""Which blocks a batch trains, which of their drafts count, and the blocks' states.

In: masks and ids in the token frame. Out: `Blocks`, masks over their drafts, and states.

A block starts at an anchor a: its token x_a is known, and the target's states are known strictly
before a. Draft d of the block (d = 0..D-1) is for x_{a+1+d}. Its previous token is x_{a+d}, and its
teacher is the target's distribution at position a+d. Serving starts blocks where x_a and x_{a+1}
are both in the response and a is not the first token: these are the slots t = a - 1 of EAGLE
drafts.

B packs, T tokens of a pack, N blocks of a pack, S slots of a block, D drafts of a block, n captured
layers, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.masked import Attending
from spec_train.attention.masks import BlockWindow, block_mask
from spec_train.drafts.dspark.model import Context, DSparkModel
from spec_train.drafts.slots import document_offsets, rope_lengths


@dataclass(frozen=True)
class Blocks:
    """The blocks of every pack."""

    anchors: Tensor  # int64 [B, N]
    kept: Tensor  # bool [B, N]: False where a pack has fewer blocks

    def places(self, depth: int) -> Tensor:
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
        places = candidates.nonzero().squeeze(1)  # [candidates of the pack]
        seed = int(torch.randint(1 << 62, ()))
        if len(places) > limit:
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
            places = places[order[:limit]].sort().values
        rows.append(places)
    counts = torch.tensor([len(row) for row in rows])  # [B]
    kept = torch.arange(int(counts.max())) < counts[:, None]  # [B, N]
    anchors = torch.zeros(kept.shape, dtype=torch.long)  # [B, N]
    anchors[kept] = torch.cat(rows)
    device = loss_mask.device
    return Blocks(anchors.to(device, non_blocking=True), kept.to(device, non_blocking=True))


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
    loss_mask: Tensor, document_ids: Tensor, inside: Tensor, weights: Tensor, limit: int
) -> Tensor:
    """Return the summed weights of all drafts of a batch, float64 []: the mean over the draw.

    Exact if no pack has more than `limit` candidates.

    Args:
        loss_mask: [B, T], in the token frame.
        document_ids: int64 [B, T].
        inside: slots whose teacher (or label) can be learned, bool [B, T]; read at a+d.
        weights: of draft d, float64 [D].
        limit: most blocks of a pack.
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


def batch_context(
    draft: DSparkModel, aux: Tensor, document_ids: Tensor, position_ids: Tensor
) -> Context:
    """Return the context, keys and values of every layer, of all tokens of a batch.

    Args:
        draft: the model.
        aux: aux states [B, T, n*H].
        document_ids: int64 [B, T].
        position_ids: int64 [B, T].
    """
    return draft.context(aux, position_ids, rope_lengths(draft.rotary, document_ids))


def block_states(
    draft: DSparkModel,
    context: Context,
    input_ids: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    blocks: Blocks,
) -> Tensor:
    """Return the states y [B, N, D, H] that make the drafts of blocks.

    Args:
        draft: the model.
        context: of `batch_context`.
        input_ids: in the token frame, int64 [B, T].
        document_ids: int64 [B, T].
        position_ids: int64 [B, T].
        blocks: N blocks of every pack.
    """
    config = draft.config
    anchors, size = blocks.anchors, config.block_size
    shape = *anchors.shape, size  # [B, N, S]
    ids = torch.full(shape, config.mask_token_id, device=anchors.device)  # [B, N, S]
    ids[..., 0] = input_ids.gather(1, anchors)
    steps = torch.arange(size, device=anchors.device)  # [S]
    positions = position_ids.gather(1, anchors)[..., None] + steps  # [B, N, S]
    lengths = rope_lengths(draft.rotary, document_ids, anchors)  # [B, N]
    if lengths is not None:
        lengths = lengths.repeat_interleave(size, dim=1)  # [B, N*S]

    def attending(window: BlockWindow | None) -> Attending:
        mask = block_mask(document_ids, anchors, blocks.kept, size, window)
        return Attending.prepare(mask, config.head_dim, draft.attention_backend)

    attends = draft.per_layer(attending)
    states = draft.forward_blocks(ids.flatten(1), positions.flatten(1), context, attends, lengths)
    # states: [B, N*S, H]; the slots from `first` on make the D drafts.
    return states.unflatten(1, (anchors.shape[1], size))[:, :, config.first :]
