"""Slow block drafts: one document, block, slot and head at a time (see `layer`).

B slots of a block, D drafts of a block, r Markov rank. What a kind adds to the logits of a slot is
in the reference of its folder.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.kind_vectors import every_vectors
from spec_train.drafts.slow_layer import Document, State, linear


@dataclass(frozen=True, kw_only=True)
class Config(slow.Sizes):
    """Settings from the checkpoint's config.json."""

    head_rows: Tensor  # of the target's head, for the draft vocabulary [Vd, H]
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    windows: tuple[int | None, ...]  # per layer: positions that a slot sees back; None: all
    non_causal: bool = False  # slots of a layer with a window see later slots of their block
    kind: str = "none"  # of the Markov head: none, vanilla, gated, rnn
    confidence_reads_markov: bool = True
    top_k: int = 0  # of a selector or lattice
    vector_eps: float = 0.0
    logit_scale: float = 0.0
    prefix: int = 0  # first drafts that a recurrent head leaves alone

    @property
    def depth(self) -> int:
        """Number of drafts of a block."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1


def block_logits(
    state: State,
    config: Config,
    document: Document,
    anchor: int,
    own: bool = False,
    ids: Sequence[int] = (),
    states: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return logits [Vd] and confidences of a block's D drafts, after the document's own tokens.

    `own`: after the draft's own choices; `ids` are the target ids of its vocabulary, if they are
    not those of the file. `states` of the block's slots are computed if None. The lists end before
    the first draft whose previous token does not exist.
    """
    states = states or block_states(state, config, document, anchor)
    x, memory = list(document.x), None
    ids = ids or slow.draft_ids(state, len(config.head_rows))
    added = [part(state, config, states) for part in parts_of(state)]
    logits, confidences = [], []
    for d in range(config.depth):
        if anchor + d >= len(x):
            break
        y = states[d if config.sample_from_anchor else d + 1]
        z = config.head_rows @ y
        features = y
        for part in added:
            z = z + part(y, x[anchor : anchor + d + 1])
        if config.kind != "none":
            e = state["markov_head.markov_w1.weight"][x[anchor + d]]
            bias, memory = markov_bias(state, config.kind, e, y, memory)
            z = z + bias
            features = torch.cat([y, e]) if config.confidence_reads_markov else y
        logits.append(z)
        if own:
            x = [*x[: anchor + d + 1], ids[int(z.argmax())]]
        if "confidence_head.proj.bias" in state:
            forecast = linear(state, "confidence_head.proj", features)
            confidences.append(torch.sigmoid(forecast[0]))
    return logits, confidences


def parts_of(state: State) -> list[Callable[[State, Config, list[Tensor]], Any]]:
    """Return what kinds add to the logits of a slot, of those that a checkpoint has tensors of.

    A part is made for the states of a block's slots [H]. It is called for its drafts in order, with
    the state of the slot [H] and the block's tokens before the draft, and returns [Vd].
    """
    kinds = every_vectors().values()
    return [part for kind in kinds for name, part in kind.added.items() if name in state]


def markov_bias(
    state: State, kind: str, e: Tensor, y: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the bias [Vd] after a token with W1 row e [r], and the rnn's next state [r]."""
    w2 = state["markov_head.markov_w2.weight"]
    if kind == "vanilla":
        return w2 @ e, None
    if kind == "gated":
        gate = torch.sigmoid(linear(state, "markov_head.gate_proj", torch.cat([y, e])))
        return w2 @ (gate * e), None
    if memory is None:
        memory = torch.zeros_like(e)
    joint = linear(state, "markov_head.joint_proj", torch.cat([memory, e, y]))
    r = len(e)
    gate, candidate, out = torch.sigmoid(joint[:r]), torch.tanh(joint[r : 2 * r]), joint[2 * r :]
    return w2 @ torch.tanh(out), gate * memory + (1 - gate) * candidate


def block_states(state: State, config: Config, document: Document, anchor: int) -> list[Tensor]:
    """Return y [H] of the B slots of a block; it sees the target's states before `anchor`."""
    context = [
        config.norm(linear(state, "fc", document.aux[t]), state["hidden_norm.weight"])
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
    config: Config,
    context: list[Tensor],
    rows: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    inputs = [config.norm(row, state[f"{name}.input_layernorm.weight"]) for row in rows]
    if f"{name}.attention_conv.base_kernel" in state:
        return _convolved_layer(state, name, config, context, rows, inputs, anchor)
    attended = _attended(state, name, config, context, inputs, anchor)
    pairs = zip(rows, attended, strict=True)
    return [slow.finish(state, name, row, heads, config) for row, heads in pairs]


def _attended(
    state: State,
    name: str,
    config: Config,
    context: list[Tensor],
    inputs: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    # Keys: those of the context, then those of the block; the context has no input norm.
    keys = [
        slow.keys_values(state, name, x, position, config)
        for position, x in enumerate([*context, *inputs])
    ]
    window, out = config.windows[int(name.split(".")[1])], []
    for k, u in enumerate(inputs):
        seen = [keys[j] for j in _seen(config, window, anchor, k)]
        out.append(slow.attend(state, name, u, anchor + k, seen, config))
    return out


def _convolved_layer(
    state: State,
    name: str,
    config: Config,
    context: list[Tensor],
    rows: list[Tensor],
    inputs: list[Tensor],
    anchor: int,
) -> list[Tensor]:
    """A layer of DFlash 2: both sublayers between convolutions whose weights their inputs give."""
    conv = f"{name}.attention_conv"
    inside = convolved(state, conv, 0, inputs, inputs)
    heads = _attended(state, name, config, context, inside, anchor)
    added = [linear(state, f"{name}.self_attn.o_proj", x) for x in heads]
    added = convolved(state, conv, 1, inputs, added)
    middle = [row + x for row, x in zip(rows, added, strict=True)]
    conv, norm = f"{name}.mlp_conv", state[f"{name}.post_attention_layernorm.weight"]
    inputs = [config.norm(x, norm) for x in middle]
    inside = convolved(state, conv, 0, inputs, inputs)
    added = [slow.mlp(state, f"{name}.mlp", x, config.act) for x in inside]
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
    groups = len(state[f"{name}.kernel_projection.weight"]) // (2 * taps)
    group = torch.arange(size) * groups // size  # of every channel
    out = []
    for i, row in enumerate(inputs):
        delta = linear(state, f"{name}.kernel_projection", row)
        total = torch.zeros_like(row)
        for t in range(min(taps, i + 1)):  # none before the block's first slot
            kernel = base[side, t] + delta[(side * taps + t) * groups + group]
            total = total + kernel * slots[i - t]
        out.append(total)
    return out


def _seen(config: Config, window: int | None, anchor: int, slot: int) -> list[int]:
    """Return the positions that a slot sees; context and slots are at 0, 1, ... in order."""
    last, own = anchor + config.block_size - 1, anchor + slot
    if window is None:
        return list(range(last + 1))
    if not config.non_causal:
        last = own
    return [p for p in range(last + 1) if abs(own - p) < window]
