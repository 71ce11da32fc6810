"""The slow loss of the lattice of LiLiCorr: a stage of the loss of blocks."""

from collections.abc import Iterable

import torch
from torch import Tensor

from spec_train.drafts.lilicorr import reference as lattice
from tests.spec_train.drafts.dflash2 import reference as dflash2
from tests.spec_train.drafts.dflash2.reference import count_chains
from tests.spec_train.drafts.dspark import reference as blocks
from tests.spec_train.drafts.dspark.reference import ReferenceConfig, reference_loss
from tests.spec_train.drafts.slow_layer import Document, State

__all__ = ["ReferenceConfig", "count_chains", "reference_logits", "reference_loss"]


class Block(lattice.Block, dflash2.Block):
    """A block that judges its drafts, and has a loss."""

    def weigh(self, d: int, w: float) -> float:
        """Return the weight of the loss of a draft."""
        x, m, depth = self.document.x, self.document.m, self.config.depth
        if not all(blocks.draft_counts(m, self.anchor, j) for j in range(depth)):
            return 0.0
        known = [x[self.anchor + 1 + j] in self.tokens[j] for j in range(d + 1)]
        return float(all(known) and w > 0)

    def loss(self, d: int, unary: Tensor, right: int) -> Tensor:
        token = self.document.x[self.anchor + 1 + d]
        if token not in self.tokens[d]:
            return torch.zeros((), dtype=torch.float64)
        at, scores = self.tokens[d].index(token), self.scores(d, unary, ())
        lattice, margin, penalty = self.config.lattice_weights
        log_p = torch.log_softmax(self.document.z[self.anchor + d], 0)[self.tokens[d]]
        total = -lattice * torch.log_softmax(scores, 0)[at]
        others = [scores[k] for k in range(len(scores)) if k != at]
        total = total + margin * torch.relu(2.0 - (scores[at] - torch.stack(others).max()))
        worse = torch.relu(log_p[at] - log_p)
        return total + penalty * (torch.softmax(scores, 0) * worse).sum()


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the scores of the candidates as drafts 0, 1, ..., -100 at other tokens [V]."""
    out: dict[tuple[int, int], Tensor] = {}
    for anchor in anchors:
        block = Block(state, config, document, anchor)
        for d in range(min(depth, len(document.x) - anchor)):
            scores = torch.full((len(config.head_rows),), -100.0, dtype=torch.float64)
            scores[block.tokens[d]] = block.scores(d, block.log_q[d], ())
            out[anchor, d] = scores
    return out
