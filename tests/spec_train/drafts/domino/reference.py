"""The slow recurrent head of Domino: one token and one draft at a time, in float64.

g width of the GRU, V vocabulary.
"""

import torch
from torch import Tensor

from tests.spec_train.drafts.slow_layer import State, linear


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
    return linear(state, "embed_proj.2", middle / (1 + torch.exp(-middle)))
