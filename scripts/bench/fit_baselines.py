"""Training losses written as public trainers write them on PyTorch: the baselines of `fit.py`.

Each receives the draft, batch and head of the trainer, and returns the same loss; `fit.py` compares
values and gradients. All elements of a row are in one forward pass, attention is
`scaled_dot_product_attention` with an additive mask that is made once per batch, every slot has its
logits, and autograd makes the backward pass. EAGLE-3's unroll has no such form, because the keys of
a later step are seen by one slot each: there the scores are written out, as trainers do without
flex_attention.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from spec_data.shards.batch import DraftBatch
from spec_data.shards.packing import shift_left
from spec_data.shards.schema import FINAL, apply_head
from spec_train.attention.masks import AttentionMask, block_mask, causal_mask, parallel_mask
from spec_train.attention.plain import repeat_heads
from spec_train.drafts.block.blocks import drafted_mask, sample_blocks
from spec_train.drafts.block.draft import draft_weights
from spec_train.drafts.eagle.draft import supervised_slots
from spec_train.drafts.frames import slots_of
from spec_train.drafts.peagle.draft import element_masks, segments_of
from spec_train.drafts.slots import slot_masks
from spec_train.losses.head import TargetHead


def shifted(x: Tensor, batch: DraftBatch) -> Tensor:
    """Move rows [B, T, ...] left by one inside documents."""
    if x.ndim == 2:
        return shift_left(x, batch.document_ids)
    last = torch.ones_like(batch.document_ids, dtype=torch.bool)
    last[:, :-1] = batch.document_ids[:, 1:] != batch.document_ids[:, :-1]
    return x.roll(-1, 1).masked_fill(last[..., None], 0)


def proposed(draft: Any, logits: Tensor) -> Tensor:
    """Return the target's logits of the draft vocabulary, [..., Vd] of [..., V]."""
    return logits if draft.full_vocabulary else logits[..., draft.draft_ids]


def rows_at(x: Tensor, places: Tensor) -> Tensor:
    """Return the entries [B, n, ...] of `x` [B, T, ...] at slots, int64 [B, n]."""
    return torch.stack([row[place] for row, place in zip(x, places, strict=True)])


def unrolled(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """The training-time test, one step after the other over every slot."""
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    documents, length = batch.document_ids, batch.document_ids.shape[1]
    mask = slot_masks(shifted(batch.loss_mask, batch), documents)
    known = shifted(batch.input_ids, batch)
    logits = head.logits(shifted(batch.hidden[FINAL], batch))  # [B, T, V]
    inside = draft.t2d[logits.argmax(-1)] & mask
    teacher = proposed(draft, logits).softmax(-1)
    del logits
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
        cos, sin = draft.rotary(batch.position_ids + step, None, u.dtype)
        q = attention.queries(u, cos, sin)
        k, v = (repeat_heads(x, q.shape[1]) for x in attention.keys_values(u, cos, sin))
        keys.append(k)
        values.append(v)
        scores = [q @ keys[0].mT * attention.head_dim**-0.5 + bias]
        scores += [(q * k).sum(-1, keepdim=True) * attention.head_dim**-0.5 for k in keys[1:]]
        shares = torch.cat(scores, -1).softmax(-1)
        out = shares[..., :length] @ values[0]
        for i, v in enumerate(values[1:]):
            out = out + shares[..., length + i, None] * v
        carried = draft.feedback(layer.outputs(u, carried, out))
        log_q = draft.logits(carried).float().log_softmax(-1)  # [B, T, Vd]
        losses = -(teacher * log_q).sum(-1)
        share = draft.options.step_decay**step
        total = total + share * (losses * inside).sum() / inside.sum().clamp_min(1)
        weight += share
        known, inside, teacher = (shifted(x, batch) for x in (known, inside, teacher))
    return total / weight


def attend_masked(mask: AttentionMask, scale: float) -> Callable[..., Tensor]:
    """Return torch's attention under the whole table of the mask, as an additive one."""
    seen = mask.dense()
    bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, float("-inf"))

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Any, sinks: None = None) -> Tensor:
        k, v = (repeat_heads(x, q.shape[1]) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)

    return attend


def layer_by_layer(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """EAGLE-1: regression and cross-entropy at every slot, masked afterwards."""
    options, documents, states = draft.options, batch.document_ids, batch.hidden[FINAL]
    fed = states
    if draft.training and options.noise > 0:
        fed = states + (torch.rand(states.shape, device=states.device) * 2 - 1) * options.noise
    (x,) = draft.layer_inputs(shifted(batch.input_ids, batch), fed)
    cos, sin = draft.rotary(batch.position_ids, None, x.dtype)
    attend = attend_masked(causal_mask(documents), draft.scale)
    for layer in draft.layers:
        x = layer(x, cos, sin, attend)
    wanted = shifted(states, batch)
    distance = F.smooth_l1_loss(x, wanted, reduction="none").mean(-1)
    teacher = head.logits(wanted).softmax(-1)
    logits = apply_head(x, head.head_weight, head.head_bias, head.spec)
    entropy = -(teacher * logits.log_softmax(-1)).sum(-1)
    mask = supervised_slots(batch.loss_mask, documents)[0]
    losses = options.regression_weight * distance + options.ce_weight * entropy
    return (losses * mask).sum() / mask.sum()


def all_elements(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """P-EAGLE: one forward over all elements, logits of every element."""
    documents, length = batch.document_ids, batch.document_ids.shape[1]
    sample = draft.draw(batch)
    _, supervised = element_masks(*slots_of(draft, batch), documents, sample)
    (elements,) = segments_of(sample, supervised, documents, 1)
    known = shifted(batch.input_ids, batch)
    features = draft.project(batch.aux(draft.config.layers))
    tokens, carried = draft.element_inputs(known, features, elements.deeper)
    mask = parallel_mask(elements.document_ids, elements.anchors, elements.depths, length)
    attend = attend_masked(mask, draft.scale)
    positions = batch.position_ids.gather(1, elements.anchors) + elements.depths
    states = draft.states(tokens, carried, positions, None, [attend] * len(draft.layers))
    log_q = draft.logits(states).float().log_softmax(-1)  # [B, E, Vd]
    slots = (elements.anchors + elements.depths).clamp_max(length - 1)
    teacher = proposed(draft, head.logits(shifted(batch.hidden[FINAL], batch))).softmax(-1)
    losses = F.kl_div(log_q, rows_at(teacher, slots), reduction="none").sum(-1)
    counted = torch.zeros_like(losses).flatten()
    counted[elements.index] = 1
    return (losses.flatten() * counted).sum() / counted.sum()


def all_blocks(draft: Any, batch: DraftBatch, head: TargetHead) -> Tensor:
    """DSpark and DFlash: all blocks over the whole row, logits of every draft."""
    config, options, documents = draft.config, draft.options, batch.document_ids
    blocks = sample_blocks(batch.loss_mask, documents, options.num_anchors)
    anchors, size, depth = blocks.anchors, config.block_size, config.depth
    ids = torch.full((*anchors.shape, size), config.mask_token_id, device=anchors.device)
    ids[..., 0] = batch.input_ids.gather(1, anchors)
    steps = torch.arange(size, device=anchors.device)
    positions = batch.position_ids.gather(1, anchors)[..., None] + steps
    context = draft.context(batch.aux(config.layers), batch.position_ids)
    mask = block_mask(documents, anchors, blocks.real, size)
    attends = [attend_masked(mask, config.head_dim**-0.5)] * config.num_hidden_layers
    y = draft.forward_blocks(ids.flatten(1), positions.flatten(1), context, attends)
    y = y.unflatten(1, (anchors.shape[1], size))[:, :, config.first :]  # [B, N, D, H]
    places = blocks.slots(depth).clamp_max(documents.shape[1] - 1)
    logits = y @ draft.head_rows(head).mT  # [B, N, D, Vd]
    heads, known = getattr(draft, "markov_head", None), None
    if heads is not None:
        known = heads.markov_w1(rows_at(batch.input_ids, places))
        logits = logits + heads.markov_w2(heads.block(known, y))
    log_q = logits.float().log_softmax(-1)
    z = head.logits(batch.hidden[FINAL])  # [B, T, V]
    teacher = rows_at(proposed(draft, z).softmax(-1), places)
    labels = draft.draft_index[rows_at(shifted(batch.input_ids, batch), places)]
    entropy = -log_q.gather(-1, labels.clamp_min(0)[..., None]).squeeze(-1)
    distance = (log_q.exp() - teacher).abs().sum(-1)
    alive = drafted_mask(batch.loss_mask, documents, depth)
    counts = rows_at(alive, anchors)
    counts = counts & (draft.draft_index[rows_at(batch.target_argmax, places)] >= 0)
    weight = counts * draft_weights(draft)
    ce_total, total = draft.slot_counts(batch)
    if options.mixed:
        loss = options.ce_weight * (entropy * weight * (labels >= 0)).sum() / ce_total
        loss = loss + options.l1_weight * (distance * weight).sum() / total
    else:
        apart = F.kl_div(log_q, teacher, reduction="none").sum(-1)
        loss = (apart * weight).sum() / ce_total
    if getattr(draft, "confidence_head", None) is not None:
        rate = (1 - distance / 2).detach().clamp(0, 1)
        if not draft.full_vocabulary:  # the target's probability of the draft vocabulary
            mass = (proposed(draft, z).logsumexp(-1) - z.logsumexp(-1)).exp()
            full = teacher * rows_at(mass, places)[..., None]
            rate = torch.minimum(full, log_q.detach().exp()).sum(-1)
        forecast = draft.confidence_head(y, known).float()
        bce = F.binary_cross_entropy_with_logits(forecast, rate, reduction="none")
        loss = loss + options.confidence_weight * (bce * weight).sum() / total
    return loss


BASELINES = {
    "eagle": layer_by_layer,
    "eagle3": unrolled,
    "peagle": all_elements,
    "dspark": all_blocks,
}
