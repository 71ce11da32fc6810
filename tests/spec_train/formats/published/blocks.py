"""Small random block drafts in the layouts of other trainers, compared with the slow reference.

What differs between trainers (windows, causality, heads, layouts) are fields of its config.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import HeadSpec
from spec_train.drafts import load_draft
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.dspark.reference import ReferenceConfig, block_logits, block_states
from tests.spec_train.drafts.slow_layer import Document, State
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


class Recorder:
    """A greedy sampler that keeps the logits it is given, and the tokens that they are of."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        self.ids: list[Tensor] = []

    def draft(self, logits: Tensor, ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.logits.append(logits)
        self.ids.append(ids)
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


def reference_config(facts: TargetFacts, state: State, **how: Any) -> ReferenceConfig:
    """Return what an independent reader knows of a draft with tensors under DeepSpec's names.

    `how` are fields of the config.
    """
    width = state.get("confidence_head.proj.weight", torch.zeros(1, H)).shape[1]
    fields = {
        "head_rows": facts.head,
        "block_size": SIZE,
        "mask_token_id": MASK,
        "sample_from_anchor": True,
        "windows": (None,) * LAYERS,
        "confidence_reads_markov": width > H,
    }
    return ReferenceConfig(**tiny.LAYER | fields | how)


def compare(
    draft: Any,
    facts: TargetFacts,
    state: State,
    config: ReferenceConfig,
    lengths: tuple[int, ...] = (7, 3),
    ids: Sequence[int] = range(V),
) -> None:
    """Compare two rounds of greedy drafting with the slow reference: tokens, logits, confidences.

    `lengths` are the numbers of verified positions that each round adds, `ids` the target tokens of
    the head's rows.
    """
    drafter, state = (
        draft.drafter(head_of(facts)),
        {"embed_tokens.weight": facts.embedding, **state},
    )
    aux = torch.randn(sum(lengths), draft.fc.in_features, dtype=torch.float64)
    known = torch.randint(0, V - 1, (sum(lengths) + 1,)).tolist()
    done = 0
    for length in lengths:
        recorder, new = Recorder(), slice(done + 1, done + length + 1)
        with torch.no_grad():
            drafted, _ = drafter.propose(
                known[new], aux[None, done : done + length], config.block_size, recorder
            )
        done += length
        x = [*known[: done + 1], *drafted.tolist()]  # the reference takes the tokens as they are
        document = Document(x=x, m=[], aux=aux)
        logits, confidences = block_logits(state, config, document, done)
        assert x[done + 1 :] == [ids[int(z.argmax())] for z in logits]
        tiny.assert_same(torch.stack(recorder.logits), torch.stack(logits))
        if confidences:
            slots = block_states(state, config, document, done)[-config.depth :]
            with torch.no_grad():
                before = draft.previous(torch.tensor(x[done:-1]))
                found = draft.confidence_head(torch.stack(slots), before).sigmoid()
            tiny.assert_same(found, torch.stack(confidences))


def drafts_as_defined(
    folder: Path,
    tensors: Mapping[str, Tensor],
    facts: TargetFacts,
    lengths: tuple[int, ...] = (7, 3),
    ids: Sequence[int] = range(V),
    **how: Any,
) -> Any:
    """Read a draft directory, compare it with the slow reference, and return it.

    `tensors` have DeepSpec's names; `how` as for `reference_config`.
    """
    draft = read_block(folder, facts)
    compare(draft, facts, tensors, reference_config(facts, tensors, **how), lengths, ids)
    return draft


def chooses_as_defined(
    folder: Path, tensors: Mapping[str, Tensor], facts: TargetFacts, stage: Any, **how: Any
) -> Any:
    """Read a draft that chooses from candidates, compare a block with the slow one, and return it.

    `stage` is the reference's class of such a block; the others as for `drafts_as_defined`.
    """
    draft, recorder, length = read_block(folder, facts), Recorder(), 6
    state = {"embed_tokens.weight": facts.embedding, **tensors}
    config = reference_config(facts, state, sample_from_anchor=False, **how)
    aux, known = torch.randn(length, draft.fc.in_features).double(), list(range(1, length + 2))
    with torch.no_grad():
        drafter = draft.drafter(head_of(facts))
        drafted, _ = drafter.propose(known[1:], aux[None], SIZE, recorder)
    assert len(drafted) == SIZE - 1
    document = Document(x=[*known, *drafted.tolist()], m=[], aux=aux)
    block = stage(state, config, document, length)
    unary, _ = block_logits(state, config, document, length)
    for d, (scores, ids) in enumerate(zip(recorder.logits, recorder.ids, strict=True)):
        candidates = block.candidates(unary[d])
        assert ids.tolist() == candidates
        wanted = block.scores(d, unary[d], candidates)
        tiny.assert_same(scores, wanted)
        assert drafted[d] == candidates[int(wanted.argmax())]
    return draft
