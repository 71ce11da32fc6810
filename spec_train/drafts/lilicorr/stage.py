"""LiLiCorr: a second stage that scores the steps between the candidates of neighbouring slots.

The candidates of a slot are its K most probable tokens. They form a lattice of D slots, seen by a
small transformer in both directions. The input of candidate k of slot d is

    T e + P y + F(log q, q, log q - log q of the first, k / (K - 1), [k = 0]) + slot_d + rank_k

with e its embedding (the target's, no gradient), y the state of its slot, log q its log-probability
in the whole vocabulary, T the identity if the widths are equal. A layer is x + attention(norm x)
and x + MLP(norm x); its attention has a bias by the distance of the slots, and one within a slot.
With x the normed output and a the normed projection of the anchor, h = silu(G [x; a; x * a]). The
anchor is c of the position before the block, hidden_norm(fc(states)), or 0 where a document starts.
Scores are `lilicorr_logit_scale` times cosines:

    first slot: cos(A a, I h_c);    after candidate p of the slot before: cos(O h_p, I h_c)

Drafting walks left to right; greedy drafting takes the best candidate, and sampling draws from the
softmax of a slot's K scores, which is the q that the target's verification needs. The backbone's
probabilities enter as features only.

Loss: that of DFlash, and for the drafts d of a block with all candidates 0..d the document's tokens

    lattice_weight * cross-entropy of the K scores after the document's own tokens
    + margin_weight * relu(margin - (score of the token - best other score))
    + penalty_weight * sum_k softmax(scores)_k relu(log p(token) - log p(k)),    p: the target

Only blocks whose drafts all count have it, as published. Gradients reach the backbone through y and
log q.

Architecture, keys and the loss are those of NVIDIA's ModelOpt 0.48.0rc1 (arXiv 2608.20530), the
names of tensors those that SGLang 0.5.23 loads; ModelOpt's are read too. As in both, the blocks may
have the convolutions of DFlash 2. What differs here: the terms are divided by the weights of all
drafts of the step, which are known before the draw, and not by the number of drafts that have them;
log p is that of the smallest normal number where p is less; ModelOpt's optional calibration term is
left out. Assumed, because no source says it: a draft after a token that is no candidate of its
slot, which serving never meets, has the backbone's log q as scores, and counts in metrics only.

X blocks, D drafts of a block, K candidates, R drafts that count, H hidden size, h width of the
transformer, V vocabulary.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from spec_data.models.families import TargetShape
from spec_data.shards.errors import DraftError
from spec_data.shards.schema import Manifest
from spec_train.drafts.block.candidates import CandidateDraft, CandidateRows
from spec_train.drafts.block.config import DFlashConfig
from spec_train.drafts.block.draft import (
    Before,
    StageRows,
    StageTerm,
    Walk,
)
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.dflash2.stage import ConvolvedLayer, check_convolutions
from spec_train.drafts.layers import DecoderLayer, RMSNorm
from spec_train.drafts.lilicorr.files import FILES
from spec_train.losses.head import TargetHead
from spec_train.losses.menu import RowStats, rows_per_chunk, wide

_STD = 0.02  # initialisation of the projections
_FEATURES = 5


@dataclass(frozen=True, kw_only=True)
class LiLiCorrConfig(DFlashConfig):
    """A DFlash draft with a transformer over the lattice of its candidates."""

    draft: ClassVar[str] = "lilicorr"
    architectures: ClassVar[tuple[str, ...]] = (FILES.written,)
    stage_keys: ClassVar[tuple[str, ...]] = FILES.keys

    conv_kernel_size: int  # taps of the convolutions of DFlash 2; 0: none
    conv_group_size: int
    lilicorr_candidate_topk: int  # K
    lilicorr_hidden_size: int  # h
    lilicorr_num_layers: int
    lilicorr_num_heads: int
    lilicorr_mlp_ratio: float  # width inside an MLP, in h
    lilicorr_factor_dim: int  # width of the vectors whose cosine is a score
    lilicorr_vector_eps: float  # least length that such a vector is divided by
    lilicorr_logit_scale: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_convolutions(self)
        heads, size = self.lilicorr_num_heads, self.lilicorr_hidden_size
        if size % heads:
            raise DraftError(
                f"lilicorr_num_heads = {heads} does not divide lilicorr_hidden_size = {size}"
            )
        if not 1 <= self.lilicorr_candidate_topk <= self.vocab_size:
            raise DraftError(
                f"lilicorr_candidate_topk = {self.lilicorr_candidate_topk}: at least 1, at most "
                f"the tokens of the vocabulary, {self.vocab_size}"
            )
        if min(self.lilicorr_vector_eps, self.lilicorr_logit_scale, self.lilicorr_mlp_ratio) <= 0:
            raise DraftError(
                "lilicorr_vector_eps, lilicorr_logit_scale and lilicorr_mlp_ratio are above 0"
            )
        self.require_published("LiLiCorr")

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        own = super().from_options(options, shape)
        return own if own["conv_kernel_size"] else own | {"conv_group_size": 0}

    def table_json(self) -> dict[str, Any]:
        return super().table_json() | {"projector_type": "lilicorr", "lilicorr_enabled": True}


class Mlp(nn.Module):
    """Two projections with biases, and silu between them."""

    def __init__(self, size: int, middle: int, out: int) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(size, middle), nn.Linear(middle, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)))


class LatticeAttention(nn.Module):
    """Attention among all candidates of a block, with a bias; weights as torch's own has them."""

    def __init__(self, size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.empty(3 * size, size))
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * size))
        self.out_proj = nn.Linear(size, size)
        nn.init.xavier_uniform_(self.in_proj_weight)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Map [X, D*K, h] with a bias [heads, D*K, D*K]."""
        parts = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        heads = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype)[None])
        return self.out_proj(heads.transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """Attention and MLP, each after a norm and added to its input."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        size, eps = config.lilicorr_hidden_size, config.rms_norm_eps
        self.attn_norm, self.mlp_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.attn = LatticeAttention(size, config.lilicorr_num_heads)
        self.mlp = Mlp(size, int(size * config.lilicorr_mlp_ratio), size)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LiLiCorrHead(nn.Module):
    """The transformer over the lattice, and the scores of its steps."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        self.config = config
        wide_size, size, eps = config.hidden_size, config.lilicorr_hidden_size, config.rms_norm_eps
        slots, top, factors = (
            config.depth,
            config.lilicorr_candidate_topk,
            config.lilicorr_factor_dim,
        )
        if size != wide_size:
            self.token_proj = nn.Linear(wide_size, size)
        self.pass_hidden_proj = nn.Linear(wide_size, size)
        self.feature_norm = nn.LayerNorm(_FEATURES)
        self.feature_mlp = Mlp(_FEATURES, size, size)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, slots, 1, size))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, top, size))
        # of the distances -(S - 1) .. S - 1 of slots
        self.relative_slot_bias = nn.Parameter(
            torch.zeros(config.lilicorr_num_heads, 2 * config.block_size - 1)
        )
        self.same_slot_bias = nn.Parameter(torch.zeros(config.lilicorr_num_heads))
        self.context_proj = nn.Linear(wide_size, size)
        layers = [LatticeLayer(config) for _ in range(config.lilicorr_num_layers)]
        self.layers = nn.ModuleList(layers)
        self.output_norm, self.anchor_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.factor_input_proj = nn.Linear(3 * size, size)
        self.out_head = nn.Linear(size, factors)
        self.in_head = nn.Linear(size, factors)
        self.anchor_out_head = nn.Linear(size, factors)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_STD)
                nn.init.zeros_(module.bias)

    def forward(
        self,
        tokens: Tensor,  # embeddings of the candidates [X, D, K, H]
        log_q: Tensor,  # their log-probabilities [X, D, K], descending
        y: Tensor,  # states of the slots [X, D, H]
        before: Tensor,  # states of the context before the anchors [X, H]
        valid: Tensor,  # whether there are any, bool [X]
    ) -> tuple[Tensor, Tensor]:
        """Return the scores of the first slot [X, K], and after the candidates [X, D-1, K, K]."""
        slots, top = log_q.shape[1:]
        x = tokens if not hasattr(self, "token_proj") else self.token_proj(tokens)
        x = x + self.pass_hidden_proj(y)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(_features(log_q).to(x.dtype)))
        x = x + self.slot_embedding[0].to(x.dtype) + self.rank_embedding[0].to(x.dtype)
        x, bias = x.flatten(1, 2), self._bias(slots, top)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (slots, top))
        anchor = self.context_proj(before)
        anchor = self.anchor_norm(anchor * valid[:, None].to(anchor.dtype))  # [X, h]
        same = anchor[:, None, None].expand_as(x)
        mixed = F.silu(self.factor_input_proj(torch.cat([x, same, x * same], dim=-1)))
        out, into = self._unit(self.out_head(mixed)), self._unit(self.in_head(mixed))
        first = self._unit(self.anchor_out_head(anchor))  # [X, f]
        scale = self.config.lilicorr_logit_scale
        start = (first[:, None] * into[:, 0]).sum(-1)
        return scale * start, scale * (out[:, :-1] @ into[:, 1:].transpose(-1, -2))

    def _unit(self, x: Tensor) -> Tensor:
        return F.normalize(wide(x), dim=-1, eps=self.config.lilicorr_vector_eps)

    def _bias(self, slots: int, top: int) -> Tensor:
        """Return what is added to the attention's logits [heads, D*K, D*K]."""
        at = torch.arange(slots, device=self.same_slot_bias.device).repeat_interleave(top)
        distance = at[:, None] - at
        by_distance = self.relative_slot_bias[:, distance + self.config.block_size - 1]
        return by_distance + (distance == 0) * self.same_slot_bias[:, None, None]


def _features(log_q: Tensor) -> Tensor:
    """Return what a candidate's place says [..., K, 5] of log-probabilities [..., K]."""
    top = log_q.shape[-1]
    rank = torch.arange(top, device=log_q.device, dtype=log_q.dtype) / max(1, top - 1)
    gap = log_q - log_q.amax(-1, keepdim=True)
    marks = (mark.expand_as(log_q) for mark in (rank, (rank == 0).to(log_q.dtype)))
    return torch.stack([log_q, log_q.exp(), gap, *marks], dim=-1)


class _Candidates(torch.autograd.Function):
    """The K most probable tokens of rows of states, and their log-probabilities, chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
        rows, values, ids, means = rows_per_chunk(len(weight), weight.device), [], [], []
        for part in hidden.split(rows):
            logits = wide(F.linear(part, weight))
            best, tokens = logits.topk(top)
            total = logits.logsumexp(-1, keepdim=True)
            values.append(best - total)
            ids.append(tokens)
            if ctx.needs_input_grad[0]:  # d total / d hidden
                means.append(logits.sub_(total).exp_().to(weight.dtype) @ weight)
        chosen = torch.cat(ids)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(weight, chosen, torch.cat(means) if means else None)
        return torch.cat(values), chosen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        weight, ids, means = ctx.saved_tensors
        slope, out = grads[0], torch.empty_like(means)
        rows = max(1, rows_per_chunk(weight.shape[1] * ids.shape[1], weight.device))
        for part in torch.arange(len(ids), device=ids.device).split(rows):
            of_tokens = (slope[part, None].to(weight.dtype) @ weight[ids[part]])[:, 0]
            share = slope[part].sum(-1, keepdim=True).to(weight.dtype)
            # under autocast, the product of float32 weights is not float32
            out[part] = (of_tokens - share * means[part]).to(out.dtype)
        return out, None, None


@dataclass(frozen=True)
class Lattice:
    """The candidates of blocks and the scores of their steps."""

    ids: Tensor  # int64 [..., D, K], best first
    log_q: Tensor  # [..., D, K]
    start: Tensor  # [..., K]
    pair: Tensor  # [..., D - 1, K, K]: candidate of a slot, candidate of the next one

    def scores(self, previous: Tensor) -> Tensor:
        """Return the scores [..., D, K] after the tokens before the drafts, int64 [..., D]."""
        rest = [self.after(d, previous[..., d]) for d in range(1, self.ids.shape[-2])]
        return torch.stack([self.start, *rest], dim=-2)

    def after(self, d: int, previous: Tensor) -> Tensor:
        """Return the scores [..., K] of draft d after a token, int64 [...]."""
        if d == 0:
            return self.start
        same = self.ids[..., d - 1, :] == previous[..., None]
        at = same.int().argmax(-1)[..., None, None].expand(*same.shape[:-1], 1, same.shape[-1])
        scores = self.pair[..., d - 1, :, :].gather(-2, at)[..., 0, :]
        return torch.where(same.any(-1, keepdim=True), scores, self.log_q[..., d, :])


class LatticeWalk(Walk):
    """Takes the scores of every draft's candidates after the token that was drafted before it."""

    def __init__(self, draft: Any, head: TargetHead, states: Tensor, before: Before) -> None:
        super().__init__(draft, head, states, before)
        self._lattice = draft.lattice(head, self._states, before)

    def pick(self, paths: Tensor) -> None:
        made = self._lattice
        parts = (x[paths] for x in (made.ids, made.log_q, made.start, made.pair))
        self._lattice = Lattice(*parts)

    def advance(self, previous: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        depth, self._depth = self._depth, self._depth + 1
        return self._lattice.after(depth, previous), self._lattice.ids[..., depth, :], None


class LatticeRows(CandidateRows):
    """The loss of the lattice, and what serving drafts from it."""

    draft: "LiLiCorrDraft"
    _made: tuple[Tensor, Tensor] | None = None  # scores [R, K]; bool [R]: has a loss

    @property
    def candidates(self) -> int:  # type: ignore[override]
        return int(self.draft.config.lilicorr_candidate_topk)

    def prepare(self, head: TargetHead, y: Tensor) -> None:
        chosen = self.chosen
        assert chosen.before is not None
        lattice = self.draft.lattice(head, y, chosen.before)
        token = torch.zeros_like(chosen.previous)
        token.view(-1)[chosen.rows] = chosen.token
        among = (lattice.ids == token[..., None]).any(-1)  # [B, N, D]
        trained = among.int().cumprod(-1).bool() & chosen.drafted.all(-1, keepdim=True)
        scores = lattice.scores(chosen.previous)
        self.served = lattice.ids.flatten(0, 2)[chosen.rows]
        self._made = scores.flatten(0, 2)[chosen.rows], trained.flatten()[chosen.rows]

    def term(self, hidden: Tensor, head_rows: Tensor, figures: RowStats) -> StageTerm:
        served, p = figures.candidates, figures.probability  # [R, K]
        assert served is not None and p is not None
        options, token = self.draft.options, self.chosen.token
        if self._made is None:  # no draft counts
            scores, trained = p.to(figures.acceptance.dtype), token.bool()
        else:
            scores, trained = self._made
        weights = trained * (self.chosen.weight > 0)
        place = (served == token[:, None]).int().argmax(-1)  # any, where it has no weight
        losses = options.lattice_weight * F.cross_entropy(scores, place, reduction="none")
        right = scores.gather(1, place[:, None])
        if options.margin_weight and self.candidates > 1:
            others = scores.scatter(1, place[:, None], torch.finfo(scores.dtype).min)
            gap = right[:, 0] - others.amax(-1)
            losses = losses + options.margin_weight * F.relu(options.margin - gap)
        if options.penalty_weight:
            log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log().to(scores.dtype)
            worse = F.relu(log_p.gather(1, place[:, None]) - log_p)
            losses = losses + options.penalty_weight * (scores.softmax(-1) * worse).sum(-1)
        figures, sums = self.judged(served, scores, p, figures)
        return StageTerm(losses, 1.0, figures, sums, rows=weights.double())


class LiLiCorrDraft(CandidateDraft):
    """The draft that `spec-train fit lilicorr` trains."""

    config_class: ClassVar[type[DraftConfig]] = LiLiCorrConfig
    walk_class: ClassVar[type[Walk]] = LatticeWalk
    rows_class: ClassVar[type[StageRows]] = LatticeRows
    stage_term: ClassVar[str] = "lattice_loss"

    def make_layer(self) -> nn.Module:
        return (ConvolvedLayer if self.config.conv_kernel_size else DecoderLayer)(self.config)

    def make_stage(self) -> None:
        self.lilicorr = LiLiCorrHead(self.config)

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        super().check_data(options, manifest)
        if manifest.supervision.startswith("topk") and options.penalty_weight:
            raise DraftError(
                "the penalty of LiLiCorr needs the target's probabilities of all candidates, and a "
                "dataset of its K largest logits has only some; use --penalty-weight 0"
            )

    def lattice(self, head: TargetHead, y: Tensor, before: Before) -> Lattice:
        """Return the lattice of blocks with states y [..., D, H]."""
        rows, top = self.head_rows(head), self.config.lilicorr_candidate_topk
        log_q, ids = _Candidates.apply(y.flatten(0, -2).to(rows.dtype), rows, top)
        shape = *y.shape[:-1], top
        log_q, ids = log_q.view(shape), ids.view(shape)
        states, valid = before()
        blocks = y.flatten(0, -3) if y.ndim > 2 else y[None]
        flat = (blocks.shape[0], *shape[-2:])
        start, pair = self.lilicorr(
            *(self.embed(ids.view(flat)).detach(), log_q.view(flat), blocks),
            *(states.reshape(-1, states.shape[-1]), valid.reshape(-1)),
        )
        lead = y.shape[:-2]
        return Lattice(ids, log_q, start.view(*lead, top), pair.view(*lead, *pair.shape[1:]))
