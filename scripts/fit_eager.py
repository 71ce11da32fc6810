"""Training losses as public trainers write them: all slots, T x T scores, all logits in float32.

Baselines for bench_fit: each takes the very draft, batch and head that the trainer takes and gives
the same loss (asserted there), with nothing chunked, skipped or shared between steps.
"""

from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.attention import repeat_heads
from spec_train.batch import DraftBatch
from spec_train.drafts.eagle3_unroll import slot_masks
from spec_train.head import TargetHead


def shifted(x: Tensor, batch: DraftBatch) -> Tensor:
    """Move rows [B, T, ...] left by one inside documents."""
    if x.ndim == 2:
        return shift_left(x, batch.document_ids)
    last = torch.ones_like(batch.document_ids, dtype=torch.bool)
    last[:, :-1] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    return x.roll(-1, 1).masked_fill(last[..., None], 0)


def eager_eagle3(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """The training-time test, one step after the other over every slot."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    documents, length = batch.document_ids, batch.document_ids.shape[1]
    mask = slot_masks(shifted(batch.loss_mask, batch), documents, draft.options.slots)
    known = shifted(batch.input_ids, batch)
    logits = head.logits(shifted(batch.hidden[FINAL], batch))  # [B, T, V]
    inside = draft.t2d[logits.argmax(-1)] & mask
    teacher = logits[..., draft.draft_ids].softmax(-1)
    slots = torch.arange(length)
    unseen = (documents[:, :, None] != documents[:, None]) | (slots > slots[:, None])
    bias = torch.zeros(unseen.shape).masked_fill(unseen, float("-inf"))[:, None]
    carried = draft.project(batch.aux(draft.config.layers))
    keys: list[Tensor] = []
    values: list[Tensor] = []
    total, weight = carried.new_zeros(()), 0.0
    for step in range(draft.options.ttt_steps):
        u = layer.inputs(draft.embed(known), carried)
        cos, sin = draft.rotary.cos_sin(batch.position_ids + step, None, u.dtype)
        q = attention.queries(u, cos, sin)
        k, v = (repeat_heads(x, q.shape[1]) for x in attention.keys_values(u, cos, sin))
        keys.append(k)
        values.append(v)
        scores = [q @ keys[0].mT * attention.scale + bias]
        scores += [(q * k).sum(-1, keepdim=True) * attention.scale for k in keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        out = shares[..., :length] @ values[0]
        for i, v in enumerate(values[1:]):
            out = out + shares[..., length + i, None] * v
        carried = draft.feedback(layer.outputs(carried, out))
        log_q = draft.logits(carried).float().log_softmax(-1)  # [B, T, Vd]
        losses = -(teacher * log_q).sum(-1)
        share = draft.options.step_decay**step
        total = total + share * (losses * inside).sum() / inside.sum().clamp_min(1)
        weight += share
        known, inside, teacher = (shifted(x, batch) for x in (known, inside, teacher))
    return total / weight


EAGER = {"eagle3": eager_eagle3}
