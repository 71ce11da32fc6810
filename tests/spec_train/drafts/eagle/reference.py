"""A slow EAGLE-1/2 loss with chains: one document, slot and head at a time, in float64.

It shares no code with the fast implementation: no batch, no packing, no mask tensor, no
cache. Everything is indexed by the token positions of ONE document. Gradients come from autograd.
Weights come as a state dict with the checkpoint's keys, so the test covers the names too.

T tokens of a document, H hidden size, V target vocabulary, d head size. Slot t sees the target's
final hidden state of token t and the known token t+1, predicts the state of token t+1 and drafts
token t+2. Step s continues from slot t: its row is (a token of position t+1+s, the previous
prediction) at position t+s. It sees the rows of slots 0..t and those of its own chain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json, the target's head and the training options."""

    layers: int = 1
    windows: tuple[int | None, ...] = (None,)  # per layer: positions that a row sees; None: all
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
    for number in range(config.layers):
        layer, window = f"layers.{number}", config.windows[number]
        norm = f"{layer}.input_layernorm.weight"
        assert (norm in state) == (number > 0), "the first layer has no norm before its attention"
        normed = [config.norm(x, state[norm]) if number else x for x in inputs]
        rows = [slow_layer.keys_values(state, layer, u, i, config) for i, u in enumerate(normed)]
        for i, u in enumerate(normed):
            first = 0 if window is None else max(0, i - window + 1)
            heads = slow_layer.attend(state, layer, u, i, rows[first : i + 1], config)
            inputs[i] = slow_layer.finish(state, layer, inputs[i], heads, config)
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
