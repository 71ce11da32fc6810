"""A slow loss of block drafts: one document, block, slot and head at a time (see `slow_layer`).

B slots of a block, D drafts of a block, r Markov rank.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.domino import reference as domino
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
    smoothing: float | None = None  # of D-PACE, instead of both
    stage: ModuleType | None = None  # a second stage that judges drafts and has a loss of its own
    top_k: int = 0  # of a selector or lattice
    vector_eps: float = 0.0
    logit_scale: float = 0.0
    lattice_weights: tuple[float, ...] = ()  # of cross-entropy, margin and penalty
    prefix: int = 0  # first drafts that a recurrent head leaves alone
    base_share: float = 0.0  # of the loss: of the logits without that head

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
    right, compared = 0.0, 0.0
    for document in documents:
        hits = {}
        for anchor in document.picks:
            logits, confidences = block_logits(state, config, document, anchor)
            stage = config.stage and config.stage.Block(state, config, document, anchor)
            alone = block_logits(state, config, document, anchor, alone=True)[0]
            product, expected = 1.0, 1.0
            pace = paced(config, document, anchor, ids, logits, None)
            own = paced(config, document, anchor, ids, logits, stage)
            for d in range(config.depth):
                if not draft_counts(document.m, anchor, d):
                    break
                judged = served = judge(logits[d], document.z[anchor + d], ids)
                if stage is not None:
                    served = stage.judge(d, logits[d], judged)
                accepted = served.acceptance
                product *= float(accepted)
                expected += product
                hits[anchor, d] = served.hit
                entropy = None
                if judged.label is not None:
                    fixed = config.weights[d] if config.weights else math.exp(-d / config.gamma)
                    w, count = (fixed, fixed) if config.smoothing is None else (pace[d], 1.0)
                    token = document.x[anchor + 1 + d]
                    label = {"tokens": token, "hard": judged.wanted, "soft": None}[config.against]
                    if label is None or label in ids:
                        at = 0 if label is None else ids.index(label)
                        entropy = -judged.log_q[at]
                        if label is None:
                            entropy = -(judged.p * judged.log_q).sum()
                        terms[0] = terms[0] + w * entropy
                        term_weights[0] += count
                        if config.loss is not None:
                            loss = config.loss(judged.p, judged.full, judged.log_q, at)
                            kind = kind + w * loss
                    terms[1] = terms[1] + w * (judged.log_q.exp() - judged.p).abs().sum()
                    term_weights[1] += count
                    if config.base_share:
                        base = judge(alone[d], document.z[anchor + d], ids)
                        at = 0 if label is None else ids.index(label)
                        loss = -base.log_q[at] if label is not None else -base.p @ base.log_q
                        if config.loss is not None:
                            loss = config.loss(base.p, base.full, base.log_q, at)
                        terms[2] = terms[2] + w * loss
                        term_weights[2] += count
                        right += base.hit
                        compared += 1
                    if stage is not None:
                        token = document.x[anchor + 1 + d]
                        right = token if config.against == "tokens" else judged.wanted
                        weight = stage.weigh(d, w if config.smoothing is None else own[d])
                        terms[2] = terms[2] + weight * stage.loss(d, logits[d], right)
                        term_weights[2] += count
                    if confident in state:
                        c = confidences[d]
                        bce = -(accepted * torch.log(c) + (1 - accepted) * torch.log(1 - c))
                        terms[2] = terms[2] + fixed * bce
                        term_weights[2] += count
                        forecast = float(c.detach())
                        summed = [fixed, fixed * forecast, fixed * float(accepted)]
                        forecasts += forecasts.new_tensor(summed)
                sums.add(d, served, entropy)
                if stage is not None:
                    stage.count(sums, d, logits[d], judged, served)
            if draft_counts(document.m, anchor, 0):
                tau, blocks = tau + expected, blocks + 1
        sums.add_chains(hits)
        if config.stage:
            config.stage.count_chains(sums, document)
    sums |= {"terms": [float(x.detach()) for x in terms], "term_weights": term_weights}
    sums |= {"tau": tau, "blocks": float(blocks)}
    if config.loss is not None:
        sums |= {"kind": float(kind.detach()), "kind_weight": term_weights[0]}
        sums["kind_share"] = (1 - config.base_share) * term_weights[0]
    if config.base_share:
        sums |= {"base_right": right, "base_number": compared}
    if confident in state:
        names = ("confidence_number", "confidence_sum", "confidence_accepted")
        sums |= dict(zip(names, forecasts.tolist(), strict=True))
    alphas = config.ce_weight, config.l1_weight, config.confidence_weight
    if config.loss is not None:
        terms[0], alphas = kind, (1.0, 0.0, config.confidence_weight)
    if config.base_share:
        rest = 1 - config.base_share
        alphas = rest * alphas[0], rest * alphas[1], config.base_share
    divisors = term_weights if counts is None else [counts[0], counts[1], counts[1]]
    parts = zip(alphas, terms, divisors, strict=True)
    return sum((a * x / n for a, x, n in parts if n), zero), sums


def paced(
    config: ReferenceConfig,
    document: Document,
    anchor: int,
    ids: Sequence[int],
    logits: list[Tensor],
    stage: Any,
) -> list[float]:
    """Return D-PACE's weights of the drafts of a block, by the losses of a stage or by the logits.

    Of a draft: over all drafts from it on, the product of the smoothed confidences up to there.
    """
    reached: list[float] = []
    product = 1.0
    for d in range(config.depth):
        if config.smoothing is None or not draft_counts(document.m, anchor, d):
            break
        judged, token = judge(logits[d], document.z[anchor + d], ids), document.x[anchor + 1 + d]
        label = {"tokens": token, "hard": judged.wanted, "soft": None}[config.against]
        if judged.label is None or not (label is None or label in ids):
            reached.append(0.0)
            continue
        if stage is not None:
            loss = stage.loss(d, logits[d], judged.wanted if label is None else label)
        elif label is None:
            loss = -(judged.p * judged.log_q).sum()
        else:
            loss = -judged.log_q[ids.index(label)]
        product *= config.smoothing + (1 - config.smoothing) * math.exp(-float(loss.detach()))
        reached.append(product)
    return [sum(reached[d:]) for d in range(len(reached))]


def reference_logits(
    state: State, config: ReferenceConfig, document: Document, anchors: Iterable[int], depth: int
) -> dict[tuple[int, int], Tensor]:
    """Return the logits [Vd] of drafts 0, 1, ... after known tokens at `anchors`, 1 or more."""
    made = {a: block_logits(state, config, document, a)[0] for a in anchors}
    return {(a, d): z for a, logits in made.items() for d, z in enumerate(logits[:depth])}


def block_logits(
    state: State, config: ReferenceConfig, document: Document, anchor: int, alone: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits [Vd] and confidences of a block's D drafts, after the document's own tokens.

    `alone`: the logits of the backbone, without a head that changes them. The lists end before the
    first draft whose previous token does not exist.
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
        if "prefix_gru.weight_ih_l0" in state and not alone:
            read = state["embed_tokens.weight"][document.x[anchor + d]]
            memory = domino.gru_state(state, read, memory)
            if d >= config.prefix:
                z = z + domino.correction(state, y, memory)
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
    if f"{name}.attention_conv.base_kernel" in state:
        return _convolved_layer(state, name, config, context, rows, inputs, anchor)
    attended = _attended(state, name, config, context, inputs, anchor)
    pairs = zip(rows, attended, strict=True)
    return [slow_layer.finish(state, name, row, heads, config) for row, heads in pairs]


def _attended(
    state: State,
    name: str,
    config: ReferenceConfig,
    context: list[Tensor],
    inputs: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    # Keys: those of the context, then those of the block; the context has no input norm.
    keys = [
        slow_layer.keys_values(state, name, x, position, config)
        for position, x in enumerate([*context, *inputs])
    ]
    window, out = config.windows[int(name.split(".")[1])], []
    for k, u in enumerate(inputs):
        seen = [keys[j] for j in _seen(config, window, anchor, k)]
        out.append(slow_layer.attend(state, name, u, anchor + k, seen, config))
    return out


def _convolved_layer(
    state: State,
    name: str,
    config: ReferenceConfig,
    context: list[Tensor],
    rows: list[Tensor],
    inputs: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    """A layer of DFlash 2: both sublayers between convolutions whose weights their inputs give."""
    conv = f"{name}.attention_conv"
    inside = convolved(state, conv, 0, inputs, inputs)
    heads = _attended(state, name, config, context, inside, anchor)
    added = [slow_layer.linear(state, f"{name}.self_attn.o_proj", x) for x in heads]
    added = convolved(state, conv, 1, inputs, added)
    middle = [row + x for row, x in zip(rows, added, strict=True)]
    conv, norm = f"{name}.mlp_conv", state[f"{name}.post_attention_layernorm.weight"]
    inputs = [config.norm(x, norm) for x in middle]
    inside = convolved(state, conv, 0, inputs, inputs)
    added = [slow_layer.mlp(state, f"{name}.mlp", x, config.act) for x in inside]
    added = convolved(state, conv, 1, inputs, added)
    return [x + y for x, y in zip(middle, added, strict=True)]


def convolved(
    state: State, name: str, side: int, inputs: list[Tensor], slots: list[Tensor]
) -> list[Tensor]:
    """Convolve the slots of one block, channel by channel; the sublayer's inputs give the kernels.

    Rows of the projection: first side 0, in it first tap 0, in it the groups in order.
    """
    base = state[f"{name}.base_kernel"]
    taps, size = base.shape[1:]
    out = []
    for i, row in enumerate(inputs):
        delta = slow_layer.linear(state, f"{name}.kernel_projection", row)
        groups = len(delta) // (2 * taps)
        channels = []
        for c in range(size):
            total = torch.zeros((), dtype=torch.float64)
            for t in range(min(taps, i + 1)):  # none before the block's first slot
                at = (side * taps + t) * groups + c * groups // size
                total = total + (base[side, t, c] + delta[at]) * slots[i - t][c]
            channels.append(total)
        out.append(torch.stack(channels))
    return out


def _seen(config: ReferenceConfig, window: int | None, anchor: int, slot: int) -> list[int]:
    """Return the positions that a slot sees; context and slots are at 0, 1, ... in order."""
    last, own = anchor + config.block_size - 1, anchor + slot
    if window is None:
        return list(range(last + 1))
    if not config.non_causal:
        last = own
    return [p for p in range(last + 1) if abs(own - p) < window]
