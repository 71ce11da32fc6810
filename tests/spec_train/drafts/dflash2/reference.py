"""The slow loss of the selector of DFlash 2: a stage of the loss of blocks."""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts.block import reference as blocks
from spec_train.drafts.dflash2 import reference as selector
from tests.spec_train.drafts.dspark.reference import ReferenceConfig, reference_loss
from tests.spec_train.drafts.slow_layer import Document, Judged, State, Sums

__all__ = ["ReferenceConfig", "reference_logits", "reference_loss"]


class Block(selector.Block):
    """A block that judges its drafts, and has a loss."""

    def judge(self, d: int, unary: Tensor, judged: Judged) -> Judged:
        """Judge what serving drafts: nothing but the candidates."""
        tokens = self.candidates(unary)
        scores = self.scores(d, unary, tokens)
        log_q = torch.full_like(unary.detach(), -math.inf)
        log_q[tokens] = torch.log_softmax(scores.detach(), 0)
        return replace(
            judged, log_q=log_q, hit=tokens[int(scores.detach().argmax())] == judged.wanted
        )

    def loss(self, d: int, unary: Tensor, right: int) -> Tensor:
        """Return the cross-entropy of the candidates, of which `right` is one."""
        tokens = self.candidates(unary)
        if right not in tokens:
            tokens[-1] = right
        return -torch.log_softmax(self.scores(d, unary, tokens), 0)[tokens.index(right)]

    def weigh(self, d: int, w: float) -> float:
        """Return the weight of the loss of a draft."""
        return w

    def count(self, sums: Sums, d: int, unary: Tensor, judged: Judged, served: Judged) -> None:
        """Add the figures of the selector."""
        tokens = self.candidates(unary)
        among = judged.wanted in tokens
        mass = float(sum(judged.full[v] for v in tokens))
        for name, value in (
            ("number", 1.0),
            ("among", float(among)),
            ("right", float(served.hit)),
            ("mass", mass),
        ):
            sums[f"selector_{name}"] = sums.get(f"selector_{name}", 0.0) + value
        sums.setdefault("_among", {})[self.anchor, d] = among


def count_chains(sums: Sums, document: Document) -> None:
    """Add the chains of a selector that always chooses right."""
    depth = len(sums["hits"])
    oracle = Sums(depth)
    oracle.add_chains(sums.pop("_among", {}))
    before = sums.get("oracle_survive", [0.0] * depth)
    sums["oracle_survive"] = [a + b for a, b in zip(before, oracle["survive"], strict=True)]


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the scores [V] of all tokens as drafts 0, 1, ..., as if all were candidates."""
    out: dict[tuple[int, int], Any] = {}
    for anchor in anchors:
        slots = blocks.block_states(state, config, document, anchor)
        unary, _ = blocks.block_logits(state, config, document, anchor, states=slots)
        block = Block(state, config, document, anchor, slots)
        for d, logits in enumerate(unary[:depth]):
            out[anchor, d] = block.scores(d, logits, range(len(logits)))
    return out
