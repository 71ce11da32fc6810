"""A slow DSpark training loss: one document, block, slot and head at a time.

A float64 oracle for the fast implementation. It shares no code with it: no batch, no packing, no
mask tensor, no chunk, no manual gradient. Everything is indexed by the token positions of ONE
document. Weights come as a state dict with the checkpoint's keys, so the test covers the names too.
Gradients come from autograd.

T tokens of a document, n captured layers, H hidden size, V / Vd target / draft vocabulary, B slots
of a block, D drafts of a block, r Markov rank, d head size.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.spec_train.drafts import slow_layer
from tests.spec_train.drafts.slot_loss import SlotLoss

State = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class ReferenceConfig(slow_layer.Sizes):
    """Settings from the checkpoint's config.json and the training options."""

    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]  # per layer: positions that a slot sees back; None: all
    non_causal: bool  # slots of a layer with a window see later slots of their block
    kind: str  # none, vanilla, gated, rnn
    confidence: bool
    confidence_reads_markov: bool
    gamma: float
    ce_weight: float
    l1_weight: float
    confidence_weight: float
    ce_target: str  # tokens or teacher
    loss: SlotLoss | None = None  # another loss in place of cross-entropy and L1
    against: str = "soft"  # what that loss compares with: soft, hard or tokens
    weights: tuple[float, ...] = ()  # of the drafts of a block, instead of exp(-d / gamma)

    @property
    def depth(self) -> int:
        return self.block_size if self.sample_from_anchor else self.block_size - 1


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document: nothing shifted, nothing padded."""

    x: Sequence[int]  # token ids, [T]
    m: Sequence[int]  # loss mask, [T]
    aux: Tensor  # [T, n*H] float64
    z: Tensor  # [T, V] float64; z[t] are the target's logits for token t+1


@dataclass(kw_only=True)
class Reference:
    """The loss of blocks and its parts."""

    loss: Tensor
    terms: list[float]  # weighted sums of cross-entropy, L1, confidence's BCE
    weights: list[float]  # sums of their weights
    tau: float  # summed over blocks
    drafted: list[int]  # [D] drafts that count
    hits: list[int]  # [D]
    acceptance: list[float]  # [D]
    survivors: list[int]  # [D] whole blocks hit at every depth so far
    chains: int
    forecasts: list[float]  # by tenths of the confidence: weighted sums of it
    accepted: list[float]  # the same of the acceptance
    trained: int = field(default=0)


def draft_counts(m: Sequence[int], anchor: int, d: int) -> bool:
    """Return whether draft d of a block counts: tokens anchor+1..anchor+1+d are supervised."""
    tokens = range(anchor + 1, anchor + 2 + d)
    return all(t < len(m) and bool(m[t]) for t in tokens)


def reference_loss(
    state: State,
    head: Tensor,
    config: ReferenceConfig,
    blocks: Sequence[tuple[Document, Sequence[int]]],
    counts: Sequence[float] | None = None,
) -> Reference:
    """Compute the loss of documents with their anchors; `head` is the target's [V, H].

    `counts` replaces the denominators: of the cross-entropy, and of the other two terms.
    """
    ids = slow_layer.draft_ids(state, len(head))
    zero = torch.zeros((), dtype=torch.float64)
    sums, weights = [zero, zero, zero], [0.0, 0.0, 0.0]
    out = Reference(
        loss=zero, terms=[], weights=weights, tau=0.0, chains=0,
        forecasts=[0.0] * 10, accepted=[0.0] * 10,
        **{k: [0] * config.depth for k in ("drafted", "hits", "acceptance", "survivors")},
    )  # fmt: skip
    for document, anchors in blocks:
        for anchor in anchors:
            logits, confidences = block_logits(state, head, config, document, anchor)
            product, alive, expected = 1.0, True, 1.0
            for d in range(config.depth):
                if not draft_counts(document.m, anchor, d):
                    break
                out.drafted[d] += 1
                wanted = int(document.z[anchor + d].argmax())
                token = document.x[anchor + 1 + d]
                log_q = torch.log_softmax(logits[d], 0)
                full = torch.softmax(document.z[anchor + d], 0)  # over the full vocabulary
                rate = sum(  # tokens outside the draft vocabulary are never drafted
                    torch.minimum(full[v], log_q[i].exp()).detach() for i, v in enumerate(ids)
                )
                accepted = float(rate)
                if wanted in ids:
                    out.trained += 1
                    w = math.exp(-d / config.gamma)
                    w = config.weights[d] if config.weights else w
                    p = torch.softmax(document.z[anchor + d][ids], 0)  # renormalised
                    distance = (log_q.exp() - p).abs().sum()
                    if config.loss is not None:
                        label = token if config.against == "tokens" else wanted
                        if config.against != "tokens" or token in ids:
                            inside = [full[v] for v in ids]
                            sums[0] = sums[0] + w * config.loss(
                                p, inside, log_q, ids.index(label) if label in ids else 0
                            )
                            weights[0] += w
                    elif config.ce_target == "teacher":
                        sums[0] = sums[0] - w * (p * log_q).sum()
                        weights[0] += w
                    elif token in ids:
                        sums[0] = sums[0] - w * log_q[ids.index(token)]
                        weights[0] += w
                    sums[1] = sums[1] + w * distance
                    weights[1] += w
                    if config.confidence:
                        c = confidences[d]
                        bce = -(rate * torch.log(c) + (1 - rate) * torch.log(1 - c))
                        sums[2] = sums[2] + w * bce
                        weights[2] += w
                        forecast = float(c.detach())
                        tenth = min(int(forecast * 10), 9)
                        out.forecasts[tenth] += w * forecast
                        out.accepted[tenth] += w * accepted
                hit = wanted in ids and ids[int(logits[d].argmax())] == wanted
                out.hits[d] += hit
                out.acceptance[d] += accepted
                product *= accepted
                expected += product
            out.tau += expected
            whole = draft_counts(document.m, anchor, config.depth - 1)
            out.chains += whole
            for d in range(config.depth if whole else 0):
                wanted = int(document.z[anchor + d].argmax())
                alive = alive and wanted in ids and ids[int(logits[d].argmax())] == wanted
                out.survivors[d] += alive
    denominators = weights if counts is None else [counts[0], counts[1], counts[1]]
    alphas = config.ce_weight, config.l1_weight, config.confidence_weight
    if config.loss is not None:
        alphas = 1.0, 0.0, config.confidence_weight
    for alpha, total, weight in zip(alphas, sums, denominators, strict=True):
        if weight:
            out.loss = out.loss + alpha * total / weight
    out.terms = [float(s.detach()) for s in sums]
    return out


def block_logits(
    state: State, head: Tensor, config: ReferenceConfig, document: Document, anchor: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits [Vd] and confidences of a block's D drafts, after the document's own tokens.

    The lists end before the first draft whose previous token does not exist.
    """
    states = block_states(state, config, document, anchor)
    rows = head[slow_layer.draft_ids(state, len(head))]
    memory = None
    logits, confidences = [], []
    for d in range(config.depth):
        if anchor + d >= len(document.x):
            break
        y = states[d if config.sample_from_anchor else d + 1]
        z = rows @ y
        features = y
        if config.kind != "none":
            e = state["markov_head.markov_w1.weight"][document.x[anchor + d]]
            bias, memory = markov_bias(state, config.kind, e, y, memory)
            z = z + bias
            features = torch.cat([y, e]) if config.confidence_reads_markov else y
        logits.append(z)
        if config.confidence:
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
