"""DFlash 2: convolutions inside the blocks, and a selector that walks through their candidates.

Convolution. Slot i of a block, channel c of group g(c), taps t = 0..w-1:

    out[i, c] = sum_t (base[t, c] + delta[i, t, g(c)]) * x[i - t, c],    x = 0 before the block

`delta` is a projection of the slot's sublayer input. Every attention and MLP sublayer has two such
convolutions, of its input (after the norm) and of its output (before the residual), whose deltas
come from one projection of that input. Both start as the identity. The context before the anchor is
not convolved. Slots are counted from the anchor's.

Selector. The candidates of a slot are its K largest logits u. After the token p before it, the
score of candidate c is u[c] + <A[p] * P y, B[c]>, with tables A, B [V, r], P [r, H] and y the state
of the slot. Drafting walks from the anchor, which is verified; greedy drafting takes the best
candidate, and sampling draws from the softmax over the K candidates, which is the q that the
target's verification needs.

Loss of the selector: the cross-entropy of the K scores after the document's own tokens. Its token
is that of --loss-target: the document's, or for soft and hard targets the target's choice. Only in
this loss it replaces the last candidate if it is none.

The architecture and the names of its tensors are those of z-lab's DFlash 2, as vLLM, SGLang and the
speculators library read them. They have the full vocabulary and draft from the mask slots only.

B packs, N blocks of a pack, S slots, D drafts, K candidates, R drafts that count, H hidden size, G
groups of channels, w taps, r rank, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from spec_data.shards.errors import DraftError
from spec_train.attention.fused import fused
from spec_train.drafts.block.candidates import CandidateDraft, CandidateRows
from spec_train.drafts.block.config import DFlashConfig
from spec_train.drafts.block.draft import StageRows, StageTerm, Walk
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.dflash2.files import FILES
from spec_train.drafts.layers import Attend, DecoderLayer
from spec_train.losses.menu import RowStats, wide

_STD = 0.02  # initialisation of the selector, so that it starts near zero
_GATHERED = 1 << 24  # elements of gathered head rows in memory at a time


@dataclass(frozen=True, kw_only=True)
class DFlash2Config(DFlashConfig):
    """A DFlash draft with convolutions and a selector."""

    draft: ClassVar[str] = "dflash2"
    architectures: ClassVar[tuple[str, ...]] = (FILES.written,)
    stage_keys: ClassVar[tuple[str, ...]] = FILES.keys

    conv_kernel_size: int  # taps
    conv_group_size: int  # channels of a group
    selector_rank: int
    selector_top_k: int  # candidates of a slot

    def __post_init__(self) -> None:
        super().__post_init__()
        check_convolutions(self)
        if self.selector_top_k > self.vocab_size:
            raise DraftError(
                f"selector_top_k = {self.selector_top_k} is more than the vocabulary has tokens, "
                f"{self.vocab_size}"
            )
        self.require_published("DFlash 2")


def check_convolutions(config: Any) -> None:
    """Raise DraftError if a block cannot have the convolutions of a configuration."""
    taps, channels, size = config.conv_kernel_size, config.conv_group_size, config.hidden_size
    if bool(taps) != bool(channels):
        raise DraftError(
            f"conv_kernel_size = {taps} and conv_group_size = {channels}: both are 0, or none is"
        )
    if taps and size % channels:
        raise DraftError(f"conv_group_size = {channels} does not divide hidden_size = {size}")
    if taps > config.block_size:
        raise DraftError(
            f"conv_kernel_size = {taps} is more than block_size = {config.block_size}: its last "
            "taps would read nothing"
        )


class BlockConvolution(nn.Module):
    """The two convolutions of a sublayer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._slots, self._groups = config.block_size, config.hidden_size // config.conv_group_size
        self._taps = taps = config.conv_kernel_size
        base = torch.zeros(2, taps, config.hidden_size)
        base[:, 0] = 1
        self.base_kernel = nn.Parameter(base)  # of the input and of the output [2, w, H]
        width = 2 * taps * self._groups
        self.kernel_projection = nn.Linear(config.hidden_size, width, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def before(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Convolve a sublayer's input [B, Q, H]; return also the output's delta [B, Q, w, G]."""
        shape = 2, self._taps, self._groups
        inner, outer = self.kernel_projection(x).unflatten(-1, shape).unbind(-3)
        return self._convolve(x, inner, 0), outer

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        """Convolve a sublayer's output [B, Q, H]."""
        return self._convolve(x, delta, 1)

    def _convolve(self, x: Tensor, delta: Tensor, side: int) -> Tensor:
        return convolved(x, delta, self.base_kernel[side], self._slots)


@fused
def convolved(x: Tensor, delta: Tensor, base: Tensor, slots: int) -> Tensor:
    """Return x [B, Q, H], in blocks of so many slots, convolved by a base [w, H] with a delta
    [B, Q, w, G] of each group of channels.
    """
    taps, groups = len(base), (delta.shape[-1], -1)
    base = base.unflatten(-1, groups).to(x.dtype)  # [w, G, H/G]
    blocks = x.unflatten(-1, groups).unflatten(1, (-1, slots))  # [B, N, S, G, H/G]
    kernels = (base + delta[..., None]).unflatten(1, (-1, slots))  # [B, N, S, w, G, H/G]
    out = kernels[..., 0, :, :] * blocks
    for tap in range(1, taps):
        moved = F.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))  # zero before the block
        out = out + kernels[..., tap, :, :] * moved
    return out.flatten(1, 2).flatten(-2)


class ConvolvedLayer(DecoderLayer):
    """A decoder layer whose two sublayers are convolved along the slots of every block."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.attention_conv, self.mlp_conv = BlockConvolution(config), BlockConvolution(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map the slots of whole blocks [B, N*S, H], as `DecoderLayer.forward`."""
        u, delta = self.attention_conv.before(self.input_layernorm(x))
        q = self.self_attn.queries(u, cos, sin)
        heads = attend(q, *self.self_attn.keys_values(u, cos, sin))
        x = x + self.attention_conv.after(self.self_attn.join(heads), delta)
        u, delta = self.mlp_conv.before(self.post_attention_layernorm(x))
        return x + self.mlp_conv.after(self.mlp(u), delta)


class CandidateSelector(nn.Module):
    """Scores of tokens after a token."""

    def __init__(self, vocab: int, hidden: int, rank: int) -> None:
        super().__init__()
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))  # A
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))  # B
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)
        for weight in self.parameters():
            nn.init.normal_(weight, std=_STD)

    def forward(self, y: Tensor, previous: Tensor, candidates: Tensor) -> Tensor:
        """Return <A[p] * P y, B[c]> [..., K].

        Args:
            y: states [..., H].
            previous: the token before each, int64 [...].
            candidates: tokens, int64 [..., K].
        """
        context = F.embedding(previous, self.predecessor_codebook) * self.hidden_projection(y)
        return (context[..., None, :] * F.embedding(candidates, self.successor_codebook)).sum(-1)


class SelectorWalk(Walk):
    """Scores the candidates of every draft after the token that was drafted before it."""

    draft: "DFlash2Draft"

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        y, logits = self.slot()  # [..., H], [..., V]
        unary, candidates = logits.topk(self.draft.config.selector_top_k)  # [..., K]
        return unary + self.draft.candidate_selector(y, previous, candidates), candidates, None


class SelectorRows(CandidateRows):
    """The selector's loss, and what serving drafts with it."""

    draft: "DFlash2Draft"

    @property
    def candidates(self) -> int:  # type: ignore[override]
        return int(self.draft.config.selector_top_k)

    def term(self, hidden: Tensor, head_rows: Tensor, figures: RowStats) -> StageTerm:
        chosen, served = self.chosen, figures.candidates  # [R, K]
        assert served is not None and figures.probability is not None  # asked for, see above
        choice = chosen.choice
        tokens = self.draft.options.compared_with == "tokens"
        label = chosen.token if tokens else choice.clamp_min(0)  # [R]
        asked = torch.cat([served, label[:, None]], dim=1)  # [R, K + 1]
        previous = chosen.previous.flatten()[chosen.rows]
        scores = candidate_logits(hidden.to(head_rows.dtype), head_rows, asked)
        scores = scores + self.draft.candidate_selector(hidden, previous, asked).to(scores.dtype)
        is_label = served == label[:, None]
        place = torch.where(is_label.any(1), is_label.int().argmax(1), served.shape[1] - 1)
        # The label stands in the last place if it is no candidate.
        last = torch.where(is_label.any(1), scores[:, -2], scores[:, -1])
        trained = torch.cat([scores[:, :-2], last[:, None]], dim=1)  # [R, K]
        losses = F.cross_entropy(trained, place, reduction="none")
        figures, sums = self.judged(served, scores[:, :-1], figures.probability, figures)
        options, rows = self.draft.options, None
        if options.smoothing is not None:
            rows = chosen.paced(losses, options.smoothing)
        return StageTerm(losses, options.selector_weight, figures, sums, rows=rows)


class DFlash2Draft(CandidateDraft):
    """The draft that `spec-train fit dflash2` trains."""

    config_class: ClassVar[type[DraftConfig]] = DFlash2Config
    walk_class: ClassVar[type[Walk]] = SelectorWalk
    rows_class: ClassVar[type[StageRows]] = SelectorRows
    stage_term: ClassVar[str] = "selector_loss"

    def make_layer(self) -> nn.Module:
        return ConvolvedLayer(self.config)

    def make_stage(self) -> None:
        config = self.config
        sizes = config.vocab_size, config.hidden_size, config.selector_rank
        self.candidate_selector = CandidateSelector(*sizes)


def candidate_logits(hidden: Tensor, weight: Tensor, candidates: Tensor) -> Tensor:
    """Return the logits [R, K] of tokens int64 [R, K], for states [R, H] and head rows [V, H].

    The gathered rows [R, K, H] exist for some of the R states at a time, and are gathered again for
    the gradient.
    """

    def some(y: Tensor, ids: Tensor) -> Tensor:
        if y.dtype in (torch.bfloat16, torch.float16):  # rounded once, as the head's product is
            return wide((weight[ids] @ y[..., None])[..., 0])
        return (y[:, None] * weight[ids]).sum(-1)

    size = max(1, _GATHERED // max(1, candidates.shape[1] * weight.shape[1]))
    parts = zip(hidden.split(size), candidates.split(size), strict=True)
    return torch.cat([checkpoint(some, y, ids, use_reentrant=False) for y, ids in parts])
