"""What the slow references of all drafts share: plain formulas for one vector at a time.

Nothing here comes from the fast code. `state` holds the tensors of a checkpoint. There is a bias or
a norm of heads where the checkpoint has one.

A reference is a float64 oracle: no batch, no packing, no mask tensor, no shifted frame, no chunk.
Everything is indexed by the token positions of ONE document, so an error of the fast code in a
shift, mask or boundary cannot occur in it. Gradients come from autograd. Weights have the
checkpoint's keys, so the names are tested too.

T tokens of a document, n captured layers, H hidden size, V / Vd target / draft vocabulary, d head
size.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes and arithmetic of a layer, from the checkpoint's config.json."""

    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_inv_freq: Tensor  # [rotary dimensions / 2]
    rope_factor: float = 1.0  # multiplies cos and sin (yarn, longrope)
    act: str = "silu"

    @functools.cached_property
    def _turns(self) -> dict[int, tuple[Tensor, Tensor]]:
        return {}

    def turn(self, position: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of a position's angles [rotary dimensions / 2], times the factor."""
        if position not in self._turns:
            angle = position * self.rope_inv_freq.double()
            self._turns[position] = self.rope_factor * angle.cos(), self.rope_factor * angle.sin()
        return self._turns[position]

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms(x, weight, self.rms_norm_eps)


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: nothing shifted, nothing padded."""

    x: Sequence[int]  # token ids, [T]
    aux: Tensor  # the states that the draft reads, [T, n*H] float64


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """Return weight @ x, and its bias if the checkpoint has one."""
    y = state[f"{name}.weight"] @ x
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [n] over its root mean square, times the weight [n]."""
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rope(vector: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + r/2) of the first r dimensions of [d] by angle i."""
    half = len(cos)
    first, second, rest = vector[:half], vector[half : 2 * half], vector[2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest])


def draft_ids(state: State, rows: int) -> list[int]:
    """Return the target ids of the draft's `rows` tokens, by the map's offsets if there are any."""
    if "d2t" not in state:
        return list(range(rows))
    ids = [i + int(offset) for i, offset in enumerate(state["d2t"].tolist())]
    chosen = [i for i, inside in enumerate(state["t2d"].tolist()) if inside]
    assert ids == chosen, "d2t and t2d name different tokens"
    return ids


def project(state: State, aux: Tensor, eps: float) -> Tensor:
    """Map aux states of one token [n*H] to a feature [H], with the norms of the checkpoint."""
    if "input_norm.weight" in state:
        aux = rms(aux, state["input_norm.weight"], eps)
    norms = sum(name.startswith("fc_norm.") for name in state)
    if norms:
        parts = enumerate(aux.chunk(norms))
        aux = torch.cat([rms(part, state[f"fc_norm.{i}.weight"], eps) for i, part in parts])
    return linear(state, "fc", aux)


def activation(name: str, x: Tensor) -> Tensor:
    """Return the activation by its published formula."""
    if name == "silu":
        return x / (1 + torch.exp(-x))
    if name == "relu":
        return torch.where(x > 0, x, torch.zeros_like(x))
    if name == "gelu_pytorch_tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return 0.5 * x * (1 + torch.tanh(inner))
    raise ValueError(f"no formula for {name!r}")


def mlp(state: State, prefix: str, x: Tensor, act: str) -> Tensor:
    """Return down(act(gate x) * up x) of the MLP named `prefix`."""
    gate = activation(act, linear(state, f"{prefix}.gate_proj", x))
    return linear(state, f"{prefix}.down_proj", gate * linear(state, f"{prefix}.up_proj", x))


def head_of(
    state: State, layer: str, which: str, x: Tensor, head: int, position: int, sizes: Sizes
) -> Tensor:
    """Return head number `head` [d] of the projection q, k or v: normed, if it has one, rotated."""
    rows, name = slice(head * sizes.head_dim, (head + 1) * sizes.head_dim), f"{layer}.self_attn"
    part = state[f"{name}.{which}_proj.weight"][rows] @ x
    if f"{name}.{which}_proj.bias" in state:
        part = part + state[f"{name}.{which}_proj.bias"][rows]
    if f"{name}.{which}_norm.weight" in state:
        part = sizes.norm(part, state[f"{name}.{which}_norm.weight"])
    return part if which == "v" else rope(part, *sizes.turn(position))


Row = list[tuple[Tensor, Tensor]]
"""Key and value [d] of every key-value head."""


def keys_values(state: State, layer: str, x: Tensor, position: int, sizes: Sizes) -> Row:
    """Return the row that an attention input [W] adds."""
    groups = range(sizes.kv_heads)
    key, value = (
        [head_of(state, layer, which, x, g, position, sizes) for g in groups] for which in "kv"
    )
    return list(zip(key, value, strict=True))


def attend(
    state: State, layer: str, x: Tensor, position: int, rows: Sequence[Row], sizes: Sizes
) -> Tensor:
    """Return the heads of an attention input [W] over the rows that it sees, joined."""
    heads = []
    for h in range(sizes.heads):
        group = h * sizes.kv_heads // sizes.heads  # consecutive query heads share a kv head
        query = head_of(state, layer, "q", x, h, position, sizes)
        scores = torch.stack([row[group][0] for row in rows]) @ query / math.sqrt(sizes.head_dim)
        if (sinks := f"{layer}.self_attn.attention_sink_bias") in state:
            scores = torch.cat([scores, state[sinks][h : h + 1]])
        shares = torch.softmax(scores, 0)[: len(rows)]
        heads.append(shares @ torch.stack([row[group][1] for row in rows]))
    return torch.cat(heads)


def finish(state: State, layer: str, residual: Tensor, heads: Tensor, sizes: Sizes) -> Tensor:
    """Return a layer's output [H] of its residual [H] and its attention heads."""
    middle = residual + linear(state, f"{layer}.self_attn.o_proj", heads)
    normed = sizes.norm(middle, state[f"{layer}.post_attention_layernorm.weight"])
    return middle + mlp(state, f"{layer}.mlp", normed, sizes.act)


def causal(
    state: State,
    layer: str,
    inputs: Sequence[Tensor],
    residuals: Sequence[Tensor],
    window: int | None,
    sizes: Sizes,
    start: int = 0,
) -> list[Tensor]:
    """Return a causal layer's outputs at positions `start`, ... of the inputs of its attention."""
    rows = [keys_values(state, layer, x, i, sizes) for i, x in enumerate(inputs)]
    out = []
    for i, x in enumerate(inputs[start:], start):
        first = 0 if window is None else max(0, i - window + 1)
        heads = attend(state, layer, x, i, rows[first : i + 1], sizes)
        out.append(finish(state, layer, residuals[i], heads, sizes))
    return out
