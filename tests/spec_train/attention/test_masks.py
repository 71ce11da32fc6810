"""Chunks of queries and dtypes; `test_windows` has what masks say."""

import pytest
import torch

from spec_train.attention import masked
from spec_train.attention.masked import Attending
from spec_train.attention.masks import causal_mask, parallel_mask
from tests.spec_train.attention.test_windows import DOCUMENTS
from tests.tolerance import close_in_norm


def test_chunks_of_elements_hold_their_documents_and_chains_only() -> None:
    """300 queries of one document: the deeper ones of a chunk bring only their own chains."""
    length, depth = 100, 3
    anchors = torch.cat([torch.arange(length), torch.arange(length).repeat_interleave(depth - 1)])
    depths = torch.cat([torch.zeros(length).long(), torch.arange(1, depth).repeat(length)])
    documents = torch.zeros_like(anchors)
    mask = parallel_mask(documents[None], anchors[None], depths[None], length)
    chunks = Attending.prepare(mask, "merged").prepared
    assert [chunk.queries for chunk in chunks] == [slice(0, 128), slice(128, 256), slice(256, 300)]
    # the second chunk: deeper elements 28 to 155, of the anchors 14 to 77
    assert [span.keys for span in chunks[1].spans] == [slice(0, 78), slice(128, 256)]
    assert [span.keys for span in chunks[2].spans] == [slice(0, 100), slice(256, 300)]


def test_chunks_take_what_autocast_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms return float32 and projections bf16; the kernel needs one dtype."""
    monkeypatch.setattr(masked, "CHUNK", 2)
    mask, generator = causal_mask(DOCUMENTS), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, mask.keys, 16, generator=generator) for _ in range(3))
    found = Attending.prepare(mask, "merged")(q, k, v.bfloat16(), 0.3)
    assert found.dtype == torch.bfloat16
    expected = Attending.prepare(mask, "dense")(q, k, v, 0.3)
    close_in_norm(found, expected, torch.bfloat16, terms=4)  # q, k, v and the result


def test_a_back_end_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="choose from dense, merged, flex"):
        Attending.prepare(causal_mask(DOCUMENTS), "fast")
