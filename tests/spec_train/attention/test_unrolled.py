"""Back ends of the unrolled attention: scores, chunks, CUDA; `test_windows` has the values."""

import torch
from torch import Tensor

from spec_train.attention import masked as attention
from spec_train.attention.masked import Attending
from spec_train.attention.masks import span_mask
from spec_train.attention.plain import repeat_heads
from spec_train.attention.unrolled import active_slots
from spec_train.drafts.slots import document_offsets
from tests.tolerance import close

DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, -1, -1], [0, 0, 0, 0, 0, 0, 0, 0, 0], [-1] * 9])
USED = torch.tensor(
    [[0, 1, 1, 0, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 0], [0] * 9], dtype=torch.bool
)


def _queries(used: Tensor, backend: str = "dense", device: str = "cpu") -> Attending:
    documents, active = DOCUMENTS[: len(used)], active_slots(used)
    first = torch.arange(documents.shape[1]) - document_offsets(documents)
    mask = span_mask(first.gather(1, active).to(device), active.to(device), documents.shape[1])
    return Attending.prepare(mask, backend)


def _inputs(
    used: Tensor, steps: int, heads: int, kv_heads: int, dtype: torch.dtype, size: int = 4
) -> list[Tensor]:
    """Queries, step-0 keys and values, then keys and values of the later steps."""
    generator = torch.Generator().manual_seed(0)
    active = active_slots(used)
    rows, width = used.shape

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()

    tensors = [draw(rows, heads, active.shape[1], size)]
    tensors += [draw(rows, kv_heads, width, size) for _ in range(2)]
    return tensors + [draw(rows, kv_heads, active.shape[1], size) for _ in range(2 * steps)]


def _attend(tensors: list[Tensor], queries: Attending, scale: float) -> Tensor:
    q, k0, v0, *flat = tensors
    return queries(q, k0, v0, scale, list(zip(flat[::2], flat[1::2], strict=True)))


def test_active_slots_are_the_used_ones_in_order_and_padded_with_the_last() -> None:
    assert active_slots(USED).tolist() == [[1, 2, 5, 6, 6], [3, 4, 5, 6, 7], [8] * 5]
    assert active_slots(torch.zeros(1, 3, dtype=torch.bool)).tolist() == [[2]]


def test_great_scores_on_either_side_neither_overflow_nor_vanish() -> None:
    tensors = _inputs(USED, 2, 2, 2, torch.float32)
    for scaled in (0, 1, 3):  # queries, step-0 keys, diagonal keys
        great = [x.detach() * (300 if i == scaled else 1) for i, x in enumerate(tensors)]
        dense, merged = (_attend(great, _queries(USED, b), 1.0) for b in ("dense", "merged"))
        assert merged.isfinite().all()
        # a weight exp(score) is as inexact as its score: relative to the score's own size
        scores = great[0].norm(dim=-1).max() * max(k.norm(dim=-1).max() for k in great[1::2])
        close(merged, dense, terms=4, magnitude=float(scores * dense.abs().max()))


def test_chunks_hold_every_seen_key_and_skip_other_documents(monkeypatch):
    monkeypatch.setattr(attention, "CHUNK", 2)
    queries = _queries(USED, "merged")
    seen = torch.zeros_like(queries.mask.dense())
    for chunk in queries.prepared:
        (span,) = chunk.spans
        seen[chunk.pack, 0, chunk.queries, span.keys] = span.bias(torch.zeros(()))[0, 0] == 0
    assert torch.equal(seen, queries.mask.dense())
    spans = {(b.pack, b.queries.start): b.spans[0].keys for b in queries.prepared}
    assert spans[0, 0] == slice(0, 3) and spans[0, 2] == slice(3, 7)
    assert spans[1, 0] == slice(0, 5)


def test_consecutive_query_heads_share_a_key_head() -> None:
    x = torch.arange(2.0).view(1, 2, 1, 1)
    assert repeat_heads(x, 4).flatten().tolist() == [0, 0, 1, 1]
