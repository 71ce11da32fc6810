"""What the loss of block drafts reads: a batch in the token frame, its blocks, and one teacher.

In: the plain tensors that `dspark_loss` accepts, or a `DraftBatch`. Out: a `BlockFrame`, which has
every default filled in.

B packs, T tokens of a pack, n captured layers, N blocks of a pack, H hidden size, V / Vd target /
draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import PADDING
from spec_train.data.batch import DraftBatch
from spec_train.drafts.dspark.blocks import Blocks
from spec_train.drafts.dspark.model import DSparkModel
from spec_train.drafts.frames import TokenInputs
from spec_train.drafts.layers import argmax_by_chunks
from spec_train.drafts.teacher import (
    Teacher,
    head_teacher,
    logits_teacher,
    proposed_ids,
    teacher_of,
)
from spec_train.head import TargetHead


@dataclass(frozen=True, kw_only=True)
class BlockInputs(TokenInputs):
    """Plain tensors of the block loss, in the token frame; the teacher is one of the last two."""

    aux_hidden_states: Tensor  # a_t, layers ascending, [B, T, n*H]
    anchors: Tensor  # slots that blocks start at, int64 [B, N]
    kept: Tensor | None = None  # bool [B, N], False: not a real block; None: all are real
    final_hidden: Tensor | None = None  # f_t [B, T, H]
    logits: Tensor | None = None  # z_t [B, T, V]


@dataclass(frozen=True, kw_only=True)
class BlockFrame:
    """A batch in the token frame with its blocks, defaults filled in."""

    aux: Tensor  # a_t [B, T, n*H]
    input_ids: Tensor  # x_t, int64 [B, T]
    loss_mask: Tensor  # m_t [B, T]
    target_argmax: Tensor  # argmax of z_t, int64 [B, T]
    document_ids: Tensor  # int64 [B, T], -1 in padding
    position_ids: Tensor  # int64 [B, T]
    blocks: Blocks
    teacher: Teacher  # of flat slots b * T + t


def tensor_block_frame(draft: DSparkModel, inputs: BlockInputs, head: TargetHead) -> BlockFrame:
    """Return the frame of plain tensors; `head` is the target's.

    Raises:
        DraftError: not exactly one teacher, or anchors outside the pack.
    """
    final_hidden, logits, anchors = inputs.final_hidden, inputs.logits, inputs.anchors
    length = inputs.input_ids.shape[1]
    if (final_hidden is None) == (logits is None):
        raise DraftError("give exactly one of final_hidden and logits")
    if anchors.numel() and not 0 <= int(anchors.min()) <= int(anchors.max()) < length:
        raise DraftError(
            f"anchors: expected slots in 0..{length - 1}, found {int(anchors.min())} to "
            f"{int(anchors.max())}"
        )
    document_ids, position_ids = inputs.documents()
    kept = torch.ones_like(anchors, dtype=torch.bool) if inputs.kept is None else inputs.kept.bool()
    kept = kept & (document_ids.gather(1, anchors) != PADDING)  # [B, N]
    choice, ids = inputs.target_argmax, proposed_ids(draft)
    if logits is not None:
        choice = logits.argmax(-1) if choice is None else choice
        teacher = logits_teacher(logits.flatten(0, 1), ids)
    else:
        assert final_hidden is not None  # there is exactly one teacher
        choice = argmax_by_chunks(head.logits, final_hidden) if choice is None else choice
        logsumexp = inputs.target_logsumexp
        sums = None if logsumexp is None else logsumexp.flatten()  # [B*T]
        teacher = head_teacher(head, final_hidden.flatten(0, 1), ids, sums)
    return BlockFrame(
        aux=inputs.aux_hidden_states,
        input_ids=inputs.input_ids,
        loss_mask=inputs.loss_mask,
        target_argmax=choice,
        document_ids=document_ids,
        position_ids=position_ids,
        blocks=Blocks(anchors, kept),
        teacher=teacher,
    )


def batch_block_frame(
    draft: DSparkModel, batch: DraftBatch, head: TargetHead, blocks: Blocks
) -> BlockFrame:
    """Return the frame of a batch with given blocks."""
    return BlockFrame(
        aux=batch.aux(draft.config.layers),
        input_ids=batch.input_ids,
        loss_mask=batch.loss_mask,
        target_argmax=batch.target_argmax,
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        blocks=blocks,
        teacher=teacher_of(draft, batch, head, shift=0),
    )
