"""The slow lattice of LiLiCorr, one candidate at a time: a second stage of `blocks`.

D drafts of a block, K candidates, h width of the transformer.
"""

import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts.dflash2 import reference as selector
from spec_train.drafts.slow_layer import State, linear

NAME = "lilicorr"


def silu(x: Tensor) -> Tensor:
    """Return x times its sigmoid."""
    return x / (1 + torch.exp(-x))


def mlp(state: State, name: str, x: Tensor) -> Tensor:
    """Return down(silu(up x)) of the MLP `name`, which has no gate."""
    return linear(state, f"{name}.down_proj", silu(linear(state, f"{name}.up_proj", x)))


class Block(selector.Block):
    """A block whose drafts are chosen by the scores of steps between candidates."""

    @functools.cached_property
    def log_q(self) -> list[Tensor]:
        """Log-probabilities of each slot."""
        return [torch.log_softmax(self.config.head_rows @ y, 0) for y in self.states]

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """The candidates of each slot."""
        return [self.candidates(q) for q in self.log_q]

    @functools.cached_property
    def vectors(self) -> tuple[Any, Any, Tensor]:
        """Vectors of the candidates to the next slot, from the one before, and of the anchor."""
        state, config, top = self.state, self.config, self.config.top_k
        places = [(d, k) for d in range(len(self.tokens)) for k in range(top)]
        rows = [self._input(d, k) for d, k in places]
        layer = 0
        while f"{NAME}.layers.{layer}.attn_norm.weight" in state:
            rows = self._layer(f"{NAME}.layers.{layer}", rows, places)
            layer += 1
        rows = [config.norm(x, state[f"{NAME}.output_norm.weight"]) for x in rows]
        anchor = torch.zeros_like(rows[0])
        if self.anchor:
            states = linear(state, "fc", self.document.aux[self.anchor - 1])
            context = config.norm(states, state["hidden_norm.weight"])
            anchor = linear(state, f"{NAME}.context_proj", context)
        anchor = config.norm(anchor, state[f"{NAME}.anchor_norm.weight"])
        mixed = [
            silu(linear(state, f"{NAME}.factor_input_proj", torch.cat([x, anchor, x * anchor])))
            for x in rows
        ]
        out = {
            at: linear(state, f"{NAME}.out_head", x) for at, x in zip(places, mixed, strict=True)
        }
        into = {
            at: linear(state, f"{NAME}.in_head", x) for at, x in zip(places, mixed, strict=True)
        }
        return out, into, linear(state, f"{NAME}.anchor_out_head", anchor)

    def _input(self, d: int, k: int) -> Tensor:
        state, top, log_q = self.state, self.config.top_k, self.log_q[d]
        x = state["embed_tokens.weight"][self.tokens[d][k]].detach()
        if f"{NAME}.token_proj.weight" in state:
            x = linear(state, f"{NAME}.token_proj", x)
        x = x + linear(state, f"{NAME}.pass_hidden_proj", self.states[d])
        own, best = log_q[self.tokens[d][k]], log_q[self.tokens[d][0]]
        rank = torch.tensor([k / max(1, top - 1), float(k == 0)], dtype=torch.float64)
        features = torch.cat([torch.stack([own, own.exp(), own - best]), rank])
        middle = features - features.mean()
        normed = middle / torch.sqrt((middle * middle).mean() + 1e-5)
        norm = f"{NAME}.feature_norm"
        normed = normed * state[f"{norm}.weight"] + state[f"{norm}.bias"]
        x = x + mlp(state, f"{NAME}.feature_mlp", normed)
        return (
            x
            + state[f"{NAME}.slot_embedding"][0, 0, d, 0]
            + (state[f"{NAME}.rank_embedding"][0, 0, 0, k])
        )

    def _layer(self, name: str, rows: list[Tensor], places: list[tuple[int, int]]) -> list[Tensor]:
        state, config = self.state, self.config
        normed = [config.norm(x, state[f"{name}.attn_norm.weight"]) for x in rows]
        weight, bias = state[f"{name}.attn.in_proj_weight"], state[f"{name}.attn.in_proj_bias"]
        q, k, v = zip(*((weight @ x + bias).chunk(3) for x in normed), strict=True)
        by_distance, within = state[f"{NAME}.relative_slot_bias"], state[f"{NAME}.same_slot_bias"]
        size, width = len(q[0]), len(q[0]) // len(within)
        out = []
        for i, (slot, _) in enumerate(places):
            heads = []
            for head, part in enumerate(slice(a, a + width) for a in range(0, size, width)):
                distances = [slot - other + config.block_size - 1 for other, _ in places]
                same = torch.tensor([float(slot == other) for other, _ in places]).double()
                logits = torch.stack([x[part] for x in k]) @ q[i][part] / math.sqrt(width)
                logits = logits + by_distance[head, distances] + within[head] * same
                heads.append(torch.softmax(logits, 0) @ torch.stack([x[part] for x in v]))
            x = rows[i] + linear(state, f"{name}.attn.out_proj", torch.cat(heads))
            y = config.norm(x, state[f"{name}.mlp_norm.weight"])
            out.append(x + mlp(state, f"{name}.mlp", y))
        return out

    def cosine(self, a: Tensor, b: Tensor) -> Tensor:
        """Return the cosine of two vectors, none of which is taken for shorter than eps."""
        lengths = (torch.sqrt(x @ x).clamp_min(self.config.vector_eps) for x in (a, b))
        return a @ b / math.prod(lengths)

    def scores(self, d: int, unary: Tensor, tokens: Iterable[int]) -> Tensor:
        """Return the scores [K] of the candidates of draft d after the document's token."""
        out, into, first = self.vectors
        before = first
        if d:
            known = self.document.x[self.anchor + d]
            if known not in self.tokens[d - 1]:  # serving never gets here
                return self.log_q[d][self.tokens[d]]
            before = out[d - 1, self.tokens[d - 1].index(known)]
        cosines = [self.cosine(before, into[d, k]) for k in range(self.config.top_k)]
        return self.config.logit_scale * torch.stack(cosines)
