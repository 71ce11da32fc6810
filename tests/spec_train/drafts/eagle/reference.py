"""A slow EAGLE-1/2 loss with chains: one document, slot and head at a time (see `slow_layer`).

Slot t sees the target's final hidden state of token t and the known token t+1, predicts the state
of token t+1 and drafts token t+2. Step s continues from slot t: its row is (a token of position
t+1+s, the previous prediction) at position t+s. It sees the rows of slots 0..t and those of its own
chain.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import CROSS_ENTROPY, SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge, slot_counts


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json, the target's head and the training options."""

    windows: tuple[int | None, ...]  # per layer: positions that a row sees; None: all
    head_weight: Tensor  # [V, H]
    head_bias: Tensor | None = None  # [V]
    head_scale: float = 1.0
    head_softcap: float | None = None
    regression_weight: float = 1.0
    ce_weight: float = 0.1
    steps: int = 1
    loss: SlotLoss = CROSS_ENTROPY


def head(config: ReferenceConfig, hidden: Tensor) -> Tensor:
    """Return the logits [V] of the target's head for one state [H]."""
    z = config.head_weight @ hidden
    if config.head_bias is not None:
        z = z + config.head_bias
    z = z * config.head_scale
    if config.head_softcap is not None:
        z = config.head_softcap * torch.tanh(z / config.head_softcap)
    return z


def predict(
    state: State,
    sizes: slow_layer.Sizes,
    windows: Sequence[int | None],
    rows: Iterable[tuple[int, Tensor]],
) -> list[Tensor]:
    """Return the predictions [H] of rows (known token, state [H]) at positions 0, 1, ...

    Causal; computes all rows, without a cache. There are norms where the checkpoint has them.
    """
    inputs = [
        slow_layer.linear(state, "fc", torch.cat([state["embed_tokens.weight"][token], hidden]))
        for token, hidden in rows
    ]
    for number, window in enumerate(windows):
        layer = f"layers.{number}"
        norm = state.get(f"{layer}.input_layernorm.weight")
        normed = inputs if norm is None else [sizes.norm(x, norm) for x in inputs]
        inputs = slow_layer.causal(state, layer, normed, inputs, window, sizes)
    norm = state.get("norm.weight")
    return inputs if norm is None else [sizes.norm(x, norm) for x in inputs]


def chain(
    state: State,
    config: ReferenceConfig,
    document: Document,
    t: int,
    known: Sequence[int],
    steps: int,
) -> list[Tensor]:
    """Return the predicted states [H] of the chain from slot t, whose later tokens are `known`."""
    fed = document.aux if document.noise is None else document.aux + document.noise
    rows = [(document.x[j + 1], fed[j]) for j in range(t + 1)]
    predictions: list[Tensor] = []
    for s in range(steps):
        if s:
            rows.append((known[s - 1], predictions[-1]))
        predictions.append(predict(state, config, config.windows, rows)[-1])
    return predictions


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [V] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    found = {}
    for a in anchors:
        steps = min(depth, len(document.x) - a)
        states = chain(state, config, document, a - 1, document.x[a + 1 :], steps)
        found |= {(a, d): head(config, row) for d, row in enumerate(states)}
    return found


def reference_loss(
    state: State, config: ReferenceConfig, documents: Sequence[Document]
) -> tuple[Tensor, Sums]:
    """Compute the loss over all `documents`, and the sums of all steps."""
    sums, ids = Sums(config.steps), range(len(config.head_weight))
    second = "cross_entropy" if config.loss.name == "ce" else "distribution_loss"
    sums |= {"smooth_l1": [0.0] * config.steps, second: [0.0] * config.steps}
    total = torch.zeros((), dtype=torch.float64)
    for document in documents:
        hits = {}
        for t in range(len(document.x) - 1):
            counted = [s for s in range(config.steps) if slot_counts(document.m, t + s)]
            if not counted:
                continue
            steps = counted[-1] + 1
            states = chain(state, config, document, t, document.x[t + 2 :], steps)
            for s in counted:
                wanted = document.aux[t + 1 + s]
                judged = judge(head(config, states[s]), head(config, wanted), ids)
                gap = (states[s] - wanted).abs()
                distance = torch.where(gap < 1, 0.5 * gap * gap, gap - 0.5).mean()
                entropy = config.loss(judged.p, judged.full, judged.log_q, judged.wanted)
                loss = config.regression_weight * distance + config.ce_weight * entropy
                total = total + (loss if s == 0 else 0)
                sums.add(s, judged, loss)
                sums["smooth_l1"][s] += float(distance.detach())
                sums[second][s] += float(entropy.detach())
                hits[t, s] = judged.hit
        sums.add_chains(hits)
    return total / max(sums["supervised"][0], 1), sums
