"""Attention in runs of blocks is attention under the whole row's mask."""

import pytest
import torch

from spec_data.shards.packing import row_layout
from spec_train.attention import block_runs as dspark_attend
from spec_train.attention.block_runs import RunAttending, block_attending
from spec_train.attention.masked import Attending
from spec_train.attention.masks import block_mask
from tests.tolerance import LAYER, close

SIZE, HEAD = 3, 8


@pytest.mark.parametrize("backend", ["dense", "sdpa"])
@pytest.mark.parametrize("run", [1, 2, 32])
def test_runs_see_what_the_mask_says_with_its_gradients(run, backend, monkeypatch) -> None:
    monkeypatch.setattr(dspark_attend, "RUN", run)
    document_ids, _ = row_layout([[4, 6, 3], [13], [2]], 15)
    anchors = torch.tensor([[0, 2, 3, 4, 9, 11, 12], [12, 3, 7, 5, 1, 0, 0], [1, 0, 0, 0, 0, 0, 0]])
    kept = torch.tensor([[True] * 7, [True] * 5 + [False] * 2, [True] + [False] * 6])
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> torch.Tensor:
        shape = 3, heads, length, HEAD
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    inputs = draw(4, 7 * SIZE), draw(2, 15 + 7 * SIZE), draw(2, 15 + 7 * SIZE)
    whole = Attending.prepare(block_mask(document_ids, anchors, kept, SIZE), HEAD, "dense")
    runs = block_attending(document_ids, anchors, kept, SIZE, HEAD, backend)
    assert isinstance(runs, RunAttending)
    expected, found = whole(*inputs, 0.3), runs(*inputs, 0.3)
    close(found, expected, terms=LAYER)
    weight = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weight).sum(), inputs)
    for a, b in zip(torch.autograd.grad((found * weight).sum(), inputs), wanted, strict=True):
        close(a, b, terms=2 * LAYER)


def test_flex_reads_the_whole_mask_and_runs_end_with_their_document() -> None:
    document_ids, _ = row_layout([[5, 6]], 12)
    anchors = torch.tensor([[2, 3, 7, 9]])
    kept = torch.tensor([[True, True, True, False]])
    flex = block_attending(document_ids, anchors, kept, SIZE, HEAD, "flex")
    assert isinstance(flex, Attending) and flex.backend == "flex"
    runs = block_attending(document_ids, anchors, kept, SIZE, HEAD, "auto")
    assert isinstance(runs, RunAttending)
    found = [(r.slots, r.context) for r in runs._packs[0]]
    assert found == [
        (slice(0, 6), slice(0, 4)),
        (slice(6, 9), slice(5, 8)),
        (slice(9, 12), slice(0, 1)),
    ]
