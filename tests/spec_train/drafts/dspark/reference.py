"""A slow DSpark loss: one document, block, slot and head at a time (see `slow_layer`).

B slots of a block, D drafts of a block, r Markov rank.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import SlotLoss
from tests.spec_train.drafts.slow_layer import Document, State, Sums, judge


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json and the training options."""

    head_rows: Tensor  # of the target's head, for the draft vocabulary [Vd, H]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]  # per layer: positions that a slot sees back; None: all
    non_causal: bool = False  # slots of a layer with a window see later slots of their block
    kind: str = "none"  # none, vanilla, gated, rnn
    confidence_reads_markov: bool = True
    gamma: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0
    loss: SlotLoss | None = None  # another loss in place of cross-entropy and L1
    against: str = "soft"  # what that loss, or the cross-entropy, compares with: or hard, tokens
    weights: tuple[float, ...] = ()  # of the drafts of a block, instead of exp(-d / gamma)

    @property
    def depth(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1


def draft_counts(m: Sequence[int], anchor: int, d: int) -> bool:
    """Return whether draft d of a block counts: tokens anchor+1..anchor+1+d are supervised."""
    tokens = range(anchor + 1, anchor + 2 + d)
    return all(t < len(m) and bool(m[t]) for t in tokens)


def reference_loss(
    state: State,
    config: ReferenceConfig,
    documents: Sequence[Document],
    counts: Sequence[float] | None = None,
) -> tuple[Tensor, Sums]:
    """Compute the loss of documents, whose `picks` are the anchors of their blocks.

    `counts` replaces the denominators: of the cross-entropy, and of the other two terms.
    """
    ids, confident = slow_layer.draft_ids(state, len(config.head_rows)), "confidence_head.proj.bias"
    sums, zero = Sums(config.depth), torch.zeros((), dtype=torch.float64)
    terms, term_weights, kind = [zero, zero, zero], [0.0, 0.0, 0.0], zero
    tau, blocks, forecasts = 0.0, 0, torch.zeros(3, dtype=torch.float64)
    for document in documents:
        hits = {}
        for anchor in document.picks:
            logits, confidences = block_logits(state, config, document, anchor)
            product, expected = 1.0, 1.0
            for d in range(config.depth):
                if not draft_counts(document.m, anchor, d):
                    break
                judged = judge(logits[d], document.z[anchor + d], ids)
                accepted = judged.acceptance
                product *= float(accepted)
                expected += product
                hits[anchor, d] = judged.hit
                entropy = None
                if judged.label is not None:
                    w = config.weights[d] if config.weights else math.exp(-d / config.gamma)
                    token = document.x[anchor + 1 + d]
                    label = {"tokens": token, "hard": judged.wanted, "soft": None}[config.against]
                    if label is None or label in ids:
                        at = 0 if label is None else ids.index(label)
                        entropy = -judged.log_q[at]
                        if label is None:
                            entropy = -(judged.p * judged.log_q).sum()
                        terms[0] = terms[0] + w * entropy
                        term_weights[0] += w
                        if config.loss is not None:
                            loss = config.loss(judged.p, judged.full, judged.log_q, at)
                            kind = kind + w * loss
                    terms[1] = terms[1] + w * (judged.log_q.exp() - judged.p).abs().sum()
                    term_weights[1] += w
                    if confident in state:
                        c = confidences[d]
                        bce = -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c))
                        terms[2] = terms[2] + w * bce
                        term_weights[2] += w
                        forecast = float(c.detach())
                        forecasts += forecasts.new_tensor([w, w * forecast, w * float(accepted)])
                sums.add(d, judged, entropy)
            if draft_counts(document.m, anchor, 0):
                tau, blocks = tau + expected, blocks + 1
        sums.add_chains(hits)
    sums |= {"terms": [float(x.detach()) for x in terms], "term_weights": term_weights}
    sums |= {"tau": tau, "blocks": float(blocks)}
    if config.loss is not None:
        sums |= {"kind": float(kind.detach()), "kind_weight": term_weights[0]}
    if confident in state:
        names = ("confidence_number", "confidence_sum", "confidence_accepted")
        sums |= dict(zip(names, forecasts.tolist(), strict=True))
    alphas = config.ce_weight, config.l1_weight, config.confidence_weight
    if config.loss is not None:
        terms[0], alphas = kind, (1.0, 0.0, config.confidence_weight)
    divisors = term_weights if counts is None else [counts[0], counts[1], counts[1]]
    parts = zip(alphas, terms, divisors, strict=True)
    return sum((a * x / n for a, x, n in parts if n), zero), sums


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    made = {a: block_logits(state, config, document, a)[0] for a in anchors}
    return {(a, d): z for a, logits in made.items() for d, z in enumerate(logits[:depth])}


def block_logits(
    state: State, config: ReferenceConfig, document: Document, anchor: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits [Vd] and confidences of a block's D drafts, after the document's own tokens.

    The lists end before the first draft whose previous token does not exist.
    """
    states = block_states(state, config, document, anchor)
    memory = None
    logits, confidences = [], []
    for d in range(config.depth):
        if anchor + d >= len(document.x):
            break
        y = states[d if config.sample_from_anchor else d + 1]
        z = config.head_rows @ y
        features = y
        if config.kind != "none":
            e = state["markov_head.markov_w1.weight"][document.x[anchor + d]]
            bias, memory = markov_bias(state, config.kind, e, y, memory)
            z = z + bias
            features = torch.cat([y, e]) if config.confidence_reads_markov else y
        logits.append(z)
        if "confidence_head.proj.bias" in state:
            forecast = slow_layer.linear(state, "confidence_head.proj", features)
            confidences.append(torch.sigmoid(forecast[0]))
    return logits, confidences


def markov_bias(
    state: State, kind: str, e: Tensor, y: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the bias [Vd] after a token with W1 row e [r], and the rnn's next state [r]."""
    w2 = state["markov_head.markov_w2.weight"]
    if kind == "vanilla":
        return w2 @ e, None
    if kind == "gated":
        gate = torch.sigmoid(slow_layer.linear(state, "markov_head.gate_proj", torch.cat([y, e])))
        return w2 @ (gate * e), None
    if memory is None:
        memory = torch.zeros_like(e)
    joint = slow_layer.linear(state, "markov_head.joint_proj", torch.cat([memory, e, y]))
    r = len(e)
    gate, candidate, out = torch.sigmoid(joint[:r]), torch.tanh(joint[r : 2 * r]), joint[2 * r :]
    return w2 @ torch.tanh(out), gate * memory + (1 - gate) * candidate


def block_states(
    state: State, config: ReferenceConfig, document: Document, anchor: int
) -> list[Tensor]:
    """Return y [H] of the B slots of a block; it sees the target's states before `anchor`."""
    context = [
        config.norm(slow_layer.linear(state, "fc", document.aux[t]), state["hidden_norm.weight"])
        for t in range(anchor)
    ]
    tokens = [document.x[anchor], *[config.mask_token_id] * (config.block_size - 1)]
    rows = [state["embed_tokens.weight"][token] for token in tokens]
    layer = 0
    while f"layers.{layer}.input_layernorm.weight" in state:
        rows = _layer(state, f"layers.{layer}", config, context, rows, anchor)
        layer += 1
    return [config.norm(row, state["norm.weight"]) for row in rows]


def _layer(
    state: State,
    name: str,
    config: ReferenceConfig,
    context: list[Tensor],
    rows: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    inputs = [config.norm(row, state[f"{name}.input_layernorm.weight"]) for row in rows]
    # Keys: those of the context, then those of the block; the context has no input norm.
    keys = [
        slow_layer.keys_values(state, name, x, position, config)
        for position, x in enumerate([*context, *inputs])
    ]
    window, out = config.windows[int(name.split(".")[1])], []
    for k, (row, u) in enumerate(zip(rows, inputs, strict=True)):
        seen = [keys[j] for j in _seen(config, window, anchor, k)]
        heads = slow_layer.attend(state, name, u, anchor + k, seen, config)
        out.append(slow_layer.finish(state, name, row, heads, config))
    return out


def _seen(config: ReferenceConfig, window: int | None, anchor: int, slot: int) -> list[int]:
    """Return the positions that a slot sees; context and slots are at 0, 1, ... in order."""
    last, own = anchor + config.block_size - 1, anchor + slot
    if window is None:
        return list(range(last + 1))
    if not config.non_causal:
        last = own
    return [p for p in range(last + 1) if abs(own - p) < window]
