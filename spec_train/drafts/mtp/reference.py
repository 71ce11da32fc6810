"""A slow MTP block with chains: one document, slot and head at a time (see `layer`).

Slot t sees the target's normed final state of token t and the known token t+1, each after a norm of
its own, and drafts token t+2. Step s continues from slot t: its row is (a token of position t+1+s,
the previous state) at position t+s. The block is a decoder layer of the target's family.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_train.drafts import slow_layer as slow
from spec_train.drafts.eagle import reference as eagle
from spec_train.drafts.slow_layer import Document, Row, Sizes, State


@dataclass(frozen=True, kw_only=True)
class Config(eagle.Config):
    """Settings of the block, and the target's head."""

    states_first: bool = False  # fc reads [state ; embedding]
    norm_output: bool = True  # the carried state is normed


def _latent(state: State, name: str, x: Tensor, position: int, sizes: Sizes) -> Row:
    """Return key and value of every head of multi-head latent attention."""
    r = 2 * len(sizes.rope_inv_freq)
    both = slow.linear(state, f"{name}.kv_a_proj_with_mqa", x)
    normed = slow.rms(both[:-r], state[f"{name}.kv_a_layernorm.weight"], 1e-6)
    shared = _turned(both[-r:], position, sizes)
    heads = slow.linear(state, f"{name}.kv_b_proj", normed).view(sizes.heads, -1)
    n = sizes.head_dim - r
    return [(torch.cat([head[:n], shared]), head[n:]) for head in heads]


def _turned(part: Tensor, position: int, sizes: Sizes) -> Tensor:
    """Rotate pairs that lie side by side."""
    return slow.rope(torch.cat([part[0::2], part[1::2]]), *sizes.turn(position))


def row_of(state: State, layer: str, x: Tensor, position: int, sizes: Sizes) -> Row:
    """Return the row that an attention input [H] adds, in a layer of any family."""
    if f"{layer}.self_attn.kv_b_proj.weight" in state:
        return _latent(state, f"{layer}.self_attn", x, position, sizes)
    return slow.keys_values(state, layer, x, position, sizes)


def heads_of(
    state: State, layer: str, x: Tensor, position: int, rows: Sequence[Row], sizes: Sizes
) -> Tensor:
    """Return the heads over `rows`, joined; gated if q_proj has rows for gates beside queries."""
    name, d = f"{layer}.self_attn", sizes.head_dim
    if f"{name}.kv_b_proj.weight" in state:
        q = slow.linear(state, f"{name}.q_a_proj", x)
        q = slow.rms(q, state[f"{name}.q_a_layernorm.weight"], 1e-6)
        n, heads = d - 2 * len(sizes.rope_inv_freq), []
        for h, part in enumerate(slow.linear(state, f"{name}.q_b_proj", q).view(-1, d)):
            query = torch.cat([part[:n], _turned(part[n:], position, sizes)])
            scores = torch.stack([row[h][0] for row in rows]) @ query / math.sqrt(d)
            heads.append(torch.softmax(scores, 0) @ torch.stack([row[h][1] for row in rows]))
        return torch.cat(heads)
    weight = state[f"{name}.q_proj.weight"]
    if len(weight) == sizes.heads * d:
        return slow.attend(state, layer, x, position, rows, sizes)
    queries, gates = weight.view(sizes.heads, 2, d, -1).unbind(1)
    state = {**state, f"{name}.q_proj.weight": queries.flatten(0, 1)}
    opened = torch.sigmoid(gates.flatten(0, 1) @ x)
    return opened * slow.attend(state, layer, x, position, rows, sizes)


def joined(state: State, config: Config, token: int, carried: Tensor) -> Tensor:
    """Return the block's input [H] of a known token and a carried state [H]."""
    embedding = state["embed_tokens.weight"][token]
    parts = [
        config.norm(embedding, state["enorm.weight"]),
        config.norm(carried, state["hnorm.weight"]),
    ]
    return slow.linear(state, "fc", torch.cat(parts[::-1] if config.states_first else parts))


def chain(
    state: State,
    config: Config,
    document: Document,
    t: int,
    known: Sequence[int] | None,
    steps: int,
) -> list[Tensor]:
    """Return the inputs of the head [H] of the chain from slot t; arguments as `eagle.chain`."""
    rows: list[Row] = []
    made: list[Tensor] = []
    carried = document.aux[0]
    for position in range(t + steps):
        if position <= t:
            token, carried = document.x[position + 1], document.aux[position]
        elif known is None:
            token = int(eagle.head(config, made[-1]).argmax())
        else:
            token = known[position - t - 1]
        x = joined(state, config, token, carried)
        normed = config.norm(x, state["block.input_layernorm.weight"])
        rows.append(row_of(state, "block", normed, position, config))
        if position >= t:
            heads = heads_of(state, "block", normed, position, rows, config)
            output = slow.finish(state, "block", x, heads, config)
            made.append(config.norm(output, state["norm.weight"]))
            carried = made[-1] if config.norm_output else output
    return made
