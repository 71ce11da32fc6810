"""Small random block drafts in the layouts of other trainers, and an independent forward.

The forward is written from the definition: one slot, one head and one key at a time, in float64.
What differs between trainers (windows, causality, heads, layouts) are arguments of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import HeadSpec
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts import slow_layer
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import H, V, gain, noise

MASK, SIZE, RANK, LAYERS = V - 1, 4, 3, 2
IDS = [1, 4, 8]
"""Target layers, as outputs of blocks."""


def block_tensors(
    *,
    layers: int = LAYERS,
    states: int = len(IDS),
    markov: str | None = None,
    confidence: int | None = None,
    rows: int = V,
    qk_norm: bool = True,
) -> dict[str, Tensor]:
    """Return a block draft under DeepSpec's names, without embedding and head.

    `markov` is a type of Markov head, `confidence` the width of the confidence head, `rows` the
    size of the draft vocabulary.
    """
    found = {
        "fc.weight": noise(H, states * H),
        "hidden_norm.weight": gain(H),
        "norm.weight": gain(H),
    }
    for i in range(layers):
        found |= tiny.layer_tensors(f"layers.{i}.", H, qk_norm)
        found[f"layers.{i}.input_layernorm.weight"] = gain(H)
    if markov:
        found["markov_head.markov_w1.weight"] = noise(V, RANK) * 3
        found["markov_head.markov_w2.weight"] = noise(rows, RANK) * 3
    if markov == "gated":
        found["markov_head.gate_proj.weight"] = noise(RANK, H + RANK)
        found["markov_head.gate_proj.bias"] = noise(RANK)
    if markov == "rnn":
        found["markov_head.joint_proj.weight"] = noise(3 * RANK, 2 * RANK + H)
        found["markov_head.joint_proj.bias"] = noise(3 * RANK)
    if confidence:
        found["confidence_head.proj.weight"] = noise(1, confidence)
        found["confidence_head.proj.bias"] = noise(1)
    return found


@dataclass
class Reading:
    """What an independent reader knows of a draft."""

    state: Mapping[str, Tensor]  # under DeepSpec's names
    embedding: Tensor  # [V, H]
    head: Tensor  # [rows, H]
    ids: list[int] = field(default_factory=lambda: list(range(V)))  # target token of every row
    anchor: bool = True  # the anchor's slot drafts first
    markov: str | None = None
    types: tuple[str, ...] = ("full_attention",) * LAYERS
    window: int = 0
    causal: tuple[bool, ...] = (False,) * LAYERS
    size: int = SIZE
    mask: int = MASK


def slot_states(it: Reading, aux: Tensor, anchor: int) -> list[Tensor]:
    """Return the states [H] of the slots of the block after the positions of `aux` [T, n*H]."""
    state, start, sizes = it.state, len(aux), tiny.LAYER
    context = [sizes.norm(state["fc.weight"] @ row, state["hidden_norm.weight"]) for row in aux]
    x = [it.embedding[anchor], *[it.embedding[it.mask]] * (it.size - 1)]
    for number in range(len(it.types)):
        layer = f"layers.{number}"
        inside = [sizes.norm(row, state[f"{layer}.input_layernorm.weight"]) for row in x]
        rows = [
            slow_layer.keys_values(state, layer, row, position, sizes)
            for position, row in enumerate([*context, *inside])
        ]
        out = []
        for at, (residual, row) in enumerate(zip(x, inside, strict=True), start):
            seen = [keys for j, keys in enumerate(rows) if _sees(it, number, at, j, start)]
            heads = slow_layer.attend(state, layer, row, at, seen, sizes)
            out.append(slow_layer.finish(state, layer, residual, heads, sizes))
        x = out
    return [sizes.norm(row, state["norm.weight"]) for row in x]


def _sees(it: Reading, layer: int, at: int, key: int, start: int) -> bool:
    """Whether the slot at position `at` sees the key at position `key`."""
    if it.types[layer] == "sliding_attention" and at - key >= it.window:
        return False
    return key <= at or (key >= start and not it.causal[layer])


def block_drafts(
    it: Reading, aux: Tensor, anchor: int
) -> tuple[list[int], list[Tensor], list[Tensor]]:
    """Return a block's greedy tokens, the logits [rows] of each, and its confidence logits."""
    previous, memory = anchor, torch.zeros(RANK, dtype=torch.float64)
    tokens, logits, confidences = [], [], []
    for y in slot_states(it, aux, anchor)[0 if it.anchor else 1 :]:
        z, features = it.head @ y, y
        if it.markov:
            e = it.state["markov_head.markov_w1.weight"][previous]
            latent, memory = _latent(it, e, y, memory)
            z = z + it.state["markov_head.markov_w2.weight"] @ latent
            features = torch.cat([y, e])
        if "confidence_head.proj.weight" in it.state:
            width = it.state["confidence_head.proj.weight"].shape[1]
            confidences.append(
                slow_layer.linear(it.state, "confidence_head.proj", features[:width])
            )
        previous = it.ids[int(z.argmax())]
        tokens.append(previous)
        logits.append(z)
    return tokens, logits, confidences


def _latent(it: Reading, e: Tensor, y: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    if it.markov == "gated":
        gate = slow_layer.linear(it.state, "markov_head.gate_proj", torch.cat([y, e]))
        return torch.sigmoid(gate) * e, memory
    if it.markov == "rnn":
        z = slow_layer.linear(it.state, "markov_head.joint_proj", torch.cat([memory, e, y]))
        gate, candidate, out = z.chunk(3)
        keep = torch.sigmoid(gate)
        return torch.tanh(out), keep * memory + (1 - keep) * torch.tanh(candidate)
    return e, memory


class Recorder:
    """A greedy sampler that keeps the logits it is given."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def draft(self, logits: Tensor, ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.logits.append(logits)
        return ids[logits.argmax(-1)], None


def head_of(facts: TargetFacts) -> TargetHead:
    """Return the embedding and head of a target."""
    spec = HeadSpec(vocab_size=V, hidden_size=H, tied=False)
    return TargetHead(spec, facts.embedding, facts.head)


def read_block(folder: Path, facts: TargetFacts) -> Any:
    """Read a draft directory for serving, in float64."""
    draft = load_draft(folder, facts).double()
    draft.share(head_of(facts))
    return draft


def compare(draft: Any, facts: TargetFacts, it: Reading, lengths: tuple[int, ...] = (7, 3)) -> None:
    """Compare two rounds of drafting with the independent forward: tokens and logits.

    `lengths` are the numbers of verified positions that each round adds.
    """
    drafter = draft.drafter(head_of(facts))
    aux = torch.randn(sum(lengths), draft.fc.in_features, dtype=torch.float64)
    known = torch.randint(0, V - 1, (sum(lengths) + 1,)).tolist()
    done = 0
    for length in lengths:
        recorder = Recorder()
        new = slice(done + 1, done + length + 1)
        with torch.no_grad():
            ids, _ = drafter.propose(known[new], aux[None, done : done + length], it.size, recorder)
        done += length
        tokens, logits, _ = block_drafts(it, aux[:done], known[done])
        assert ids.tolist() == tokens
        tiny.assert_same(torch.stack(recorder.logits), torch.stack(logits))


def drafts_as_defined(
    folder: Path,
    tensors: Mapping[str, Tensor],
    facts: TargetFacts,
    lengths: tuple[int, ...] = (7, 3),
    **reading: Any,
) -> Any:
    """Read a draft directory, compare it with the independent forward, and return it.

    `tensors` have DeepSpec's names; `reading` are fields of `Reading`.
    """
    draft = read_block(folder, facts)
    it = Reading(tensors, **{"embedding": facts.embedding, "head": facts.head} | reading)
    compare(draft, facts, it, lengths)
    if "confidence_head.proj.weight" in tensors:
        tiny.assert_same(*confidences(draft, facts, it))
    return draft


def confidences(draft: Any, facts: TargetFacts, it: Reading) -> tuple[Tensor, Tensor]:
    """Return the confidence logits of one block: of the draft, and by the independent forward."""
    aux = torch.randn(6, draft.fc.in_features, dtype=torch.float64)
    tokens, _, expected = block_drafts(it, aux, 5)
    states = torch.stack(slot_states(it, aux, 5))[0 if it.anchor else 1 :]
    with torch.no_grad():
        known = draft.previous(torch.tensor([5, *tokens[:-1]]))
        return draft.confidence_head(states, known), torch.cat(expected)
