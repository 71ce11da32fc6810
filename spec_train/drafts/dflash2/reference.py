"""The slow selector of DFlash 2, one draft and candidate at a time: a second stage of `blocks`.

The convolutions are in the reference of the layers.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from spec_train.drafts.block import reference as blocks
from spec_train.drafts.block.reference import Config
from spec_train.drafts.slow_layer import Document, State, linear


class Block:
    """A block whose drafts are chosen from the K most probable tokens of their slots."""

    def __init__(
        self,
        state: State,
        config: Config,
        document: Document,
        anchor: int,
        states: list[Tensor] | None = None,
    ) -> None:
        """Take the `states` of the block's slots; None computes them."""
        self.state, self.config, self.document, self.anchor = state, config, document, anchor
        states = states or blocks.block_states(state, config, document, anchor)
        self.states = states if config.sample_from_anchor else states[1:]

    def edge(self, d: int, token: int) -> Tensor:
        """Return <A[p] * P y, B[token]> with p the document's token before draft d."""
        name, before = "candidate_selector", self.document.x[self.anchor + d]
        y = linear(self.state, f"{name}.hidden_projection", self.states[d])
        first = self.state[f"{name}.predecessor_codebook"][before]
        second = self.state[f"{name}.successor_codebook"][token]
        return (first * y * second).sum()

    def candidates(self, unary: Tensor) -> list[int]:
        """Return the K tokens with the largest logits, best first."""
        tokens = sorted(range(len(unary)), key=lambda v: -float(unary[v].detach()))
        return tokens[: self.config.top_k]

    def scores(self, d: int, unary: Tensor, tokens: Iterable[int]) -> Tensor:
        return torch.stack([unary[v] + self.edge(d, v) for v in tokens])
