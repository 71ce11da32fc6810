"""A slow EAGLE-3 loss: one document, slot, unroll step and head at a time (see `slow_layer`).

Slot t sees the target's states of token t and the known token t+1, and drafts token t+2. At unroll
step s everything except the slot's own states moves s tokens further.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge, slot_counts


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json and the training options."""

    windows: tuple[int | None, ...]  # per layer: positions that a row sees; None: all
    norm_output: bool = False
    norm_before_residual: bool = False
    steps: int = 7
    decay: float = 0.8
    loss: SlotLoss = CROSS_ENTROPY


def reference_loss(
    state: State, config: ReferenceConfig, documents: Sequence[Document]
) -> tuple[Tensor, Sums]:
    """Compute the loss over all `documents`, and the sums of all steps."""
    sums, ids = Sums(config.steps), slow_layer.draft_ids(state, len(state["lm_head.weight"]))
    losses = [torch.zeros((), dtype=torch.float64) for _ in range(config.steps)]
    for document in documents:
        hits = {}
        for (t, s), (logits, _) in unrolled(state, config, document.x, document.aux).items():
            if not slot_counts(document.m, t + s):
                continue
            judged = judge(logits, document.z[t + 1 + s], ids)
            hits[t, s] = judged.hit
            loss = None
            if judged.label is not None:
                loss = config.loss(judged.p, judged.full, judged.log_q, judged.label)
                losses[s] = losses[s] + loss
            sums.add(s, judged, loss)
        sums.add_chains(hits)
    weights = [config.loss.weight(s, config.decay**s) for s in range(config.steps)]
    counts = [max(count, 1) for count in sums["supervised"]]
    means = (w * loss / n for w, loss, n in zip(weights, losses, counts, strict=True))
    return sum(means, torch.zeros(())) / sum(weights), sums


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    found = unrolled(state, config, document.x, document.aux)
    return {(t + 1, s): z for (t, s), (z, _) in found.items() if t + 1 in anchors and s < depth}


def unrolled(
    state: State, config: ReferenceConfig, x: Sequence[int], aux: Tensor
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return logits [Vd] and carried state [H] of every (slot, step) whose known token exists."""
    slots = len(x) - 1  # the last token's slot has no known token
    carried = [slow_layer.project(state, aux[t], config.rms_norm_eps) for t in range(slots)]
    rows: list[dict[tuple[int, int], slow_layer.Row]] = [{} for _ in _layers(state)]  # per layer
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
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
            carried[t] = normed if config.norm_output else output
            found[t, s] = state["lm_head.weight"] @ normed, carried[t]
    return found


def _layers(state: State) -> list[str]:
    """Return the names of the layers, in order."""
    if "midlayer.hidden_norm.weight" in state:
        return ["midlayer"]
    count = sum(name.endswith(".self_attn.o_proj.weight") for name in state)
    return [f"layers.{number}" for number in range(count)]
