"""A slow EAGLE-3: one document, slot, unroll step and head at a time (see `layer`).

Slot t sees the target's states of token t and the known token t+1, and drafts token t+2. At unroll
step s everything except the slot's own states moves s tokens further.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.slow_layer import State


@dataclass(frozen=True, kw_only=True)
class Config(slow.Sizes):
    """Settings from the checkpoint's config.json."""

    windows: tuple[int | None, ...]  # per layer: positions that a row sees; None: all
    norm_output: bool = False
    norm_before_residual: bool = False
    steps: int = 7


def unrolled(
    state: State,
    config: Config,
    x: Sequence[int],
    aux: Tensor,
    chain: str = "",
    ids: Sequence[int] = (),
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Return logits [Vd] and carried state [H] of every (slot, step) whose known token exists.

    `chain`: only of the last slot, whose steps continue with the draft's "own" choices, or with the
    tokens after it, of which `x` then has as many: they are "known". `ids`: see `blocks`.
    """
    x, slots = list(x), len(x) - 1  # the last token's slot has no known token
    if chain == "known":
        slots -= config.steps - 1
    carried = [slow.project(state, aux[t], config.rms_norm_eps) for t in range(slots)]
    rows: list[dict[tuple[int, int], slow.Row]] = [{} for _ in _layers(state)]  # per layer
    found: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for s in range(config.steps):
        residual = {t: carried[t] for t in range(slots if chain else slots - s)}
        if chain and s:
            residual = {slots - 1: carried[-1]}
        for number, name in enumerate(_layers(state)):
            norm = state[f"{name}.input_layernorm.weight"]
            inputs: dict[int, Tensor] = {}
            for t in residual:
                if number:
                    inputs[t] = config.norm(residual[t], norm)
                else:
                    embedding = state["embed_tokens.weight"][x[t + 1 + s]]
                    normed = config.norm(residual[t], state[f"{name}.hidden_norm.weight"])
                    inputs[t] = torch.cat([config.norm(embedding, norm), normed])
                    residual[t] = normed if config.norm_before_residual else residual[t]
                made = slow.keys_values(state, name, inputs[t], t + s, config)
                rows[number][t, s] = made
            if chain and number == len(rows) - 1:
                residual = {slots - 1: residual[slots - 1]}
            for t in residual:  # step-0 keys of slots 0..t, and this slot's keys of steps 1..s
                seen = [(j, 0) for j in range(t + 1)] + [(t, step) for step in range(1, s + 1)]
                window = config.windows[number]
                if window is not None:  # slot j at step s is at position j + s
                    seen = [pair for pair in seen if t + s - window < sum(pair)]
                keys = [rows[number][pair] for pair in seen]
                heads = slow.attend(state, name, inputs[t], t + s, keys, config)
                residual[t] = slow.finish(state, name, residual[t], heads, config)
        for t, output in residual.items():
            normed = config.norm(output, state["norm.weight"])
            carried[t] = normed if config.norm_output else output
            found[t, s] = state["lm_head.weight"] @ normed, carried[t]
        if chain == "own":
            ids = ids or slow.draft_ids(state, len(state["lm_head.weight"]))
            x.append(ids[int(found[slots - 1, s][0].argmax())])
    return found


def _layers(state: State) -> list[str]:
    """Return the names of the layers, in order."""
    if "midlayer.hidden_norm.weight" in state:
        return ["midlayer"]
    count = sum(name.endswith(".self_attn.o_proj.weight") for name in state)
    return [f"layers.{number}" for number in range(count)]
