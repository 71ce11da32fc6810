"""Which drafts of a batch's blocks count, with what weight they are trained, on which teacher.

In: a `BlockFrame`. Out: `TrainedRows`, index tables into the blocks and the teachers. Draft d of
the block at anchor a reads its teacher, and its previous token, at slot a + d. A draft that counts
is trained if the target's choice is in the draft vocabulary.

B packs, T tokens of a pack, N blocks of a pack, D drafts of a block, R drafts that count.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.drafts.dspark.block_frame import BlockFrame
from spec_train.drafts.dspark.blocks import Blocks, drafted_mask
from spec_train.drafts.dspark.model import DSparkModel


def draft_weights(draft: DSparkModel) -> Tensor:
    """Return the weights of the drafts of a block, float64 [D].

    They are exp(-d / gamma), 1 for gamma 0, or the options' `position_weights`.
    """
    gamma, depth = draft.options.loss_decay_gamma, draft.config.depth
    steps = torch.arange(depth, dtype=torch.float64, device=draft.fc.weight.device)
    given = draft.options.weights_of(depth)
    if given is not None:
        return torch.tensor(given, dtype=torch.float64, device=steps.device)
    return torch.exp(-steps / gamma) if gamma else torch.ones_like(steps)


def learnable(
    draft: DSparkModel, target_argmax: Tensor, following: Tensor
) -> tuple[Tensor, Tensor]:
    """Return where the first term and where the others can be learned, bool [B, T] each.

    Args:
        draft: decides the draft vocabulary, and what the first term of the loss compares with.
        target_argmax: the target's choice after every token, int64 [B, T].
        following: the document's token after every token, int64 [B, T].
    """
    inside = draft.draft_index[target_argmax] >= 0
    if draft.options.compared_with != "tokens":
        return inside, inside
    return inside & (draft.draft_index[following] >= 0), inside


@dataclass(frozen=True)
class TrainedRows:
    """The R drafts of a batch that count, sorted by their teacher's slot."""

    drafted: Tensor  # bool [B, N, D]: the draft counts
    trained: Tensor  # bool [R]: the target's choice is in the draft vocabulary
    rows: Tensor  # flat index in [B, N, D], int64 [R]
    slot: Tensor  # flat slot of the teacher, ascending, int64 [R]; overlapping blocks share slots
    weight: Tensor  # exp(-d / gamma), float64 [R]; 0 for drafts that are not trained
    choice: Tensor  # the target's choice as a draft index, -1 outside, int64 [R]
    has_token: Tensor  # bool [R]: the first term of the loss counts
    token: Tensor  # the document's token as a draft index, int64 [R]; 0 where it is outside
    previous: Tensor  # the token before every draft, int64 [B, N, D]

    @classmethod
    def select(cls, draft: DSparkModel, frame: BlockFrame) -> "TrainedRows":
        """Select the drafts of a frame that count."""
        blocks, documents = frame.blocks, frame.document_ids
        depth, length = draft.config.depth, frame.input_ids.shape[1]
        drafted = _at(drafted_mask(frame.loss_mask, documents, depth), blocks)  # [B, N, D]
        drafted = drafted & blocks.kept[..., None]
        # A slot beyond the pack belongs to a draft that does not count: any slot will do for it.
        places = blocks.places(depth).clamp_max(length - 1)  # [B, N, D], slots a + d
        following = shift_left(frame.input_ids, documents)  # [B, T]
        with_token, inside = learnable(draft, frame.target_argmax, following)
        first = length * torch.arange(
            len(places), device=places.device
        )  # [B]: flat start of a pack
        rows = drafted.flatten().nonzero().squeeze(1)  # [R], in block order
        slot, order = (places + first[:, None, None]).flatten()[rows].sort(stable=True)  # [R] each
        rows = rows[order]
        trained = inside.flatten()[slot]  # [R]
        return cls(
            drafted=drafted,
            trained=trained,
            rows=rows,
            slot=slot,
            weight=draft_weights(draft).to(rows.device)[rows % depth] * trained,
            choice=draft.draft_index[frame.target_argmax.flatten()[slot]],
            has_token=with_token.flatten()[slot],
            token=draft.draft_index[following.flatten()[slot]].clamp_min(0),
            previous=_gather(frame.input_ids, places),
        )

    def token_before(self, slots: Tensor) -> Tensor:
        """Return the token before the drafts of flat slots, int64 [M]; each is a slot of a row."""
        first = torch.searchsorted(self.slot, slots)  # a row of every slot
        return self.previous.flatten()[self.rows[first]]

    def totals(self) -> Tensor:
        """Return the summed weights of the first term and of the other terms, float64 [2]."""
        return torch.stack([(self.weight * self.has_token).sum(), self.weight.sum()])


def _at(x: Tensor, blocks: Blocks) -> Tensor:
    """Return the entries [B, N, D] of `x` [B, T, D] at the anchors."""
    return x.gather(1, blocks.anchors[..., None].expand(-1, -1, x.shape[-1]))


def _gather(x: Tensor, places: Tensor) -> Tensor:
    """Return the entries [B, N, D] of `x` [B, T] at the slots `places`, int64 [B, N, D]."""
    return x.gather(1, places.flatten(1)).view_as(places)
