"""A slow EAGLE-1/2 loss with chains: one document, slot and head at a time, in float64.

It shares no code with the fast implementation: no batch, no packing, no mask tensor, no
cache. Everything is indexed by the token positions of ONE document. Gradients come from autograd.
Weights come as a state dict with the checkpoint's keys, so the test covers the names too.

T tokens of a document, H hidden size, V target vocabulary, d head size. Slot t sees the target's
final hidden state of token t and the known token t+1, predicts the state of token t+1 and drafts
token t+2. Step s continues from slot t: its row is (a token of position t+1+s, the previous
prediction) at position t+s. It sees the rows of slots 0..t and those of its own chain.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig:
    """Settings from the checkpoint's config.json, the target's head and the training options."""

    heads: int
    kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_inv_freq: Tensor  # [rotary dimensions / 2]
    rope_factor: float = 1.0
    layers: int = 1
    windows: tuple[int | None, ...] = (None,)  # per layer: positions that a row sees; None: all
    act: str = "silu"
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None = None  # [V]
    head_scale: float = 1.0
    head_softcap: float | None = None
    regression_weight: float = 1.0
    ce_weight: float = 0.1
    loss: SlotLoss = CROSS_ENTROPY


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: nothing shifted, nothing padded."""

    x: Sequence[int]  # token ids, [T]
    m: Sequence[int]  # loss mask, [T]
    f: Tensor  # [T, H] final hidden states
    noise: Tensor | None = None  # [T, H], added to the input of the draft


@dataclass(kw_only=True)
class Reference:
    """The loss of a list of documents with its parts, and sums per step."""

    loss: Tensor
    smooth_l1: float  # sums over the slots of the first step
    cross_entropy: float
    supervised: list[int]
    hits: list[int]
    acceptance: list[float]
    chains: int = 0
    survivors: list[int] = field(default_factory=list)


def head(config: ReferenceConfig, hidden: Tensor) -> Tensor:
    """Return the logits [V] of the target's head for one state [H]."""
    z = config.head_weight @ hidden
    if config.head_bias is not None:
        z = z + config.head_bias
    z = z * config.head_scale
    if config.head_softcap is not None:
        z = config.head_softcap * torch.tanh(z / config.head_softcap)
    return z


def counts(m: Sequence[int], t: int, s: int) -> bool:
    """Return whether slot t is supervised at step s; m is the document's loss mask."""

    def supervised(position: int) -> bool:
        return position < len(m) and bool(m[position])

    return supervised(t + 1 + s) and supervised(t + 2 + s)


def predict(
    state: Mapping[str, Tensor], config: ReferenceConfig, rows: Sequence[tuple[int, Tensor]]
) -> Tensor:
    """Return the prediction [H] of the last of rows (known token, state [H]) at positions 0, 1, ...

    Causal; computes all rows, without a cache.
    """
    inputs = [
        state["fc.weight"] @ torch.cat([state["embed_tokens.weight"][token], hidden])
        for token, hidden in rows
    ]
    for layer in range(config.layers):
        prefix = f"layers.{layer}"
        name = f"{prefix}.input_layernorm.weight"
        assert (name in state) == (layer > 0), "the first layer has no norm before its attention"
        normed = [x if layer == 0 else _norm(x, state[name], config) for x in inputs]
        inputs = [
            _layer(state, config, prefix, inputs[i], normed[: i + 1]) for i in range(len(inputs))
        ]
    return inputs[-1]


def chain(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    document: Document,
    t: int,
    known: Sequence[int] | None,
    steps: int,
) -> list[Tensor]:
    """Return the predicted states [H] of steps 0..steps-1 of the chain from slot t.

    The input tokens after the first are `known`; None: the draft's own greedy choices.
    """
    fed = document.f if document.noise is None else document.f + document.noise
    rows = [(document.x[j + 1], fed[j]) for j in range(t + 1)]
    predictions = [predict(state, config, rows)]
    for s in range(1, steps):
        own = int(head(config, predictions[-1]).argmax())
        rows.append((own if known is None else known[s - 1], predictions[-1]))
        predictions.append(predict(state, config, rows))
    return predictions


def reference_loss(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    documents: Sequence[Document],
    steps: int = 1,
) -> Reference:
    """Compute the loss over all `documents`, and the sums of `steps` steps."""
    distance = torch.zeros((), dtype=torch.float64)
    entropy = torch.zeros((), dtype=torch.float64)
    out = Reference(
        loss=distance,
        smooth_l1=0.0,
        cross_entropy=0.0,
        supervised=[0] * steps,
        hits=[0] * steps,
        acceptance=[0.0] * steps,
        survivors=[0] * steps,
    )
    for document in documents:
        for t in range(len(document.x) - 1):
            wanted = [counts(document.m, t, s) for s in range(steps)]
            if not any(wanted):
                continue
            reach = max(s for s in range(steps) if wanted[s]) + 1
            known = [document.x[t + 1 + s] for s in range(1, reach)]
            predictions = chain(state, config, document, t, known, reach)
            hits = []
            for s, predicted in enumerate(predictions):
                if not wanted[s]:
                    continue
                f = document.f[t + 1 + s]
                z = head(config, f)
                log_q = torch.log_softmax(head(config, predicted), 0)
                p = torch.softmax(z, 0)
                out.supervised[s] += 1
                hits.append(bool(log_q.argmax() == z.argmax()))
                out.hits[s] += hits[-1]
                out.acceptance[s] += float(torch.minimum(p, log_q.exp()).sum().detach())
                if s == 0:
                    gap = (predicted - f).abs()
                    smooth = torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5)
                    distance = distance + smooth.sum() / len(smooth)
                    entropy = entropy + config.loss(p, list(p), log_q, int(z.argmax()))
            if all(wanted):
                out.chains += 1
                for s in range(steps):
                    out.survivors[s] += all(hits[: s + 1])
    out.smooth_l1, out.cross_entropy = float(distance.detach()), float(entropy.detach())
    if out.supervised[0]:
        total = config.regression_weight * distance + config.ce_weight * entropy
        out.loss = total / out.supervised[0]
    return out


def _layer(
    state: Mapping[str, Tensor],
    config: ReferenceConfig,
    prefix: str,
    x: Tensor,
    normed: Sequence[Tensor],
) -> Tensor:
    """Return the output [H] of a layer for the last of the rows with attention inputs `normed`."""
    size, position = config.head_dim, len(normed) - 1

    def part(name: str, row: int, index: int) -> Tensor:
        x, eps = normed[row], config.rms_norm_eps
        return slow_layer.head_of(state, f"{prefix}.self_attn", name, x, index, size, eps)

    outputs = []
    window = config.windows[int(prefix.split(".")[1])]
    first = 0 if window is None else max(0, position - window + 1)
    for h in range(config.heads):
        group = h * config.kv_heads // config.heads  # consecutive query heads share a kv head
        query = _rope(part("q", position, h), position, config)
        scores = [
            query @ _rope(part("k", j, group), j, config) / math.sqrt(size)
            for j in range(first, position + 1)
        ]
        weights = torch.softmax(torch.stack(scores), 0)
        outputs.append(sum(w * part("v", j, group) for j, w in enumerate(weights, first)))
    x = x + slow_layer.linear(state, f"{prefix}.self_attn.o_proj", torch.cat(outputs))
    inside = _norm(x, state[f"{prefix}.post_attention_layernorm.weight"], config)
    return x + slow_layer.mlp(state, f"{prefix}.mlp", inside, config.act)


def _norm(x: Tensor, weight: Tensor, config: ReferenceConfig) -> Tensor:
    return slow_layer.rms(x, weight, config.rms_norm_eps)


def _rope(vector: Tensor, position: int, config: ReferenceConfig) -> Tensor:
    return slow_layer.rope(vector, position, config.rope_inv_freq, config.rope_factor)
