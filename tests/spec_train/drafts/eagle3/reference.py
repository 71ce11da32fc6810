"""A slow EAGLE-3 training loss: one document, slot, unroll step and head at a time.

A float64 oracle for the fast implementation. It shares no code with it: no batch, no packing, no
mask tensor, no shifted frame. Everything is indexed by the token positions of ONE document, so
an error of the fast code in a shift, mask or boundary cannot occur here. Gradients come from
autograd. Weights come as a state dict with the checkpoint's keys, so the test covers the names too.

T tokens of a document, n captured layers, H hidden size, V / Vd target / draft vocabulary, S unroll
steps, d head size. Slot t sees the target's states of token t and the known token t+1, and drafts
token t+2. At unroll step s everything except the slot's own states moves s tokens further.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json and the training options."""

    norm_output: bool = False
    windows: tuple[int | None, ...] = (None,)  # per layer: positions that a row sees; None: all
    norm_before_residual: bool = False
    steps: int = 7
    decay: float = 0.8
    loss: SlotLoss = CROSS_ENTROPY


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: nothing shifted, nothing padded."""

    x: Sequence[int]  # token ids, [T]
    m: Sequence[int]  # loss mask, [T]
    aux: Tensor  # [T, n*H] float64
    z: Tensor  # [T, V] float64; z[t] are the target's logits for token t+1


@dataclass(kw_only=True)
class StepSums:
    """Sums of one unroll step over the slots of all documents; divided once."""

    loss: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    supervised: int = 0  # in the slot mask, and the teacher's choice is in the vocabulary
    drafted: int = 0  # in the slot mask; those outside the vocabulary are misses
    hits: int = 0
    acceptance: float = 0.0  # sum over the drafted slots of sum_v min(full p, q)


@dataclass(kw_only=True)
class Reference:
    """The loss of a list of documents and its parts."""

    loss: Tensor
    steps: list[StepSums]
    chains: int  # chains whose S depths are all in the slot mask
    survivors: list[int]  # [S] chains hit at every depth up to this one
    at_risk: list[int]  # [S] chains of any length, in the slot mask so far and hit before
    kept: list[int]  # [S] those of them hit here too


def slot_counts(m: Sequence[int], t: int, s: int) -> bool:
    """Return whether slot t is in the slot mask of unroll step s; m is the document's loss mask."""

    def supervised(position: int) -> bool:
        return position < len(m) and bool(m[position])

    return supervised(t + 1 + s) and supervised(t + 2 + s)


def reference_loss(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    documents: Sequence[Document],
    counts: Sequence[float] | None = None,
) -> Reference:
    """Compute the loss over all `documents`; `counts` replaces the denominators, one per step."""
    steps = [StepSums() for _ in range(config.steps)]
    chains, survivors = 0, [0] * config.steps
    at_risk, kept = [0] * config.steps, [0] * config.steps
    for document in documents:
        hits = _add_document(state, config, document, steps)
        for t in range(len(document.x)):
            for s in range(config.steps):
                if not slot_counts(document.m, t, s):
                    break
                at_risk[s] += 1
                if not hits[t, s]:
                    break
                kept[s] += 1
            if not all(slot_counts(document.m, t, s) for s in range(config.steps)):
                continue
            chains += 1
            for s in range(config.steps):
                survivors[s] += all(hits[t, earlier] for earlier in range(s + 1))
    total = torch.zeros((), dtype=torch.float64)
    weights = 0.0
    for s, step in enumerate(steps):
        count = step.supervised if counts is None else counts[s]
        weight = config.loss.weight(s, config.decay**s)
        weights += weight
        if count:
            total = total + weight * step.loss / count
    return Reference(
        loss=total / weights,
        steps=steps,
        chains=chains,
        survivors=survivors,
        at_risk=at_risk,
        kept=kept,
    )


def reference_logits(
    state: Mapping[str, Tensor], config: ReferenceConfig, x: Sequence[int], aux: Tensor
) -> dict[tuple[int, int], Tensor]:
    """Return the draft logits [Vd] for every (slot, step) whose known token exists."""
    slots = len(x) - 1  # the last token's slot has no known token
    carried = [slow_layer.project(state, aux[t], config.rms_norm_eps) for t in range(slots)]
    rows: list[dict[tuple[int, int], slow_layer.Row]] = [{} for _ in _layers(state)]  # per layer
    logits: dict[tuple[int, int], Tensor] = {}
    for s in range(config.steps):
        residual = {t: carried[t] for t in range(slots - s)}
        for number, name in enumerate(_layers(state)):
            norm, inputs = state[f"{name}.input_layernorm.weight"], {}
            for t in residual:
                inputs[t] = config.norm(residual[t], norm) if number else None
                if number == 0:
                    embedding = state["embed_tokens.weight"][x[t + 1 + s]]
                    normed = config.norm(residual[t], state[f"{name}.hidden_norm.weight"])
                    inputs[t] = torch.cat([config.norm(embedding, norm), normed])
                    residual[t] = normed if config.norm_before_residual else residual[t]
                made = slow_layer.keys_values(state, name, inputs[t], t + s, config)
                rows[number][t, s] = made
            for t in residual:  # step-0 keys of slots 0..t, and this slot's keys of steps 1..s
                seen = [(j, 0) for j in range(t + 1)] + [(t, step) for step in range(1, s + 1)]
                window = config.windows[number]
                if window is not None:  # slot j at step s is at position j + s
                    seen = [pair for pair in seen if t + s - window < sum(pair)]
                keys = [rows[number][pair] for pair in seen]
                heads = slow_layer.attend(state, name, inputs[t], t + s, keys, config)
                residual[t] = slow_layer.finish(state, name, residual[t], heads, config)
        for t, output in residual.items():
            normed = config.norm(output, state["norm.weight"])
            logits[t, s] = state["lm_head.weight"] @ normed
            carried[t] = normed if config.norm_output else output
    return logits


def _layers(state: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the layers, in order."""
    if "midlayer.hidden_norm.weight" in state:
        return ["midlayer"]
    count = sum(name.endswith(".input_layernorm.weight") for name in state)
    return [f"layers.{number}" for number in range(count)]


def _add_document(
    state: Mapping[str, Tensor], config: ReferenceConfig, document: Document, steps: list[StepSums]
) -> dict[tuple[int, int], bool]:
    """Add a document's slots to `steps`; return the hits of its (slot, step) pairs."""
    draft_ids = slow_layer.draft_ids(state, len(state["lm_head.weight"]))
    logits = reference_logits(state, config, document.x, document.aux)
    hits: dict[tuple[int, int], bool] = {}
    for (t, s), draft_logits in logits.items():
        if not slot_counts(document.m, t, s):
            continue
        teacher_logits = document.z[t + 1 + s]
        wanted = int(teacher_logits.argmax())  # over the target's full vocabulary
        steps[s].drafted += 1
        hits[t, s] = False
        log_q = torch.log_softmax(draft_logits, 0)
        full = torch.softmax(teacher_logits, 0)  # over the target's full vocabulary
        accepted = torch.zeros((), dtype=torch.float64)
        for i, token in enumerate(draft_ids):  # tokens outside are never drafted: q is 0 there
            accepted = accepted + torch.minimum(full[token], log_q[i].exp())
        steps[s].acceptance += float(accepted.detach())
        if wanted not in draft_ids:
            continue
        steps[s].supervised += 1
        hits[t, s] = draft_ids[int(draft_logits.argmax())] == wanted
        steps[s].hits += hits[t, s]
        p = torch.softmax(teacher_logits[draft_ids], 0)  # renormalised over the draft vocabulary
        steps[s].loss = steps[s].loss + config.loss(
            p, [full[v] for v in draft_ids], log_q, draft_ids.index(wanted)
        )
    return hits
