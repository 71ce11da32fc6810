"""A slow P-EAGLE training loss: one document, element, layer and head at a time.

A float64 oracle for the fast implementation. It shares no code with it: no batch, no packing, no
mask tensor, no shifted frame, no segments. Everything is indexed by the token positions of ONE
document. Gradients come from autograd. Weights come as a state dict with the checkpoint's keys.

Element (t, d): anchor t, depth d. It is at position t + d and drafts token t + 2 + d; its teacher
is the target's logits of token t + 1 + d. Depth 0 knows token t + 1 and the target's
states of token t; deeper elements hold the mask token and `mask_hidden`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.eagle3.reference import Document
from tests.spec_train.drafts.slot_loss import KL, SlotLoss

Element = tuple[int, int]  # (anchor, depth)


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json and the training options."""

    layers: int
    windows: tuple[int | None, ...]  # per layer: positions that an element sees; None: all
    mask_token_id: int
    depths: int
    loss: SlotLoss = KL
    norm_before_residual: bool = False


@dataclass(kw_only=True)
class Reference:
    """The loss of a list of documents and its parts; lists are over depths."""

    loss: Tensor
    losses: list[float]
    supervised: list[int]
    drafted: list[int]
    hits: list[int]
    acceptance: list[float]
    chains: int
    survivors: list[int]
    at_risk: list[int]
    kept: list[int]


def slot_counts(m: Sequence[int], slot: int) -> bool:
    """Return whether an element at `slot` counts; m is the document's loss mask."""

    def supervised(position: int) -> bool:
        return position < len(m) and bool(m[position])

    return supervised(slot + 1) and supervised(slot + 2)


def reference_cod(
    supervised: Sequence[bool], uniforms: Sequence[Sequence[float]], ratio: float, floor: float
) -> list[Element]:
    """Sample one document by conditional drop; one row of numbers per depth from 1."""
    length, count = len(supervised), sum(map(bool, supervised))
    elements = [(t, 0) for t in range(length)]
    kept = list(range(length))
    for d, row in enumerate(uniforms, start=1):
        candidates = [p + 1 for p in kept if p + 1 < length and supervised[p + 1]]
        quota = int(max(count - d, 0) * max(ratio**d, floor))
        kept = sorted(sorted(candidates, key=lambda p, row=row: row[p])[:quota])
        elements += [(p - d, d) for p in kept]
    return elements


def reference_logits(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    document: Document,
    sample: Collection[Element],
) -> dict[Element, Tensor]:
    """Return the draft logits [Vd] of the sampled elements and of every slot at depth 0."""
    slots = len(document.x) - 1  # the last token's slot has no known token
    elements = [(t, 0) for t in range(slots)]
    elements += sorted((t, d) for t, d in set(sample) if d > 0)
    hidden, first = {}, {}
    for t, d in elements:
        token = document.x[t + 1] if d == 0 else config.mask_token_id
        aux = document.aux[t] if d == 0 else state["mask_hidden"].flatten()
        embedding = state["embed_tokens.weight"][token]
        hidden[t, d] = slow_layer.project(state, aux, config.rms_norm_eps)
        normed = config.norm(hidden[t, d], state["layers.0.hidden_norm.weight"])
        norm = state["layers.0.input_layernorm.weight"]
        first[t, d] = torch.cat([config.norm(embedding, norm), normed])
        hidden[t, d] = normed if config.norm_before_residual else hidden[t, d]
    for number in range(config.layers):
        name, window, inputs = f"layers.{number}", config.windows[number], first
        if number:
            norm = state[f"{name}.input_layernorm.weight"]
            inputs = {e: config.norm(hidden[e], norm) for e in elements}
        rows = {e: slow_layer.keys_values(state, name, inputs[e], sum(e), config) for e in elements}
        for t, d in elements:
            seen = [(j, 0) for j in range(t + 1)] + [(t, e) for e in range(1, d + 1)]
            assert all(e in inputs for e in seen), "an anchor's depths have no gaps"
            if window is not None:  # an element is at position anchor + depth
                seen = [e for e in seen if t + d - window < sum(e)]
            keys = [rows[e] for e in seen]
            heads = slow_layer.attend(state, name, inputs[t, d], t + d, keys, config)
            hidden[t, d] = slow_layer.finish(state, name, hidden[t, d], heads, config)
    head, norm = state["lm_head.weight"], state["norm.weight"]
    return {e: head @ config.norm(hidden[e], norm) for e in elements}


def reference_loss(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    documents: Sequence[Document],
    samples: Sequence[Collection[Element]],
    count: float | None = None,
) -> Reference:
    """Compute the loss over all `documents`; `count` replaces the denominator."""
    depths = range(config.depths)
    total = torch.zeros((), dtype=torch.float64)
    out = Reference(
        loss=total,
        losses=[0.0 for _ in depths],
        supervised=[0 for _ in depths],
        drafted=[0 for _ in depths],
        hits=[0 for _ in depths],
        acceptance=[0.0 for _ in depths],
        chains=0,
        survivors=[0 for _ in depths],
        at_risk=[0 for _ in depths],
        kept=[0 for _ in depths],
    )
    draft_ids, weights = slow_layer.draft_ids(state, len(state["lm_head.weight"])), 0.0
    for document, sample in zip(documents, samples, strict=True):
        logits = reference_logits(state, config, document, sample)
        hit: dict[Element, bool] = {}
        for t, d in sorted(sample):
            if not slot_counts(document.m, t + d):
                continue
            teacher = document.z[t + 1 + d]
            wanted = int(teacher.argmax())
            out.drafted[d] += 1
            hit[t, d] = False
            log_q = torch.log_softmax(logits[t, d], 0)
            full = torch.softmax(teacher, 0)  # over the target's full vocabulary
            for i, token in enumerate(draft_ids):  # tokens outside are never drafted
                out.acceptance[d] += float(torch.minimum(full[token], log_q[i].exp()).detach())
            if wanted not in draft_ids:
                continue
            hit[t, d] = draft_ids[int(logits[t, d].argmax())] == wanted
            p = torch.softmax(teacher[draft_ids], 0)  # renormalised over the draft vocabulary
            inside = [full[token] for token in draft_ids]
            divergence = config.loss(p, inside, log_q, draft_ids.index(wanted))
            weight = config.loss.weight(d, 1.0)
            total, weights = total + weight * divergence, weights + weight
            out.losses[d] += float(divergence.detach())
            out.supervised[d] += 1
            out.hits[d] += hit[t, d]
        _add_chains(out, hit, len(document.x), config.depths)
    out.loss = total / (weights if count is None else count)
    return out


def _add_chains(out: Reference, hit: Mapping[Element, bool], length: int, depths: int) -> None:
    for t in range(length):
        for d in range(depths):
            if (t, d) not in hit:
                break
            out.at_risk[d] += 1
            if not hit[t, d]:
                break
            out.kept[d] += 1
        if all((t, d) in hit for d in range(depths)):
            out.chains += 1
            for d in range(depths):
                out.survivors[d] += all(hit[t, e] for e in range(d + 1))
