"""The slow recurrent head of Domino, unit by unit: a part of the slow block drafts.

g is the width of its GRU.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.block.reference import Config
from spec_train.drafts.slow_layer import State, linear


class Recurrent:
    """Moves the logits of a slot by its state and the tokens of the block before its draft."""

    def __init__(self, state: State, config: Config, states: list[Tensor]) -> None:
        self.state, self.config = state, config
        self.memory: Tensor | None = None

    def __call__(self, y: Tensor, tokens: Sequence[int]) -> Tensor:
        embedding = self.state["embed_tokens.weight"][tokens[-1]]
        self.memory = gru_state(self.state, embedding, self.memory)
        if len(tokens) <= self.config.prefix:
            return torch.zeros((), dtype=torch.float64)
        return correction(self.state, y, self.memory)


def gru_state(state: State, x: Tensor, memory: Tensor | None) -> Tensor:
    """Return the GRU's state [g] after an input [H], unit by unit; None: its state is 0.

    Rows of both weights: first the reset gates of all units, then the update gates, then the new
    values.
    """
    into, back = state["prefix_gru.weight_ih_l0"], state["prefix_gru.weight_hh_l0"]
    width = back.shape[1]
    memory = torch.zeros(width, dtype=torch.float64) if memory is None else memory
    out = []
    for unit in range(width):
        rows = [unit + gate * width for gate in range(3)]
        reset, update = (
            1 / (1 + torch.exp(-(into[row] @ x + back[row] @ memory))) for row in rows[:2]
        )
        new = torch.tanh(into[rows[2]] @ x + reset * (back[rows[2]] @ memory))
        out.append((1 - update) * new + update * memory[unit])
    return torch.stack(out)


def correction(state: State, y: Tensor, memory: Tensor) -> Tensor:
    """Return what is added to the logits [V] of a slot with state y [H]."""
    middle = linear(state, "embed_proj.0", torch.cat([y, memory]))
    return linear(state, "embed_proj.2", slow.activation("silu", middle))
