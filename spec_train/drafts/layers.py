"""Parts of drafts: norm, rotary embedding, gated MLP, a decoder layer; in the engines' arithmetic.

Rotary frequencies come from transformers' initialisers, the code that the target itself runs, or
from the dataset where the settings cannot express them. Two types depend on the length of a
sequence:

- longrope: every document has the factors that the dataset was captured with. Where they are not
  recorded, a document longer than `original_max_position_embeddings` uses the long factors for all
  its tokens; a shorter one uses the short factors. transformers decides by the longest row of a
  forward pass. Here each document decides for itself, so the result does not depend on the pack.
- dynamic: the frequencies are those of sequences up to `max_position_embeddings`. Longer sequences
  are not stretched: no dataset holds them, because the target has the same limit.

B packs, T slots, H hidden size, h / g query / key-value heads, d head size, r rotary dimensions
(r <= d).
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spec_data.models.rope_settings import rotary_table
from spec_data.shards.errors import DraftError
from spec_data.terminal.console import did_you_mean
from spec_train.attention.fused import fused, fuses

T = TypeVar("T")
BEST_ROWS = 256  # rows of logits in memory at a time in `argmax_by_chunks`


class RMSNorm(nn.Module):
    """Root-mean-square norm: computes in at least float32, returns the input's dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of [..., size]."""
        return rms_norm(x, self.weight, self.eps, lower_dtype(x))


def lower_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast where chains are compiled; None elsewhere.

    A norm under autocast returns float32, and every product that reads it casts it for itself.
    """
    kind = x.device.type
    cast = fuses(x.device) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if cast else None


@fused
def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None) -> Tensor:
    """Return x [..., size] over its root mean square, times a weight [size]; None: its dtype."""
    precise = x if x.dtype == torch.float64 else x.float()
    precise = precise * torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + eps)
    out = weight * precise.to(x.dtype)
    return out if dtype is None else out.to(dtype)


class Rotary(nn.Module):
    """Cosines and sines of positions. A cast of the module leaves the frequencies in float32."""

    inv_freq: Tensor
    long_inv_freq: Tensor | None

    def __init__(self, config: Any) -> None:
        """Take the rotary embedding of a draft's configuration, or of a `TargetShape`."""
        super().__init__()
        table = rotary_table(config)
        self._exact, self.factor = table.inv_freq, table.factor
        self._exact_long, self.limit = table.long_inv_freq, table.limit
        self.register_buffer("inv_freq", self._exact.clone(), persistent=False)
        self.register_buffer("long_inv_freq", self._exact_long, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> "Rotary":
        """Move with the module to its device, but keep float32."""
        super()._apply(fn, recurse)
        self.inv_freq = self._exact.to(self.inv_freq.device)
        if self._exact_long is not None:
            self.long_inv_freq = self._exact_long.to(self.inv_freq.device)
        return self

    def forward(
        self,
        position_ids: Tensor,  # int64 [B, T]
        # tokens of the document that each slot belongs to, int64 [B, T]; only longrope reads it.
        # None: a row is one document that ends at its largest position
        lengths: Tensor | None = None,
        dtype: torch.dtype = torch.float32,  # of the inputs
    ) -> tuple[Tensor, Tensor]:
        """Return cos and sin [B, T, r], float64 if `dtype` is float64, else float32."""
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        inv_freq = self.inv_freq
        if self.limit is not None and self.long_inv_freq is not None:
            if lengths is None:
                lengths = position_ids.amax(-1, keepdim=True) + 1
            inv_freq = torch.where(
                (lengths > self.limit)[..., None], self.long_inv_freq, self.inv_freq
            )
        angles = position_ids[..., None].to(precise) * inv_freq.to(precise)  # [B, T, r/2]
        angles = torch.cat([angles, angles], dim=-1)  # [B, T, r]
        return angles.cos() * self.factor, angles.sin() * self.factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first r dimensions of heads [B, h, T, d] by cos, sin [B, T, r]; keep the rest."""
    size = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)  # [B, 1, T, r]
    turned, rest = x[..., :size], x[..., size:]
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([turned, rest], dim=-1) if rest.shape[-1] else turned


def per_window(windows: Sequence[Any], make: Callable[[Any], T]) -> list[T]:
    """Return what `make` makes of every layer's window; it is called once for each of them."""
    made = {window: make(window) for window in dict.fromkeys(windows)}
    return [made[window] for window in windows]


def run_layer(layer: Callable[..., Any], *arguments: Any, recompute: bool) -> Any:
    """Call a layer. With `recompute`, keep no activations; the backward pass calls it again.

    So the layer must be deterministic: the same arguments, the same result, no random numbers.
    """
    if not (recompute and torch.is_grad_enabled()):
        return layer(*arguments)
    return checkpoint(layer, *arguments, use_reentrant=False, preserve_rng_state=False)


def argmax_by_chunks(logits: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    """Return the index of the largest logit for states [..., H], int64 [...].

    `logits` maps [n, H] to [n, V]. At most `BEST_ROWS` rows of logits exist at a time.
    """
    parts = [logits(part).argmax(-1) for part in states.flatten(0, -2).split(BEST_ROWS)]
    return torch.cat(parts).view(states.shape[:-1])


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Queries [B, h, Q, d], keys and values [B, g, Q, d] of the same rows -> heads [B, h, Q, d]."""


def activation(name: str) -> nn.Module:
    """Return an activation without weights, by its name in transformers.

    Raises:
        DraftError: there is none.
    """
    if name == "silu":  # nearly all drafts: transformers takes seconds to import
        return nn.SiLU()
    from transformers.activations import ACT2FN

    if name not in ACT2FN:
        advice = did_you_mean(str(name), list(ACT2FN))
        raise DraftError(
            f"hidden_act = {name!r}: transformers has no such activation{advice} Known: "
            f"{', '.join(sorted(ACT2FN))}"
        )
    made = ACT2FN[name]
    if any(True for _ in made.parameters()):
        raise DraftError(f"hidden_act = {name!r}: an activation with weights is not supported")
    return made


# The `shape` of these modules is the draft's configuration.


class GatedMLP(nn.Module):
    """down(act(gate x) * up x)."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        hidden, inside, bias = shape.hidden_size, shape.intermediate_size, shape.mlp_bias
        self.gate_proj = nn.Linear(hidden, inside, bias=bias)
        self.up_proj = nn.Linear(hidden, inside, bias=bias)
        self.down_proj = nn.Linear(inside, hidden, bias=bias)
        self.act = activation(shape.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., H] to [..., H]."""
        return self.down_proj(gated(self.gate_proj(x), self.up_proj(x), self.act))


@fused
def gated(gate: Tensor, up: Tensor, act: nn.Module) -> Tensor:
    """Return act(gate) * up, of tensors of one shape."""
    return act(gate) * up


@fused
def turned(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype | None,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Return the heads [B, h, T, d] of x [B, T, h, d], normed if there is a weight, and rotated."""
    if weight is not None:
        x = rms_norm(x, weight, eps, dtype)
    return rotate(x.transpose(1, 2), cos, sin)


class Attention(nn.Module):
    """Projections, norms and rotation of grouped-query attention. The caller attends.

    W is the width of the inputs, `input_size`; None: H.
    """

    def __init__(self, shape: Any, input_size: int | None = None) -> None:
        super().__init__()
        size, width, bias = shape.head_dim, input_size or shape.hidden_size, shape.attention_bias
        self.head_dim = size
        self.q_proj = nn.Linear(width, shape.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=bias)
        self.v_proj = nn.Linear(width, shape.num_key_value_heads * size, bias=bias)
        self.o_proj = nn.Linear(shape.num_attention_heads * size, shape.hidden_size, bias=bias)
        if shape.qk_norm:
            self.q_norm = RMSNorm(size, shape.rms_norm_eps)
            self.k_norm = RMSNorm(size, shape.rms_norm_eps)
        self.attention_sink_bias = None
        if getattr(shape, "attention_sink_bias", False):
            self.attention_sink_bias = nn.Parameter(torch.zeros(shape.num_attention_heads))
        self._qk_norm = shape.qk_norm

    def _heads(self, x: Tensor) -> Tensor:
        """Split [B, T, h*d] into [B, T, h, d]."""
        return x.unflatten(-1, (-1, self.head_dim))

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated queries [B, h, T, d] of inputs [B, T, W]; cos, sin are [B, T, r]."""
        q = self._heads(self.q_proj(x))
        return self._turned(q, "q_norm", cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return rotated keys, and values, both [B, g, T, d], of inputs [B, T, W]."""
        k, v = self._heads(self.k_proj(x)), self._heads(self.v_proj(x)).transpose(1, 2)
        return self._turned(k, "k_norm", cos, sin), v

    def _turned(self, x: Tensor, norm: str, cos: Tensor, sin: Tensor) -> Tensor:
        if not self._qk_norm:
            return turned(x, None, 0.0, None, cos, sin)
        module = getattr(self, norm)
        return turned(x, module.weight, module.eps, lower_dtype(x), cos, sin)

    def join(self, heads: Tensor) -> Tensor:
        """Map attention heads [B, h, T, d] to [B, T, H]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class DecoderLayer(nn.Module):
    """The pre-norm decoder layer of Llama or, with `qk_norm`, of Qwen3."""

    def __init__(self, shape: Any) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = GatedMLP(shape)

    def inputs(self, x: Tensor) -> Tensor:
        """Return the attention input [B, T, H] of [B, T, H]."""
        return self.input_layernorm(x)

    def outputs(self, u: Tensor, x: Tensor, heads: Tensor) -> Tensor:
        """Return the output [B, T, H] of the residual x [B, T, H] and attention heads.

        `heads` are [B, h, T, d]; `u`, the attention input, is not used.
        """
        x = x + self.self_attn.join(heads)
        return x + self.mlp(self.post_attention_layernorm(x))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        """Map [B, T, H] to [B, T, H], at the positions of cos, sin [B, T, r].

        `attend` receives the queries, keys and values of these rows. It adds masks, caches and
        further keys.
        """
        u, attention = self.inputs(x), self.self_attn
        q = attention.queries(u, cos, sin)
        return self.outputs(u, x, attend(q, *attention.keys_values(u, cos, sin)))
