"""P-EAGLE drafting: serving equals training, and decoding is lossless."""

import pytest
import torch
from torch import Tensor

from spec_train.drafts.peagle.draft import ParallelDrafter
from tests.spec_train.drafts.peagle.cases import (
    Case,
    make_documents,
    reference_config,
    reference_state,
)
from tests.spec_train.drafts.peagle.cases import make_draft as make_exact
from tests.spec_train.drafts.peagle.reference import reference_logits
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.tolerance import close, network

DEPTHS = 4

target, prompts = evaluate_tools.target, evaluate_tools.prompts


class Recorder:
    """A greedy sampler that records the logits that it receives."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def draft(self, logits: Tensor, draft_ids: Tensor, vocab_size: int) -> tuple[Tensor, None]:
        self.logits.append(logits)
        return draft_ids[logits.argmax()], None


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
def test_the_drafter_computes_the_logits_of_the_slow_reference(seed, window, types):
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
