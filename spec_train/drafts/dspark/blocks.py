"""Which blocks a batch trains, which of their drafts count, and the blocks' states.

A block starts at an anchor a: its token x_a is known, the target's states are known strictly before
a. Draft d of the block (d = 0..D-1) is for x_{a+1+d}, its previous token is x_{a+d}, and its
teacher is what the target says at position a+d. Serving starts blocks where x_a and x_{a+1} are
both in the response and something stands before a: the slots t = a - 1 of EAGLE drafts.

B rows, T tokens, N blocks of a row, S slots of a block, D drafts of a block, H hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, shift_left
from spec_train.attention.block_runs import block_attending
from spec_train.drafts.dspark.model import Context, DSparkModel
from spec_train.drafts.slots import document_lengths, document_offsets


@dataclass(frozen=True)
class Blocks:
    """Anchors of every row, int64 [B, N]; `kept` bool [B, N] is False where a row has fewer."""

    anchors: Tensor
    kept: Tensor

    def places(self, depth: int) -> Tensor:
        """Slots of the row that previous tokens and teachers are read at, a+d: [B, N, depth]."""
        return self.anchors[..., None] + torch.arange(depth, device=self.anchors.device)


def anchor_candidates(loss_mask: Tensor, document_ids: Tensor) -> Tensor:
    """Slots that can be anchors, bool [B, T]: they and their next are supervised, one is before."""
    mask = loss_mask.bool() & (document_ids != PADDING)
    return mask & shift_left(mask, document_ids) & (document_offsets(document_ids) > 0)


def sample_blocks(loss_mask: Tensor, document_ids: Tensor, limit: int) -> Blocks:
    """Draw up to `limit` anchors of every row without replacement, ascending.

    There are as many blocks as the row with most of them needs, so that rows with little to learn
    cost little. The draw uses one number of torch's default CPU generator per row: it depends on
    neither the device, nor the padding, nor the rows beside it.
    """
    rows = []
    for candidates in anchor_candidates(loss_mask, document_ids).cpu():
        places = candidates.nonzero().squeeze(1)
        seed = int(torch.randint(1 << 62, ()))
        if len(places) > limit:
            order = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))
            places = places[order[:limit]].sort().values
        rows.append(places)
    counts = torch.tensor([len(row) for row in rows])
    kept = torch.arange(int(counts.max())) < counts[:, None]
    anchors = torch.zeros(kept.shape, dtype=torch.long)
    anchors[kept] = torch.cat(rows)
    return Blocks(anchors.to(loss_mask.device), kept.to(loss_mask.device))


def drafted_mask(loss_mask: Tensor, document_ids: Tensor, depth: int) -> Tensor:
    """Whether draft d of a block that starts at a slot counts, bool [B, T, depth].

    While in the document, supervised and contiguous: draft d counts only if all before it do.
    """
    alive = loss_mask.bool() & (document_ids != PADDING)
    alive = shift_left(alive, document_ids)
    parts = [alive]
    for _ in range(depth - 1):
        parts.append(alive & shift_left(parts[-1], document_ids))
    return torch.stack(parts, dim=-1)


def expected_weights(
    loss_mask: Tensor, document_ids: Tensor, inside: Tensor, weights: Tensor, limit: int
) -> Tensor:
    """Sum of the weights of all drafts of a batch, float64 [], on average over the draw of blocks.

    Exact where no row has more than `limit` candidates.

    Args:
        inside: slots whose teacher (or label) can be learned, bool [B, T]: read at a+d.
        weights: of draft d, float64 [D].
    """
    candidates = anchor_candidates(loss_mask, document_ids)
    counted = drafted_mask(loss_mask, document_ids, len(weights))
    total = weights.new_zeros(len(candidates))
    for d, weight in enumerate(weights):
        # draft d of the block at a reads slot a+d, which is inside the document where it counts
        at = torch.zeros_like(inside)
        at[:, : inside.shape[1] - d] = inside[:, d:]
        total += weight * (candidates & counted[..., d] & at).sum(1)
    count = candidates.sum(1).double()
    return (total * (count.clamp(max=limit) / count.clamp(min=1))).sum()


def batch_context(
    draft: DSparkModel, aux: Tensor, document_ids: Tensor, position_ids: Tensor
) -> Context:
    """Context keys and values of all tokens of a batch; aux [B, T, n*H]."""
    lengths = None if draft.rotary.limit is None else document_lengths(document_ids)
    return draft.context(aux, position_ids, lengths)


def block_states(
    draft: DSparkModel,
    context: Context,
    input_ids: Tensor,
    document_ids: Tensor,
    position_ids: Tensor,
    blocks: Blocks,
) -> Tensor:
    """States y [B, N, D, H] that make the drafts of blocks, for ids of the token frame [B, T]."""
    config = draft.config
    anchors, size = blocks.anchors, config.block_size
    shape = *anchors.shape, size
    ids = torch.full(shape, config.mask_token_id, device=anchors.device)
    ids[..., 0] = input_ids.gather(1, anchors)
    steps = torch.arange(size, device=anchors.device)
    positions = position_ids.gather(1, anchors)[..., None] + steps
    lengths = None
    if draft.rotary.limit is not None:
        lengths = document_lengths(document_ids).gather(1, anchors)[..., None].expand(shape)
        lengths = lengths.flatten(1)
    attending = block_attending(
        document_ids, anchors, blocks.kept, size, config.head_dim, draft.attention_backend
    )
    states = draft.forward_blocks(ids.flatten(1), positions.flatten(1), context, attending, lengths)
    return states.unflatten(1, (anchors.shape[1], size))[:, :, config.first :]
