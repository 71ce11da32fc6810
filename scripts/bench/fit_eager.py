"""Training losses written straightforwardly: all slots, T x T scores, all logits in float32.

Baselines for `fit.py`: each receives the draft, batch and head of the trainer and returns the same
loss (asserted there). Nothing is chunked or skipped.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL
from spec_train.attention.masks import AttentionMask, block_mask, causal_mask, parallel_mask
from spec_train.attention.plain import repeat_heads
from spec_train.data.batch import DraftBatch
from spec_train.drafts.dspark.blocks import drafted_mask, sample_blocks
from spec_train.drafts.dspark.trained_rows import draft_weights
from spec_train.drafts.eagle.loss import input_noise, supervised_slots
from spec_train.drafts.frames import slots_of
from spec_train.drafts.peagle.elements import segments_of
from spec_train.drafts.peagle.loss import element_masks
from spec_train.drafts.slots import slot_masks
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
    slots = torch.arange(length, device=documents.device)
    unseen = (documents[:, :, None] != documents[:, None]) | (slots > slots[:, None])
    bias = torch.zeros(unseen.shape, device=unseen.device)
    bias = bias.masked_fill(unseen, float("-inf"))[:, None]
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


def attend_densely(mask: AttentionMask, scale: float) -> Callable[..., Tensor]:
    """Softmax attention that holds a score for every query and key."""
    seen = mask.dense()
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill(~seen, float("-inf"))

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        return (q @ k.mT * scale + bias).softmax(-1) @ v

    return attend


def eager_eagle(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """EAGLE-1: regression and cross-entropy at every slot, masked afterwards."""
    options, documents, states = draft.options, batch.document_ids, batch.hidden[FINAL]
    fed = states
    if draft.training and options.noise > 0:
        fed = states + input_noise(states, documents, options.noise, options.noise_scale)
    x = draft.fuse(shifted(batch.input_ids, batch), fed)
    cos, sin = draft.rotary.cos_sin(batch.position_ids, None, x.dtype)
    attend = attend_densely(causal_mask(documents), draft.scale)
    for layer in draft.layers:
        x = layer(x, cos, sin, attend)
    wanted = shifted(states, batch)
    distance = F.smooth_l1_loss(x, wanted, reduction="none").mean(-1)
    teacher = head.logits(wanted).softmax(-1)
    entropy = -(teacher * head.logits(x).log_softmax(-1)).sum(-1)
    mask = supervised_slots(batch.loss_mask, documents, options.slots)[0]
    losses = options.regression_weight * distance + options.ce_weight * entropy
    return (losses * mask).sum() / mask.sum()


def eager_peagle(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """P-EAGLE: one forward over all elements, logits of every element."""
    documents, length = batch.document_ids, batch.document_ids.shape[1]
    sample = draft.draw(batch)
    _, supervised = element_masks(*slots_of(draft, batch), documents, sample)
    (elements,) = segments_of(sample, supervised, documents, 1)
    known = shifted(batch.input_ids, batch)
    features = draft.project(batch.aux(draft.config.layers))
    tokens, carried = draft.element_inputs(known, features, elements.deeper)
    mask = parallel_mask(elements.document_ids, elements.anchors, elements.depths)
    attend = attend_densely(mask, draft.scale)
    positions = batch.position_ids.gather(1, elements.anchors) + elements.depths
    states = draft.states(tokens, carried, positions, None, [attend] * len(draft.layers))
    log_q = draft.logits(states).float().log_softmax(-1)  # [B, E, Vd]
    slots = (elements.anchors + elements.depths).clamp_max(length - 1)
    logits = head.logits(shifted(batch.hidden[FINAL], batch))[..., draft.draft_ids]
    teacher = logits.softmax(-1).gather(1, slots[..., None].expand(-1, -1, logits.shape[-1]))
    losses = (torch.xlogy(teacher, teacher) - teacher * log_q).sum(-1)
    counted = torch.zeros_like(losses).flatten()
    counted[elements.place] = 1
    return (losses.flatten() * counted).sum() / counted.sum()


def eager_blocks(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """DSpark and DFlash: all blocks over the whole row, logits of every draft."""
    config, options, documents = draft.config, draft.options, batch.document_ids
    blocks = sample_blocks(batch.loss_mask, documents, options.num_anchors)
    anchors, size, depth = blocks.anchors, config.block_size, config.depth
    ids = torch.full((*anchors.shape, size), config.mask_token_id, device=anchors.device)
    ids[..., 0] = batch.input_ids.gather(1, anchors)
    steps = torch.arange(size, device=anchors.device)
    positions = batch.position_ids.gather(1, anchors)[..., None] + steps
    context = draft.context(batch.aux(config.layers), batch.position_ids)
    attend = attend_densely(
        block_mask(documents, anchors, blocks.kept, size), config.head_dim**-0.5
    )
    y = draft.forward_blocks(ids.flatten(1), positions.flatten(1), context, attend)
    y = y.unflatten(1, (anchors.shape[1], size))[:, :, config.first :]  # [B, N, D, H]
    places = blocks.places(depth).clamp_max(documents.shape[1] - 1)

    def at(x: Tensor) -> Tensor:
        return torch.stack([row[place] for row, place in zip(x, places, strict=True)])

    logits, heads = y @ draft.head_rows(head).mT, draft.markov_head  # [B, N, D, Vd]
    known = None
    if heads is not None:
        known = heads.markov_w1(at(batch.input_ids))
        logits = logits + heads.markov_w2(heads.block(known, y))
    log_q = logits.float().log_softmax(-1)
    teacher = at(head.logits(batch.hidden[FINAL])[..., draft.draft_ids].softmax(-1))
    labels = draft.draft_index[at(shifted(batch.input_ids, batch))]
    entropy = -log_q.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    distance = (log_q.exp() - teacher).abs().sum(-1)
    alive = drafted_mask(batch.loss_mask, documents, depth)
    counts = torch.stack([row[a] for row, a in zip(alive, anchors, strict=True)])
    counts = counts & (draft.draft_index[at(batch.target_argmax)] >= 0)
    weight = counts * draft_weights(draft)
    ce_total, total = draft.slot_counts(batch)
    loss = options.ce_weight * (entropy * weight * (labels >= 0)).sum() / ce_total
    loss = loss + options.l1_weight * (distance * weight).sum() / total
    if draft.confidence_head is not None:
        rate = (1 - distance / 2).detach().clamp(0, 1)
        forecast = draft.confidence_head(y, known).float()
        bce = F.binary_cross_entropy_with_logits(forecast, rate, reduction="none")
        loss = loss + options.confidence_weight * (bce * weight).sum() / total
    return loss


EAGER = {
    "eagle": eager_eagle,
    "eagle3": eager_eagle3,
    "peagle": eager_peagle,
    "dspark": eager_blocks,
    "dflash": eager_blocks,
}
