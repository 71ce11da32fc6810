"""Domino: a recurrent second stage, whose state after the block's tokens so far moves the logits.

A GRU reads the embeddings of the anchor and of the tokens drafted after it, from the state 0 at the
anchor. With s its state after the token before a draft, and y the state of the draft's slot,

    logits = W y + E2 silu(E1 [y; s]),    W: rows of the target's LM head

The first `pure_draft_prefix_len` drafts of a block have W y alone; the GRU reads their tokens too.

Loss: (1 - c) times that of these logits, plus c times that of W y alone, with the same labels and
weights. c falls linearly from `base_weight` to 0 over the share `base_decay` of the run's steps, so
the backbone learns first. Outside of training c is 0.

Architecture, names of tensors and keys, and the loss are those of NVIDIA's ModelOpt 0.47 and of
SpecForge 0.2; SGLang 0.5.23 reads the same files, with `pure_draft_prefix_len` = 1. Both layouts
exist (their `shift_label` is our layout anchor). The gates of the GRU stand in the order of
torch.nn.GRU: reset, update, new; there are no biases.

B packs, N blocks of a pack, D drafts of a block, R drafts that count, H hidden size, g width of the
GRU, r width between E1 and E2, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.shards.errors import DraftError
from spec_train.drafts.block.config import DFlashConfig
from spec_train.drafts.block.draft import BlockDraft, StageRows, StageTerm, Walk
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.domino.files import FILES
from spec_train.drafts.teacher import SharedTeacher
from spec_train.losses.menu import LowRank, RowStats
from spec_train.losses.metrics import Sums

_STD = 0.02  # initialisation of E1 and E2, so that the correction starts near zero


@dataclass(frozen=True, kw_only=True)
class DominoConfig(DFlashConfig):
    """A DFlash draft with a recurrent head."""

    draft: ClassVar[str] = "domino"
    architectures: ClassVar[tuple[str, ...]] = (FILES.written,)
    stage_keys: ClassVar[tuple[str, ...]] = FILES.keys

    emb_dim: int  # r
    gru_hidden_dim: int  # g
    pure_draft_prefix_len: int  # first drafts of a block without a correction

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_published("Domino", anchored=True)
        if not 0 <= self.pure_draft_prefix_len < self.depth:
            raise DraftError(
                f"pure_draft_prefix_len = {self.pure_draft_prefix_len}: at least 0, and less than "
                f"the {self.depth} drafts of a block"
            )

    @property
    def in_dflash_form(self) -> bool:
        return True

    def table_json(self) -> dict[str, Any]:
        facts = {"projector_type": "domino", "shift_label": self.sample_from_anchor}
        return super().table_json() | facts


class PrefixGru(nn.Module):
    """A GRU without biases; torch's own keeps its weights outside of what fsdp2 can split."""

    def __init__(self, size: int, width: int) -> None:
        """Make the weights of the three gates, of the input [3g, H] and of the state [3g, g]."""
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * width, size))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * width, width))
        for weight in self.parameters():
            nn.init.uniform_(weight, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, x: Tensor, state: Tensor | None) -> Tensor:
        """Return the next state [..., g] after an input [..., H]; None: the state is 0."""
        return self.step(F.linear(x, self.weight_ih_l0), state)

    def step(self, inputs: Tensor, state: Tensor | None) -> Tensor:
        """Return the next state [..., g]; `inputs` [..., 3g] is the projection of an input."""
        if state is None:
            state = inputs.new_zeros(*inputs.shape[:-1], self.weight_hh_l0.shape[1])
        ours, theirs = inputs.chunk(3, -1), F.linear(state, self.weight_hh_l0).chunk(3, -1)
        reset, update = (torch.sigmoid(a + b) for a, b in zip(ours[:2], theirs[:2], strict=True))
        new = torch.tanh(ours[2] + reset * theirs[2])
        return (1 - update) * new + update * state

    def block(self, x: Tensor) -> Tensor:
        """Return the states [..., D, g] after each of the inputs [..., D, H]."""
        state, states = None, []
        for inputs in F.linear(x, self.weight_ih_l0).unbind(-2):
            state = self.step(inputs, state)
            states.append(state)
        return torch.stack(states, dim=-2)


class DominoWalk(Walk):
    """Corrects the logits of every draft by the tokens of the block before it."""

    draft: "DominoDraft"

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        draft, corrected = self.draft, self._depth >= self.draft.config.pure_draft_prefix_len
        self._state = draft.prefix_gru(draft.embed(previous), self._state)
        y, logits = self.slot()  # [..., H], [..., V]
        if corrected:
            logits = logits + draft.embed_proj[2](draft.latent(y, self._state))
        return logits, None, None


class DominoRows(StageRows):
    """The corrections of the drafts that count, and the loss of the backbone without them."""

    draft: "DominoDraft"

    @property
    def share(self) -> float:  # type: ignore[override]
        return 1 - self.draft.base_share

    def bias(self, y: Tensor, shared: SharedTeacher) -> LowRank:
        draft, chosen = self.draft, self.chosen
        first = draft.config.pure_draft_prefix_len
        states = draft.prefix_gru.block(draft.embed(chosen.previous))  # [B, N, D, g]
        latent = draft.latent(y[..., first:, :], states[..., first:, :])
        latent = F.pad(latent, (0, 0, first, 0))  # 0: no correction
        return LowRank(latent.flatten(0, 2)[chosen.rows], draft.embed_proj[2].weight)

    def term(self, hidden: Tensor, head_rows: Tensor, figures: RowStats) -> StageTerm | None:
        if self.share == 1:
            return None
        total, alone = self.alone or (None, figures)  # no draft counts: the figures are empty
        right = alone.best == self.chosen.choice
        sums = {
            "base_right": right.sum().double(),
            "base_number": torch.ones_like(right, dtype=torch.float64).sum(),
        }
        return StageTerm(alone.loss, self.draft.base_share, figures, sums, total)


class DominoDraft(BlockDraft):
    """The draft that `spec-train fit domino` trains."""

    config_class: ClassVar[type[DraftConfig]] = DominoConfig
    walk_class: ClassVar[type[Walk]] = DominoWalk
    rows_class: ClassVar[type[StageRows]] = DominoRows
    stage_term: ClassVar[str] = "base_loss"

    def make_stage(self) -> None:
        config, size = self.config, self.config.hidden_size
        self.prefix_gru = PrefixGru(size, config.gru_hidden_dim)
        self.embed_proj: Any = nn.Sequential(
            nn.Linear(size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.vocab_size, bias=False),
        )
        for weight in self.embed_proj.parameters():
            nn.init.normal_(weight, std=_STD)

    @property
    def base_share(self) -> float:
        """The share c of the loss that is of the backbone's logits alone."""
        if not self.training:
            return 0.0
        left = 1 - self.progress / self.options.base_decay
        return float(self.options.base_weight * max(0.0, left))

    def latent(self, y: Tensor, state: Tensor) -> Tensor:
        """Return silu(E1 [y; s]) [..., r], which E2 multiplies, of y [..., H] and s [..., g]."""
        features = torch.cat([y, state.to(y.dtype)], dim=-1)
        return F.silu(F.linear(features, self.embed_proj[0].weight))

    @classmethod
    def summarise(cls, sums: Sums) -> dict[str, float | None]:
        """Add to the metrics of blocks, while c is above 0, of the backbone alone:

        - "base_loss": its loss, unweighted;
        - "base_accuracy": the share of the target's choices that it drafts.
        """
        out = super().summarise(sums)
        number = float(sums.get("base_number", 0.0))
        out["base_accuracy"] = float(sums["base_right"]) / number if number else None
        return out
