"""Attention and loss kernels of others on the same tensors, where they are installed."""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gpu.bench import Bench
from spec_train.attention.flex import flex, flex_mask
from spec_train.attention.masks import causal_mask
from spec_train.losses.kernels import KernelLoss, kernels

PEERS = {"flash_attn": "flash-attn", "liger_kernel": "liger-kernel"}
"""Modules, and the packages that have them."""


def prove_peers(bench: Bench) -> None:
    """Time causal attention and the KL divergence of logits: torch's, flex, those of `PEERS`."""
    for module, package in PEERS.items():
        if find_spec(module) is None:
            bench.row("peers", package, None, missing=f"pip install {package} on a connected one")
    heads, size, tokens = (2, 16, 64) if bench.tiny else (32, 128, 8192)
    dtype = torch.float32 if bench.device == "cpu" else torch.bfloat16
    q, k, v = (
        torch.randn(1, tokens, heads, size, device=bench.device, dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    _compared(bench, "causal attention", _attentions(bench.on_gpu), (q, k, v))
    rows, vocab = (32, 64) if bench.tiny else (4096, 32000)
    logits = torch.randn(rows, vocab, device=bench.device, requires_grad=True)
    taught = torch.randn(rows, vocab, device=bench.device).softmax(-1)
    _compared(bench, "KL of logits", _losses(bench.on_gpu), (logits, taught))


def _compared(
    bench: Bench, what: str, ways: dict[str, Callable[..., Tensor]], given: tuple[Tensor, ...]
) -> None:
    """Add a row per way: its time, forward and backward, and its largest error against the first
    one, relative to the largest number.
    """
    exact: list[Tensor] = []

    def measure(way: Callable[..., Tensor]) -> tuple[bool, dict[str, Any]]:
        out = way(*given).detach().float()
        exact.append(out)
        error = float((out - exact[0]).abs().max() / exact[0].abs().max())
        seconds = bench.seconds(lambda: way(*given).sum().backward())
        return error <= 2e-2, {"ms": 1e3 * seconds, "error": error}

    for name, way in ways.items():
        bench.attempt("peers", f"{what}, {name}", lambda w=way: measure(w))


def _attentions(on_gpu: bool) -> dict[str, Callable[..., Tensor]]:
    """Return causal attention of q, k, v [B, T, h, d] by name."""

    def of_torch(*given: Tensor) -> Tensor:
        out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in given), is_causal=True)
        return out.transpose(1, 2)

    def of_flex(*given: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in given)
        blocks = flex_mask(causal_mask(torch.zeros(q.shape[0], q.shape[2], device=q.device).long()))
        return flex(q, k, v, blocks, q.shape[3] ** -0.5)[0].transpose(1, 2)

    ways: dict[str, Callable[..., Tensor]] = {"torch": of_torch}
    if on_gpu:  # a CPU has no gradient of it
        ways["flex"] = of_flex
    if find_spec("flash_attn") is not None:
        flash = import_module("flash_attn").flash_attn_func
        ways["flash-attn"] = lambda q, k, v: flash(q, k, v, causal=True)
    return ways


def _losses(on_gpu: bool) -> dict[str, Callable[..., Tensor]]:
    """Return the mean KL divergence of logits [N, V] from probabilities [N, V] by name."""

    def of_torch(logits: Tensor, taught: Tensor) -> Tensor:
        return F.kl_div(logits.log_softmax(-1), taught, reduction="batchmean")

    def of_ours(logits: Tensor, taught: Tensor) -> Tensor:
        z, weights = taught.log(), logits.new_full((len(logits),), 1 / len(logits))
        sums, entropies = kernels().row_sums(z)
        given = (z, sums, None, entropies), None, None, (weights, None), "kl"
        return KernelLoss.apply(logits, (*given, (1.0, 3.0, 1.0, None), (None, None))).sum()

    ways: dict[str, Callable[..., Tensor]] = {"torch": of_torch}
    if on_gpu:
        ways["ours"] = of_ours
    if find_spec("liger_kernel") is not None:
        liger = import_module("liger_kernel.transformers").LigerKLDIVLoss()
        ways["liger"] = lambda logits, taught: liger(logits.log_softmax(-1), taught)
    return ways
