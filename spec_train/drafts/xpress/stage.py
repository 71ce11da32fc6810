"""XPress: a causal refiner, which moves the logits of a slot by the tokens of the block before it.

Slot k = 0, 1, .. of a block has the state y_k; the anchor's is slot 0, and drafts nothing. With t_k
the token before slot k, the anchor itself for slots 0 and 1, and g the mean of the states of all
slots,

    x_k = In [H y_k; G g; W1 t_k]
    u_k = x_k + sum over j <= k of L[:, k, j] * x_j
    v_k = u_k + Down(silu(Gate u_k) * Up u_k)
    logits_k = W y_k + W2 v_k,    W: rows of the target's LM head

L is of this number of slots, and starts at 0.

Here the slots are drafted left to right. vLLM computes all slots at once, `xpress_num_passes`
times, each time after the tokens of the time before: with greedy drafts, the first n tokens after n
passes are those of here, and the later ones may be others. By default it looks for them among the
512 tokens with the largest W y_k alone.

Loss: that of the logits after the document's tokens, as of Domino. A draft counts only if the
target keeps all drafts before it, so they are the document's. The trainer of speculators (0.9) adds
losses after the draft's own tokens, pass by pass.

Architecture, names of tensors and keys are those of vLLM 0.33.0 (arXiv 2608.02438). It has the full
vocabulary and drafts from the mask slots only.

B packs, N blocks of a pack, S slots, D = S - 1 drafts, H hidden size, r rank, V vocabulary.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_train.drafts.block.config import DFlashConfig
from spec_train.drafts.block.draft import Before, BlockDraft, StageRows, Walk
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.layers import GatedMLP
from spec_train.drafts.teacher import SharedTeacher
from spec_train.drafts.xpress.files import FILES
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import LowRank

_STD = 0.02  # initialisation of W1 and W2, so that the correction starts near zero


@dataclass(frozen=True, kw_only=True)
class XPressConfig(DFlashConfig):
    """A DFlash draft with a causal refiner."""

    draft: ClassVar[str] = "xpress"
    architectures: ClassVar[tuple[str, ...]] = (FILES.written,)
    stage_keys: ClassVar[tuple[str, ...]] = FILES.keys

    xpress_rank: int
    xpress_mlp_hidden: int
    xpress_num_passes: int  # of vLLM

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_published("XPress")

    def to_json(self, options: Any) -> dict[str, Any]:
        return super().to_json(options) | {"xpress_block_size": self.block_size}


class Mixer(nn.Module):
    """Adds to every slot a weighted sum of the slots up to it, channel by channel."""

    def __init__(self, rank: int, slots: int) -> None:
        super().__init__()
        self.L = nn.Parameter(torch.zeros(rank, slots, slots))  # a key of the file

    def forward(self, x: Tensor) -> Tensor:
        """Map all slots [..., S, r]."""
        return x + torch.einsum("rkj,...jr->...kr", self.L.tril(), x)

    def last(self, x: Tensor) -> Tensor:
        """Return the last [..., r] of the first n slots [..., n, r]."""
        n = x.shape[-2]
        return x[..., -1, :] + torch.einsum("rj,...jr->...r", self.L[:, n - 1, :n], x)


class RefinerHead(nn.Module):
    """What the logits of a slot gain, of the states of a block and the tokens before its slots."""

    def __init__(self, config: XPressConfig) -> None:
        super().__init__()
        size, r = config.hidden_size, config.xpress_rank
        self.w1 = nn.Embedding(config.vocab_size, r)
        self.w2 = nn.Linear(r, config.vocab_size, bias=False)
        self.down_h, self.down_g = (nn.Linear(size, r, bias=False) for _ in range(2))
        self.in_proj = nn.Linear(3 * r, r, bias=False)
        self.mix = Mixer(r, config.block_size)
        inside = {"intermediate_size": config.xpress_mlp_hidden, "mlp_bias": False}
        self.mlp = GatedMLP(SimpleNamespace(hidden_size=r, hidden_act="silu", **inside))
        for table in (self.w1, self.w2):
            nn.init.normal_(table.weight, std=_STD)

    def of_states(self, y: Tensor) -> Tensor:
        """Return the part of x [..., S, r] that the states y [..., S, H] of a block give."""
        parts = self.down_h(y), self.down_g(y.mean(-2, keepdim=True)).expand(*y.shape[:-1], -1)
        return F.linear(torch.cat(parts, -1), self.in_proj.weight[:, : 2 * self.w1.embedding_dim])

    def of_tokens(self, token_ids: Tensor) -> Tensor:
        """Return the part of x [..., r] that tokens int64 [...] before slots give."""
        weight = self.in_proj.weight[:, 2 * self.w1.embedding_dim :]
        return F.linear(self.w1(token_ids), weight)

    def refine(self, u: Tensor) -> Tensor:
        """Return v [..., r], which W2 multiplies, of u [..., r]."""
        return u + self.mlp(u)


class RefinerWalk(Walk):
    """Corrects the logits of every draft by the tokens of the block before it."""

    draft: "XPressDraft"

    def __init__(self, draft: Any, head: TargetHead, states: Tensor, before: Before) -> None:
        super().__init__(draft, head, states, before)
        self._of_states = draft.xpress_head.of_states(states)  # [..., S, r]

    def pick(self, paths: Tensor) -> None:
        super().pick(paths)
        self._of_states = self._of_states[paths]

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        head, token = self.draft.xpress_head, self.draft.xpress_head.of_tokens(previous)
        slot = self._depth + self.draft.config.first
        if self._state is None:  # the anchor is before its own slot, too
            self._state = self._of_states[..., :slot, :] + token[..., None, :]
        new = self._of_states[..., slot, :] + token
        self._state = torch.cat([self._state, new[..., None, :]], dim=-2)  # x up to this slot
        _, logits = self.slot()
        return logits + head.w2(head.refine(head.mix.last(self._state))), None, None


class RefinerRows(StageRows):
    """The corrections of the drafts that count."""

    draft: "XPressDraft"

    def bias(self, y: Tensor, shared: SharedTeacher) -> LowRank:
        head, chosen, first = self.draft.xpress_head, self.chosen, self.draft.config.first
        assert chosen.states is not None
        before = torch.cat([chosen.previous[..., :first], chosen.previous], dim=-1)  # [B, N, S]
        x = head.of_states(chosen.states) + head.of_tokens(before)
        latent = head.refine(head.mix(x))[..., first:, :]
        return LowRank(latent.flatten(0, 2)[chosen.rows], head.w2.weight)


class XPressDraft(BlockDraft):
    """The draft that `spec-train fit xpress` trains."""

    config_class: ClassVar[type[DraftConfig]] = XPressConfig
    walk_class: ClassVar[type[Walk]] = RefinerWalk
    rows_class: ClassVar[type[StageRows]] = RefinerRows

    def make_stage(self) -> None:
        self.xpress_head = RefinerHead(self.config)
