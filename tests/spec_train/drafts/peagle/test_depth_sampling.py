"""Conditional drop sampling: equal to plain loops, with the properties of the paper."""

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import row_layout
from spec_train.drafts.peagle.draft import cod_sample
from tests.spec_train.drafts.peagle.reference import reference_cod

LENGTHS = [[30, 1, 17, 2, 50], [64, 3, 20]]
WIDTH = 104


def case(share: float, depths: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return supervised slots, document ids and uniform numbers of two rows."""
    generator = torch.Generator().manual_seed(seed)
    document_ids, _ = row_layout(LENGTHS, WIDTH)
    supervised = torch.rand(2, WIDTH, generator=generator) < share
    uniforms = torch.rand(depths - 1, 2, WIDTH, generator=generator, dtype=torch.float64)
    return supervised, document_ids, uniforms


def documents() -> list[tuple[int, int, int]]:
    """Return (row, first slot, length) of every document."""
    found = []
    for b, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            found.append((b, start, length))
            start += length
    return found


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize(("ratio", "floor"), [(0.7, 0.2), (1.0, 0.0), (0.4, 0.05)])
def test_it_is_the_loop_version_document_by_document(share, ratio, floor):
    supervised, ids, uniforms = case(share, 8, seed=3)
    supervised[ids < 0] = True  # garbage in padding changes nothing
    sample = cod_sample(supervised, ids, uniforms, ratio=ratio, floor=floor)
    expected = torch.zeros(2, 8, WIDTH, dtype=torch.bool)
    for b, start, length in documents():
        part = slice(start, start + length)
        elements = reference_cod(
            supervised[b, part].tolist(), uniforms[:, b, part].tolist(), ratio, floor
        )
        for t, d in elements:
            expected[b, d, start + t] = True
    assert torch.equal(sample, expected)


@pytest.mark.parametrize("seed", range(3))
def test_properties(seed: int) -> None:
    depths, ratio, floor = 8, 0.7, 0.2
    supervised, ids, uniforms = case(0.8, depths, seed)
    sample = cod_sample(supervised, ids, uniforms, ratio=ratio, floor=floor)
    assert torch.equal(sample[:, 0], ids >= 0)  # depth 0 keeps every slot
    for b, start, length in documents():
        count = int(supervised[b, start : start + length].sum())
        for d in range(1, depths):
            anchors = (sample[b, d, start : start + length]).nonzero().flatten() + start
            slots = anchors + d
            assert (slots < start + length).all() and (slots > start).all()
            assert supervised[b, slots].all()
            assert sample[b, d - 1, anchors].all()  # the previous depth is in the sample
            candidates = [
                p
                for p in range(start + 1, start + length)
                if supervised[b, p] and p - d >= start and sample[b, d - 1, p - d]
            ]
            quota = int(max(count - d, 0) * max(ratio**d, floor))
            assert len(slots) == min(quota, len(candidates))


def test_a_long_answer_gets_the_shares_of_the_paper() -> None:
    """Within one turn there are always enough candidates for the shares."""
    length = 2000
    supervised = torch.ones(1, length, dtype=torch.bool)
    uniforms = torch.rand(7, 1, length, dtype=torch.float64)
    sample = cod_sample(supervised, torch.zeros(1, length).long(), uniforms, ratio=0.7, floor=0.2)
    counts = sample[0].sum(-1).tolist()
    wanted = [length] + [int((length - d) * max(0.7**d, 0.2)) for d in range(1, 8)]
    assert counts[:5] == wanted[:5]
    assert all(w - 8 <= c <= w for c, w in zip(counts, wanted, strict=True))


def test_every_candidate_is_as_likely() -> None:
    length, times = 41, 4000
    torch.manual_seed(0)
    supervised = torch.ones(times, length, dtype=torch.bool)
    uniforms = torch.rand(1, times, length, dtype=torch.float64)
    ids = torch.zeros(times, length, dtype=torch.long)
    kept = cod_sample(supervised, ids, uniforms, ratio=0.5, floor=0.0)[:, 1].double().mean(0)
    assert kept[-1] == 0 and (kept[:-1] - 0.5).abs().max() < 5 * (0.25 / times) ** 0.5
