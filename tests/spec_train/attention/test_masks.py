"""Every mask against plain loops, every back end against the written-out softmax."""

import pytest
import torch
from torch import Tensor

from spec_train.attention import masked as attend
from spec_train.attention.masked import BACKENDS, Attending, default_backend
from spec_train.attention.masks import AttentionMask, block_mask, causal_mask, parallel_mask
from tests.tolerance import LAYER, close, close_in_norm

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, -1], [0, 0, 1, 1, 1, 1, 1, 1, 1]])


def elements() -> tuple[Tensor, Tensor, Tensor]:
    """Depth 0 at every slot, and some deeper ones: (documents, anchors, depths) [2, 13]."""
    length = DOCUMENTS.shape[1]
    deeper = [[(1, 1), (1, 2), (2, 1), (5, 1)], [(3, 1), (3, 2), (3, 3), (4, 1)]]
    anchors = [[*range(length), *(a for a, _ in row)] for row in deeper]
    depths = [[0] * length + [d for _, d in row] for row in deeper]
    anchor = torch.tensor(anchors)
    return DOCUMENTS.gather(1, anchor), anchor, torch.tensor(depths)


def masks() -> dict[str, AttentionMask]:
    anchors = torch.tensor([[1, 3, 5], [2, 4, 4]])
    kept = torch.tensor([[True, True, True], [True, True, False]])
    return {
        "causal": causal_mask(DOCUMENTS),
        "parallel": parallel_mask(*elements(), DOCUMENTS.shape[1]),
        "block": block_mask(DOCUMENTS, anchors, kept, 3),
    }


def test_causal() -> None:
    table = masks()["causal"].dense()
    for b, row in enumerate(DOCUMENTS.tolist()):
        for q in range(len(row)):
            seen = [k for k in range(len(row)) if k <= q and row[k] == row[q]]
            assert table[b, 0, q].nonzero().flatten().tolist() == seen


def test_parallel() -> None:
    documents, anchors, depths = (x.tolist() for x in elements())
    table = masks()["parallel"].dense()
    for b in range(2):
        items = list(zip(documents[b], anchors[b], depths[b], strict=True))
        for q, (document, anchor, depth) in enumerate(items):
            seen = [
                k
                for k, (other, start, level) in enumerate(items)
                if other == document
                and ((level == 0 and start <= anchor) or (start == anchor and level <= depth))
            ]
            assert table[b, 0, q].nonzero().flatten().tolist() == seen


def test_blocks() -> None:
    anchors, kept = [[1, 3, 5], [2, 4, 4]], [[1, 1, 1], [1, 1, 0]]
    table, length = masks()["block"].dense(), DOCUMENTS.shape[1]
    assert table.shape == (2, 1, 9, length + 9)
    for b in range(2):
        row = DOCUMENTS[b].tolist()
        for n, anchor in enumerate(anchors[b]):
            context = [t for t in range(anchor) if row[t] == row[anchor]] if kept[b][n] else []
            own = [length + 3 * n + k for k in range(3)]
            for k in range(3):
                assert table[b, 0, 3 * n + k].nonzero().flatten().tolist() == context + own


@pytest.mark.parametrize("name", ["causal", "parallel", "block"])
@pytest.mark.parametrize("backend", [*BACKENDS, "sdpa in blocks"])
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_back_ends_agree(name: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mask = masks()[name]
    if backend == "sdpa in blocks":
        backend = "sdpa"
        monkeypatch.setattr(attend, "CHUNK", 2)
        blocks = Attending.prepare(mask, 16, backend).mask
        assert len(blocks) == 2 * -(-mask.queries // 2)  # of two packs
        assert any(block.table.shape[-1] < mask.keys for block in blocks)
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int, length: int) -> Tensor:
        return torch.randn(2, heads, length, 16, generator=generator)

    q, k, v = draw(4, mask.queries), draw(2, mask.keys), draw(2, mask.keys)
    differentiable = backend != "flex"  # on CPUs flex_attention has no backward
    inputs = [x.requires_grad_(differentiable) for x in (q, k, v)]
    found = Attending.prepare(mask, 16, backend)(*inputs, 0.3)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = Attending.prepare(mask, 16, "dense")(*exact, 0.3)
    close(found.double(), expected, terms=LAYER, dtype=found.dtype)
    if differentiable:
        weight = torch.randn(found.shape, generator=generator)
        (found * weight).sum().backward()
        (expected * weight).sum().backward()
        for a, b in zip(inputs, exact, strict=True):
            close(a.grad.double(), b.grad, terms=2 * LAYER, dtype=a.dtype)


def test_blocks_take_what_autocast_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms return float32 and projections bf16; the kernel needs one dtype."""
    monkeypatch.setattr(attend, "CHUNK", 2)
    mask = masks()["causal"]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 2, mask.queries, 16, generator=generator) for _ in range(3))
    found = Attending.prepare(mask, 16, "sdpa")(q, k, v.bfloat16(), 0.3)
    assert found.dtype == torch.bfloat16
    expected = Attending.prepare(mask, 16, "dense")(q, k, v, 0.3)
    close_in_norm(found, expected, torch.bfloat16, terms=4)  # q, k, v and the result


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compiled flex_attention needs CUDA")
@pytest.mark.parametrize("name", ["causal", "parallel", "block"])
def test_compiled_flex_agrees_with_gradients(name: str) -> None:
    mask = masks()[name]
    q = torch.randn(2, 4, mask.queries, 32, device="cuda", requires_grad=True)
    k = torch.randn(2, 2, mask.keys, 32, device="cuda", requires_grad=True)
    on_gpu = AttentionMask(
        lambda b, x, y: mask.dense().cuda()[b, 0, x, y],
        2,
        mask.queries,
        mask.keys,
        q.device,
        mask.make_spans,
    )
    results = []
    for backend in ("flex", "dense"):
        out = Attending.prepare(on_gpu, 32, backend)(q, k, k, 0.2)
        results.append((out, *torch.autograd.grad(out.square().sum(), [q, k])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


def test_the_back_end_is_decided_by_device_and_head_size() -> None:
    assert default_backend("cpu", 64) == "sdpa"
    assert default_backend("cuda", 64) == ("flex" if torch.cuda.is_available() else "sdpa")
    assert default_backend("cuda", 8) == "sdpa"
    if not torch.cuda.is_available():
        assert default_backend("cuda", 80) == "sdpa"
    with pytest.raises(ValueError, match="choose from dense, sdpa, flex"):
        Attending.prepare(masks()["causal"], 16, "fast")
