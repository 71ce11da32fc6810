"""The spans of a mask say what its predicate says, and chunks hold no more keys than they need."""

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, row_layout
from spec_train.attention.masked import Attending
from spec_train.attention.masks import (
    AttentionMask,
    BlockWindow,
    block_mask,
    causal_mask,
    parallel_mask,
)

LENGTHS = [[5, 9, 1, 3], [18], [2, 2, 7]]
DOCUMENTS, _ = row_layout(LENGTHS, 20)
WINDOWS = [None, 1, 2, 3, 7, 40]


def tables(mask: AttentionMask) -> tuple[Tensor, Tensor]:
    """What the predicate and what the spans say, bool [B, Q, T] each."""
    spans, keys = mask.make_spans(), torch.arange(mask.keys)
    own = keys - spans.common
    ends = [x[..., None] for x in (spans.first, spans.last, spans.own_first, spans.own_last)]
    common = (keys < spans.common) & (keys >= ends[0]) & (keys <= ends[1])
    return mask.dense()[:, 0], common | ((own >= 0) & (own >= ends[2]) & (own <= ends[3]))


def sampled(first: int, seed: int) -> tuple[Tensor, Tensor, Tensor, int]:
    """Elements of slots from `first` on: documents, anchors, depths [B, E], and those of depth 0.

    Deeper ones have random depths with gaps, are sorted by anchor and depth, and padded.
    """
    generator = torch.Generator().manual_seed(seed)
    rows, slots = [], range(first, DOCUMENTS.shape[1])
    for documents in DOCUMENTS.tolist():
        real = [t for t in slots if documents[t] != PADDING]
        kept = torch.rand(len(real), 3, generator=generator) < 0.5
        deep = [(real[i], d + 1) for i, d in kept.nonzero().tolist()]
        rows.append([(documents[t], t, 0) for t in slots] + [(documents[t], t, d) for t, d in deep])
    width = max(map(len, rows))
    filled = torch.tensor([row + [(PADDING, 0, 0)] * (width - len(row)) for row in rows])
    return *filled.unbind(-1), len(slots)


@pytest.mark.parametrize("window", WINDOWS)
def test_causal_spans(window: int | None) -> None:
    predicate, spans = tables(causal_mask(DOCUMENTS, window))
    assert torch.equal(predicate, spans)


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_spans_of_elements_with_gaps_in_their_chains(window: int | None, first: int) -> None:
    documents, anchors, depths, shallow = sampled(first, seed=first)
    predicate, spans = tables(parallel_mask(documents, anchors, depths, shallow, window))
    padding = documents == PADDING  # slots, and elements that fill up a pack
    assert padding[:, shallow:].any() and torch.equal(predicate[~padding], spans[~padding])
    assert spans.any(-1).all()  # no softmax over nothing
    assert not (spans & (padding[:, :, None] != padding[:, None])).any()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_spans_of_blocks(window: int | None, causal: bool) -> None:
    anchors = torch.tensor([[0, 1, 4, 6, 13], [3, 9, 16, 17, 0], [1, 2, 10, 0, 0]])
    kept = torch.tensor([[True] * 5, [True] * 4 + [False], [True] * 3 + [False] * 2])
    of_layer = None if window is None else BlockWindow(window, causal)
    predicate, spans = tables(block_mask(DOCUMENTS, anchors, kept, 4, of_layer))
    assert torch.equal(predicate, spans)


def test_chunks_of_elements_hold_their_documents_and_chains_only() -> None:
    """300 queries of one document: the deeper ones of a chunk bring only their own chains."""
    length, depth = 100, 3
    anchors = torch.cat([torch.arange(length), torch.arange(length).repeat_interleave(depth - 1)])
    depths = torch.cat([torch.zeros(length).long(), torch.arange(1, depth).repeat(length)])
    documents = torch.zeros_like(anchors)
    mask = parallel_mask(documents[None], anchors[None], depths[None], length)
    chunks = Attending.prepare(mask, 8, "sdpa").mask
    assert [chunk.queries for chunk in chunks] == [slice(0, 128), slice(128, 256), slice(256, 300)]
    # the second chunk: deeper elements 28 to 155, of the anchors 14 to 77
    assert chunks[1].keys == (slice(0, 78), slice(128, 256))
    assert chunks[2].keys == (slice(0, 100), slice(256, 300))
