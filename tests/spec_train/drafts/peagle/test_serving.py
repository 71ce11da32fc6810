"""P-EAGLE drafting: serving equals training, and decoding is lossless."""

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import shift_left
from spec_train.drafts.frames import Frame
from spec_train.drafts.peagle import draft as peagle_serving
from spec_train.drafts.peagle.draft import ParallelDrafter, PeagleDraft, element_states
from spec_train.drafts.peagle.elements import segments_of
from tests.spec_train.drafts.any_draft import draft_for
from tests.spec_train.drafts.peagle.cases import (
    Case,
    make_documents,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.peagle.cases import make_draft as make_exact
from tests.spec_train.drafts.peagle.reference import reference_logits
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import (
    LAYERS,
    VOCAB,
    batch_of,
    head_of,
    respond,
)
from tests.tolerance import close, network, same_but_for_a_tie

DEPTHS = 4

target, prompts = evaluate_tools.target, evaluate_tools.prompts


class Recorder:
    """A greedy sampler that records the logits that it receives."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.logits.append(logits)
        return draft_ids[logits.argmax()], None


@pytest.fixture(scope="module")
def trained(target: Any, prompts: list[list[int]]) -> PeagleDraft:
    """Return a draft that is sometimes right: a few dozen steps on the target's own responses."""
    draft = draft_for("peagle", target, depths=DEPTHS, num_layers=2).train()
    head = head_of(target)
    batch = batch_of(target, [respond(target, p) for p in prompts[:8]])
    optimizer = torch.optim.AdamW(draft.trainable_parameters(), lr=5e-3)
    for _ in range(60):
        optimizer.zero_grad()
        draft.loss(batch, head, draft.slot_counts(batch)).loss.backward()
        optimizer.step()
    return draft.eval()


def chunks(length: int, seed: int) -> list[int]:
    """Return the verified rows per round: a prefill, then one to four at a time."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [3]
    while sum(sizes) < length:
        size = 1 + int(torch.randint(4, (), generator=generator))
        sizes.append(min(size, length - sum(sizes)))
    return sizes


MIXED = "sliding_attention,full_attention,sliding_attention"


@pytest.mark.parametrize("window, types", [(0, "auto"), (3, "auto"), (2, MIXED)])
@pytest.mark.parametrize("seed", range(3))
@torch.no_grad()
def test_the_drafter_computes_the_logits_of_the_slow_reference(
    seed: int, window: int, types: str
) -> None:
    """At every depth, with caches, after rounds of every size, in float64."""
    case = Case(fc_norm=True, window=window, types=types)
    draft, mask = make_exact(case), [0, 0, *[1] * 12]
    (document,) = make_documents(case, draft, [mask], seed=seed)
    every = [(t, d) for t in range(len(mask) - 1) for d in range(case.depths)]
    expected = reference_logits(reference_state(draft), reference_config(case), document, every)
    drafter, sampler, done = ParallelDrafter(draft), Recorder(), 0
    for size in chunks(len(mask) - 1, seed):
        part = slice(done, done + size)
        done += size
        drafter.propose(
            document.x[part.start + 1 : part.stop + 1], document.aux[None, part], 9, sampler
        )
        assert len(sampler.logits) == case.depths  # no deeper than trained
        for d, logits in enumerate(sampler.logits):
            wanted = expected[done - 1, d]
            close(logits, wanted, terms=network(2))
        sampler.logits.clear()
        assert all(cache.length == done for cache in drafter._caches)
    assert drafter.passes == len(chunks(len(mask) - 1, seed))


@torch.no_grad()
def test_training_chains_and_drafter_agree(
    target: Any, prompts: list[list[int]], trained: PeagleDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare training's forward pass, `chains` in small chunks, and one served sequence."""
    documents = [respond(target, p) for p in prompts[:4]]
    batch = batch_of(target, documents)
    shape = batch.input_ids.shape
    sample = torch.zeros(1, DEPTHS, shape[1], dtype=torch.bool)
    for d in range(DEPTHS):  # every element that is inside its document
        inside = torch.ones(shape, dtype=torch.bool)
        for _ in range(d):
            inside = shift_left(inside, batch.document_ids)
        sample[:, d] = inside
    frame = Frame(
        aux=batch.aux(LAYERS),
        input_ids=shift_left(batch.input_ids, batch.document_ids),
        document_ids=batch.document_ids,
        position_ids=batch.position_ids,
        mask=batch.loss_mask,
        rows=torch.zeros(0),
        choice=torch.zeros(0),
        teacher=lambda rows: rows,  # no loss is computed
    )
    (elements,) = segments_of(sample, sample.transpose(0, 1), batch.document_ids, 1)
    states = element_states(trained, frame, elements)
    logits = torch.zeros(DEPTHS, *shape, VOCAB)
    logits[elements.where] = trained.logits(states.flatten(0, 1)[elements.place])

    chains = trained.chains(batch, head_of(target), DEPTHS)
    monkeypatch.setattr(peagle_serving, "CHUNK_ROWS", 20)
    small = trained.chains(batch, head_of(target), DEPTHS)
    same_but_for_a_tie(small[0].tolist(), chains[0].tolist())
    short = trained.chains(batch, head_of(target), 1)
    same_but_for_a_tie(short[0].tolist(), chains[0, :, :1].tolist())
    start, served, wanted = 0, [], []
    for ids, _ in documents:
        drafter, sampler = trained.drafter(head_of(target)), Recorder()
        for t in range(len(ids) - 1):
            slot = start + t
            tokens, _ = drafter.propose(
                ids[t + 1 : t + 2], batch.aux(LAYERS)[:, slot : slot + 1], DEPTHS, sampler
            )
            served.append(tokens.tolist())
            wanted.append(chains[0, slot].tolist())
            for d in range(min(DEPTHS, len(ids) - t)):
                close(sampler.logits[d], logits[d, 0, slot], terms=network(2))
            sampler.logits.clear()
        start += len(ids)
    same_but_for_a_tie(served, wanted)
