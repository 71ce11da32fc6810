"""A slow EAGLE-1/2 with chains: one document, slot and head at a time (see `layer`).

Slot t sees the target's final hidden state of token t and the known token t+1, predicts the state
of token t+1 and drafts token t+2. Step s continues from slot t: its row is (a token of position
t+1+s, the previous prediction) at position t+s. It sees the rows of slots 0..t and those of its own
chain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.slow_layer import Document, State


@dataclass(frozen=True, kw_only=True)
class Config(slow.Sizes):
    """Settings from the checkpoint's config.json and the target's head."""

    windows: tuple[int | None, ...]  # per layer: positions that a row sees; None: all
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None = None  # [V]
    head_scale: float = 1.0
    head_softcap: float | None = None


def head(config: Config, hidden: Tensor) -> Tensor:
    """Return the logits [V] of the target's head for one state [H]."""
    z = config.head_weight @ hidden
    if config.head_bias is not None:
        z = z + config.head_bias
    z = z * config.head_scale
    if config.head_softcap is not None:
        z = config.head_softcap * torch.tanh(z / config.head_softcap)
    return z


def predict(
    state: State,
    sizes: slow.Sizes,
    windows: Sequence[int | None],
    rows: Sequence[tuple[int, Tensor]],
    last_only: bool = False,
) -> list[Tensor]:
    """Return the predictions [H] of rows (known token, state [H]) at positions 0, 1, ...

    Causal; computes all rows, without a cache. There are norms where the checkpoint has them.
    """
    inputs = [
        slow.linear(state, "fc", torch.cat([state["embed_tokens.weight"][token], hidden]))
        for token, hidden in rows
    ]
    for number, window in enumerate(windows):
        layer = f"layers.{number}"
        norm = state.get(f"{layer}.input_layernorm.weight")
        normed = inputs if norm is None else [sizes.norm(x, norm) for x in inputs]
        start = len(rows) - 1 if last_only and number == len(windows) - 1 else 0
        inputs = slow.causal(state, layer, normed, inputs, window, sizes, start)
    norm = state.get("norm.weight")
    return inputs if norm is None else [sizes.norm(x, norm) for x in inputs]


def chain(
    state: State,
    config: Config,
    document: Document,
    t: int,
    known: Sequence[int] | None,
    steps: int,
) -> list[Tensor]:
    """Return the predicted states [H] of the chain from slot t.

    Its later tokens are `known`, or, if that is None, its own choices.
    """
    rows = [(document.x[j + 1], document.aux[j]) for j in range(t + 1)]
    predictions: list[Tensor] = []
    for s in range(steps):
        if s:
            token = int(head(config, predictions[-1]).argmax()) if known is None else known[s - 1]
            rows.append((token, predictions[-1]))
        predictions += predict(state, config, config.windows, rows, last_only=True)
    return predictions
