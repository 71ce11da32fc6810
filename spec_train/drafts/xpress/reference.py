"""The slow refiner of XPress, one slot at a time: a part of the slow block drafts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.block.reference import Config
from spec_train.drafts.slow_layer import State, linear


class Refiner:
    """Moves the logits of a slot by the states of all slots and the tokens before it."""

    def __init__(self, state: State, config: Config, states: list[Tensor]) -> None:
        self.state, self.states = state, states

    def __call__(self, y: Tensor, tokens: Sequence[int]) -> Tensor:
        return refinement(self.state, self.states, [tokens[0], *tokens])


def refinement(state: State, states: list[Tensor], tokens: Sequence[int]) -> Tensor:
    """Return what is added to the logits [V] of the last slot that has one of `tokens` before it.

    `states` are those of all slots of the block; `tokens` are before its first ones.
    """
    rows, mean = [], torch.stack(states).mean(0)
    for y, token in zip(states, tokens, strict=False):
        own = linear(state, "xpress_head.down_h", y), linear(state, "xpress_head.down_g", mean)
        row = torch.cat([*own, state["xpress_head.w1.weight"][token]])
        rows.append(linear(state, "xpress_head.in_proj", row))
    last, mixer = len(rows) - 1, state["xpress_head.mix.L"]
    mixed = rows[last]
    for j in range(last + 1):
        mixed = mixed + mixer[:, last, j] * rows[j]
    mixed = mixed + slow.mlp(state, "xpress_head.mlp", mixed, "silu")
    return linear(state, "xpress_head.w2", mixed)
