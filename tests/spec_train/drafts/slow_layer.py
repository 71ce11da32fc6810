"""What the slow references of all drafts share: plain formulas for one vector at a time.

Nothing here comes from the fast code. `state` holds the tensors of a checkpoint. There is a bias or
a norm of heads where the checkpoint has one.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

State = Mapping[str, Tensor]


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """Return weight @ x, and its bias if the checkpoint has one."""
    y = state[f"{name}.weight"] @ x
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x [n] over its root mean square, times the weight [n]."""
    return weight * x / torch.sqrt((x * x).mean() + eps)


def rope(vector: Tensor, position: int, inv_freq: Tensor, factor: float = 1.0) -> Tensor:
    """Rotate pairs (i, i + r/2) of the first r dimensions of [d] by position * inv_freq[i]."""
    half, angle = inv_freq.numel(), position * inv_freq.double()
    cos, sin = factor * angle.cos(), factor * angle.sin()
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
    state: State, prefix: str, which: str, x: Tensor, head: int, size: int, eps: float
) -> Tensor:
    """Return head number `head` [size] of the projection q, k or v, normed if it has a norm."""
    rows, name = slice(head * size, (head + 1) * size), f"{prefix}.{which}_proj"
    part = state[f"{name}.weight"][rows] @ x
    part = part + state[f"{name}.bias"][rows] if f"{name}.bias" in state else part
    norm = f"{prefix}.{which}_norm.weight"
    return rms(part, state[norm], eps) if norm in state else part


Shape = tuple[tuple[str, object], ...]
"""Options of a draft's shape, as pairs: a case is hashable."""

EVERY: Shape = (
    ("hidden_act", "gelu_pytorch_tanh"),
    ("attention_bias", "true"),
    ("mlp_bias", "true"),
    ("intermediate_size", 14),
    ("num_attention_heads", 6),
    ("num_key_value_heads", 3),
    ("head_dim", 4),
)
"""A layer that differs from the target's in everything but the norms of heads."""
