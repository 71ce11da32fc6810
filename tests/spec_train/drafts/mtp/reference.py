"""Slow float64 loops for an MTP block: one token, one head and one expert at a time.

`state` holds the checkpoint of the draft, `config` is the transformers configuration of the target.
A layer has the attention and the experts of which it has the weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.drafts import slow_layer
from spec_train.drafts.mtp.reference import heads_of, row_of
from spec_train.drafts.slow_layer import Row, State, linear
from tests.spec_train.drafts.slow_layer import slot_counts


@dataclass(frozen=True, kw_only=True)
class Sizes(slow_layer.Sizes):
    """Sizes of the block; `zero_centred`: its norms multiply by 1 + weight."""

    zero_centred: bool = False

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return slow_layer.rms(x, weight + self.zero_centred, self.rms_norm_eps)


def mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    g = gate @ x
    return down @ (g / (1 + torch.exp(-g)) * (up @ x))


def named_mlp(state: State, name: str, x: Tensor) -> Tensor:
    weights = (state[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return mlp(x, *weights)


def routing(state: State, config: Any, x: Tensor) -> dict[int, Tensor]:
    """The weights of the experts that are chosen for x [H]."""
    logits = state["block.mlp.gate.weight"] @ x
    bias = state.get("block.mlp.gate.e_score_correction_bias")
    if bias is None:
        scores = torch.softmax(logits, 0)
        order = scores.tolist()
    else:
        scores = 1 / (1 + torch.exp(-logits))
        order = (scores + bias).tolist()
        size = len(order) // config.n_group
        groups = [range(g * size, (g + 1) * size) for g in range(config.n_group)]
        best = sorted(groups, key=lambda g: -sum(sorted(order[e] for e in g)[-2:]))
        inside = {e for g in best[: config.topk_group] for e in g}
        order = [o if e in inside else -math.inf for e, o in enumerate(order)]
    chosen = sorted(range(len(order)), key=lambda e: -order[e])[: config.num_experts_per_tok]
    total = sum(scores[e] for e in chosen)
    factor = getattr(config, "routed_scaling_factor", 1.0)
    return {e: scores[e] / total * factor for e in chosen}


def feed_forward(state: State, config: Any, x: Tensor) -> Tensor:
    if "block.mlp.gate.weight" not in state:
        return named_mlp(state, "block.mlp", x)
    out = torch.zeros_like(x)
    for e, weight in routing(state, config, x).items():
        gate, up = state["block.mlp.experts.gate_up_proj"][e].chunk(2)
        out = out + weight * mlp(x, gate, up, state["block.mlp.experts.down_proj"][e])
    if "block.mlp.shared_expert_gate.weight" in state:
        opened = torch.sigmoid(state["block.mlp.shared_expert_gate.weight"] @ x)
        return out + opened * named_mlp(state, "block.mlp.shared_expert", x)
    return out + named_mlp(state, "block.mlp.shared_experts", x)


@dataclass(frozen=True)
class Reference:
    """A draft in slow motion."""

    state: State
    config: Any  # of transformers
    sizes: Sizes
    states_first: bool = False
    norm_output: bool = True

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.sizes.norm(x, self.state[f"{name}.weight"])

    def outputs(self, rows: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """The block's outputs [H] of rows (known token, carried state) at positions 0, 1, ..."""
        seen: list[Row] = []
        out = []
        for position, (token, carried) in enumerate(rows):
            parts = [
                self.norm("enorm", self.state["embed_tokens.weight"][token]),
                self.norm("hnorm", carried),
            ]
            x = linear(self.state, "fc", torch.cat(parts[::-1] if self.states_first else parts))
            normed = self.norm("block.input_layernorm", x)
            seen.append(row_of(self.state, "block", normed, position, self.sizes))
            heads = heads_of(self.state, "block", normed, position, seen, self.sizes)
            middle = x + linear(self.state, "block.self_attn.o_proj", heads)
            after = self.norm("block.post_attention_layernorm", middle)
            out.append(middle + feed_forward(self.state, self.config, after))
        return out

    def chain(
        self, x: Sequence[int], f: Tensor, t: int, known: Sequence[int], steps: int
    ) -> list[Tensor]:
        """The inputs of the head [H] of the chain from slot t, whose later tokens are `known`."""
        rows = [(x[j + 1], f[j]) for j in range(t + 1)]
        out: list[Tensor] = []
        for s in range(steps):
            last = self.outputs(rows)[-1]
            out.append(self.norm("norm", last))
            if s < len(known):
                rows.append((known[s], out[-1] if self.norm_output else last))
        return out

    def loss(
        self,
        documents: Sequence[tuple[Sequence[int], Sequence[int], Tensor]],
        head: Tensor,  # [V, H]
        shares: Sequence[float],
    ) -> Tensor:
        """The loss of documents (tokens, loss mask, final states)."""
        steps = len(shares)
        totals, counts = [torch.zeros(())] * steps, [0] * steps
        for x, m, f in documents:
            for t in range(len(x) - 1):
                counted = [s for s in range(steps) if slot_counts(m, t + s)]
                if not counted:
                    continue
                made = self.chain(x, f, t, x[t + 2 :], counted[-1] + 1)
                for s in counted:
                    p = torch.softmax(head @ f[t + 1 + s], 0)
                    log_q = torch.log_softmax(head @ made[s], 0)
                    totals[s] = totals[s] - (p * log_q).sum()
                    counts[s] += 1
        parts = zip(shares, totals, counts, strict=True)
        return sum((w * loss / max(n, 1) for w, loss, n in parts), torch.zeros(()))
