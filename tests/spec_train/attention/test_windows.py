"""Windows of layers, against plain loops over positions in float64; every back end is the same.

A window of W positions means the same in every path: the query at position p sees keys at positions
p - W + 1 to p (transformers' `sliding_window`; vLLM's window (W - 1, 0)). The loops below know
positions only: no index arithmetic is shared with the code.
"""

import itertools

import pytest
import torch
from torch import Tensor

from spec_data.shards.packing import PADDING, row_layout
from spec_train.attention import masked
from spec_train.attention.masked import Attending
from spec_train.attention.masks import (
    AttentionMask,
    BlockWindow,
    block_mask,
    causal_mask,
    parallel_mask,
)
from spec_train.attention.plain import attend_block, attend_cached
from spec_train.attention.unrolled import StepQueries, active_slots
from spec_train.drafts.slots import document_offsets
from tests.tolerance import LAYER, close

DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, -1], [0, 0, 1, 1, 1, 1, 1, 1, 1]])
LENGTH = DOCUMENTS.shape[1]
SIZE = 3  # slots of a block
ANCHORS = torch.tensor([[1, 3, 5, 6], [2, 4, 8, 4]])
KEPT = torch.tensor([[True, True, True, True], [True, True, True, False]])
WINDOWS = [1, 2, 4, 40]


def drawn(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes
    ]


def softmax_over(q: Tensor, keys: list[Tensor], values: list[Tensor], scale: float) -> Tensor:
    """One query [d] over lists of keys and values [d]."""
    weights = torch.softmax(torch.stack([q @ k * scale for k in keys]), 0)
    return weights @ torch.stack(values)


def elements() -> tuple[Tensor, Tensor, Tensor]:
    deeper = [[(1, 1), (1, 2), (2, 1), (5, 1)], [(3, 1), (3, 2), (3, 3), (4, 1)]]
    anchor = torch.tensor([[*range(LENGTH), *(a for a, _ in row)] for row in deeper])
    depth = torch.tensor([[0] * LENGTH + [d for _, d in row] for row in deeper])
    return DOCUMENTS.gather(1, anchor), anchor, depth


def made(name: str, window: int | None) -> AttentionMask:
    if name == "causal":
        return causal_mask(DOCUMENTS, window)
    if name == "parallel":
        return parallel_mask(*elements(), LENGTH, window)
    of_layer = None if window is None else BlockWindow(window, name == "causal block")
    return block_mask(DOCUMENTS, ANCHORS, KEPT, SIZE, of_layer)


NAMES = ["causal", "parallel", "block", "causal block"]


def seen_by_element(items: list[list[int]], query: int, window: int) -> list[int]:
    """Keys that an element sees; `items` are the document, anchor and depth of each."""
    document, anchor, depth = items[query]
    p = anchor + depth
    return [
        k
        for k, (other, start, level) in enumerate(items)
        if other == document
        and p - window + 1 <= start + level <= p
        and ((level == 0 and start <= anchor) or (start == anchor and level <= depth))
    ]


def seen_by_loops(name: str, b: int, query: int, window: int) -> list[int]:
    """Keys that a query sees, from the positions of both."""
    row = DOCUMENTS[b].tolist()
    if name == "causal":
        return [
            k for k in range(LENGTH) if row[k] == row[query] and query - window + 1 <= k <= query
        ]
    if name == "parallel":
        return seen_by_element(torch.stack(elements(), -1)[b].tolist(), query, window)
    block, slot = divmod(query, SIZE)
    anchor = int(ANCHORS[b, block])
    p = anchor + slot
    context = [t for t in range(anchor) if row[t] == row[anchor] and t >= p - window + 1]
    last = p if name == "causal block" else p + window - 1
    own = [LENGTH + SIZE * block + k for k in range(SIZE) if p - window + 1 <= anchor + k <= last]
    return [*(context if KEPT[b, block] else []), *own]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("window", WINDOWS)
def test_a_mask_is_the_loop_over_positions(name: str, window: int) -> None:
    mask = made(name, window)
    table = mask.dense()
    for b, query in itertools.product(range(2), range(table.shape[2])):
        found = table[b, 0, query].nonzero().flatten().tolist()
        assert found == seen_by_loops(name, b, query, window)
        assert found  # also padding sees itself: no softmax over nothing


@pytest.mark.parametrize("first", [0, 4])
@pytest.mark.parametrize("window", WINDOWS)
def test_elements_with_gaps_in_their_chains_and_padding(window: int, first: int) -> None:
    """Deeper elements have random depths, are sorted by anchor and depth, and padded."""
    packs, _ = row_layout([[5, 9, 1, 3], [18], [2, 2, 7]], 20)
    generator, slots, rows = torch.Generator().manual_seed(first), range(first, 20), []
    for documents in packs.tolist():
        real = [t for t in slots if documents[t] != PADDING]
        kept = (torch.rand(len(real), 3, generator=generator) < 0.5).nonzero().tolist()
        deep = [(documents[real[i]], real[i], d + 1) for i, d in kept]
        rows.append([(documents[t], t, 0) for t in slots] + deep)
    width = max(map(len, rows))
    filled = torch.tensor([row + [(PADDING, 0, 0)] * (width - len(row)) for row in rows])
    table = parallel_mask(*filled.unbind(-1), len(slots), window).dense()[:, 0]
    padding = filled[..., 0] == PADDING
    assert padding[:, len(slots) :].any() and table.any(-1).all()  # no softmax over nothing
    assert not (table & (padding[:, :, None] != padding[:, None])).any()
    for b, query in (~padding).nonzero().tolist():
        found = table[b, query].nonzero().flatten().tolist()
        assert found == seen_by_element(filled[b].tolist(), query, window)


def test_a_window_that_is_ignored_is_seen_by_the_loops() -> None:
    """The planted failure: each mask without its window differs from the loops with it."""
    for name in NAMES:
        table = made(name, None).dense()
        queries = range(table.shape[2])
        assert any(
            table[b, 0, q].nonzero().flatten().tolist() != seen_by_loops(name, b, q, 2)
            for b, q in itertools.product(range(2), queries)
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", ["dense", "merged", "merged in chunks", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_back_ends_are_the_loops_in_values_and_gradients(name, backend, monkeypatch):
    mask, size = made(name, 2), 16
    queries = mask.ends.shape[1]
    inputs = drawn(0, (2, 2, queries, size), (2, 1, mask.keys, size), (2, 1, mask.keys, size))
    if backend == "merged in chunks":
        monkeypatch.setattr(masked, "CHUNK", 2)
    attending = Attending.prepare(mask, backend.removesuffix(" in chunks"))
    if backend == "flex":  # on CPUs it has no backward, and no float64
        inputs = [x.detach().float() for x in inputs]
    found = attending(*inputs, 0.3)
    q, k, v = inputs
    expected = torch.stack(
        [
            softmax_over(
                q[b, h, i],
                [k[b, h // 2, j] for j in seen_by_loops(name, b, i, 2)],
                [v[b, h // 2, j] for j in seen_by_loops(name, b, i, 2)],
                0.3,
            )
            for b, h, i in itertools.product(range(2), range(2), range(queries))
        ]
    ).view(found.shape)
    close(found, expected, terms=LAYER)
    if backend != "flex":
        weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
        for a, b in zip(
            torch.autograd.grad((found * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs),
            strict=True,
        ):
            close(a, b, terms=2 * LAYER, magnitude=1.0)  # some are zero: one key only


@pytest.mark.parametrize("backend", ["merged", "flex"])
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_a_sink_takes_a_share_of_every_softmax(backend: str) -> None:
    """As a further key without a value, whose score is the head's own number; with a diagonal."""
    mask = made("block", 2)
    queries = mask.ends.shape[1]
    shapes = (2, 2, queries, 16), *[(2, 1, mask.keys, 16)] * 2, *[(2, 1, queries, 16)] * 2
    q, k, v, later, value = (x.detach().float() for x in drawn(0, *shapes))
    sinks = torch.tensor([0.5, -2.0])
    for diagonal in ([], [(later, value)]):
        given = q, k, v, 0.3, diagonal, sinks
        found, expected = (Attending.prepare(mask, b)(*given) for b in (backend, "dense"))
        close(found, expected, terms=LAYER)
        without = Attending.prepare(mask, "dense")(q, k, v, 0.3, diagonal)
        assert (without.norm(dim=-1) > expected.norm(dim=-1)).all()


def test_a_window_makes_the_context_of_a_chunk_shorter() -> None:
    documents, _ = row_layout([[40]], 40)
    anchors = torch.tensor([[30, 33]])
    kept = torch.ones_like(anchors, dtype=torch.bool)
    mask = block_mask(documents, anchors, kept, SIZE, BlockWindow(5, True))
    (chunk,) = Attending.prepare(mask, "merged").prepared
    assert [span.keys for span in chunk.spans] == [
        slice(26, 33),
        slice(40, 46),
    ]  # slot 30 sees 26 to 29, then its block


# -- the unroll -----------------------------------------------------------------------------------

USED = torch.tensor([[0, 1, 1, 1, 0, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)


def unrolled_by_loops(tensors: list[Tensor], active: Tensor, window: int, scale: float) -> Tensor:
    """Slot t at step s is at position t + s; its own later keys are at t + 1 .. t + s."""
    q, k0, v0, *flat = tensors
    steps = len(flat) // 2
    out = []
    for b, h, a in itertools.product(*map(range, q.shape[:3])):
        t = int(active[b, a])
        p = t + steps
        first = [
            j for j in range(t + 1) if DOCUMENTS[b, j] == DOCUMENTS[b, t] and j >= p - window + 1
        ]
        own = [e for e in range(1, steps + 1) if t + e >= p - window + 1]
        out.append(
            softmax_over(
                q[b, h, a],
                [k0[b, h // 2, j] for j in first] + [flat[2 * e - 2][b, h // 2, a] for e in own],
                [v0[b, h // 2, j] for j in first] + [flat[2 * e - 1][b, h // 2, a] for e in own],
                scale,
            )
        )
    return torch.stack(out).view(q.shape)


def unrolled_inputs(steps: int) -> tuple[list[Tensor], Tensor, Tensor]:
    active = active_slots(USED)
    first = (torch.arange(LENGTH) - document_offsets(DOCUMENTS)).gather(1, active)
    count = active.shape[1]
    later = [(2, 1, count, 16)] * (2 * steps)
    tensors = drawn(1, (2, 2, count, 16), (2, 1, LENGTH, 16), (2, 1, LENGTH, 16), *later)
    return tensors, first, active


def unrolled_found(tensors: list[Tensor], queries: StepQueries, window: int | None) -> Tensor:
    q, k0, v0, *flat = tensors
    diagonal = list(zip(flat[::2], flat[1::2], strict=True))
    return queries.attend(q, k0, v0, diagonal, 0.4, window)


@pytest.mark.parametrize(
    "window, steps, backend",
    [
        *itertools.product(WINDOWS, [0, 1, 3], ["dense", "merged"]),
        *((2, steps, "flex") for steps in (1, 3)),  # slow where it is not compiled
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_the_unroll_is_the_loop_over_positions(window, steps, backend, monkeypatch):
    """Windows 1 and 2 at step 3 leave no step-0 key: only the slot's own newest ones."""
    monkeypatch.setattr(masked, "CHUNK", 2)
    tensors, first, active = unrolled_inputs(steps)
    if backend == "flex":
        tensors = [x.detach().float() for x in tensors]
    found = unrolled_found(tensors, StepQueries(first, active, LENGTH, backend), window)
    expected = unrolled_by_loops(tensors, active, window, 0.4)
    close(found, expected, terms=LAYER)
    if backend != "flex":
        weight = torch.linspace(-1, 2, found.numel(), dtype=found.dtype).view_as(found)
        for a, b in zip(
            torch.autograd.grad((found * weight).sum(), tensors, materialize_grads=True),
            torch.autograd.grad(
                (expected * weight).sum(), tensors, materialize_grads=True, allow_unused=True
            ),
            strict=True,
        ):
            close(a, b, terms=2 * LAYER, magnitude=1.0)  # some are zero: one key only


def test_the_planted_window_of_the_first_step_only_is_seen() -> None:
    """A trainer may count every step's window from the slot; serving counts from t + s."""
    tensors, first, active = unrolled_inputs(2)
    queries = StepQueries(first, active, LENGTH, "dense")
    q, k0, v0, *flat = tensors
    wrong = queries.of(0, 3)(q, k0, v0, 0.4, list(zip(flat[::2], flat[1::2], strict=True)))
    assert not torch.allclose(wrong, unrolled_by_loops(tensors, active, 3, 0.4))


# -- caches ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [*WINDOWS, None])
@pytest.mark.parametrize("new", [1, 3])
def test_rows_of_a_cache_see_the_last_positions(window: int | None, new: int) -> None:
    held = 9
    q, k, v = drawn(2, (1, 4, new, 8), (1, 2, held, 8), (1, 2, held, 8))
    found = attend_cached(q, k, v, 0.5, window=window)
    for h, i in itertools.product(range(4), range(new)):
        p = held - new + i
        seen = [j for j in range(p + 1) if window is None or j >= p - window + 1]
        expected = softmax_over(
            q[0, h, i], [k[0, h // 2, j] for j in seen], [v[0, h // 2, j] for j in seen], 0.5
        )
        close(found[0, h, i], expected, terms=LAYER)


@pytest.mark.parametrize("window", WINDOWS)
def test_nodes_of_a_tree_see_the_last_positions_of_their_path(window: int) -> None:
    """Four verified rows at positions 0 to 3; two nodes at 4, two at 5, of different parents."""
    paths = [[4, 6], [5, 7]]
    position = [0, 1, 2, 3, 4, 4, 5, 5]
    seen = torch.zeros(2, 8, dtype=torch.bool)
    for i, path in enumerate(paths):
        seen[i, [0, 1, 2, 3, *path]] = True
    q, k, v = drawn(3, (1, 2, 2, 8), (1, 1, 8, 8), (1, 1, 8, 8))
    found = attend_cached(q, k, v, 0.5, seen, window)
    for h, i in itertools.product(range(2), range(2)):
        inside = [j for j in [0, 1, 2, 3, *paths[i]] if position[j] >= 5 - window + 1]
        keys, values = [k[0, 0, j] for j in inside], [v[0, 0, j] for j in inside]
        close(found[0, h, i], softmax_over(q[0, h, i], keys, values, 0.5), terms=LAYER)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_served_block_sees_what_a_trained_one_sees(window: int, causal: bool) -> None:
    """The last block of a document of 9 tokens, served over 9 verified positions."""
    documents = torch.zeros(1, 10, dtype=torch.long)
    anchors, of_layer = torch.tensor([[9]]), BlockWindow(window, causal)
    q, k, v = drawn(4, (1, 4, SIZE, 8), (1, 2, 10 + SIZE, 8), (1, 2, 10 + SIZE, 8))
    mask = block_mask(
        documents, anchors, torch.ones_like(anchors, dtype=torch.bool), SIZE, of_layer
    )
    trained = Attending.prepare(mask, "dense")(q, k, v, 0.5)
    verified = torch.cat([torch.arange(9), torch.arange(10, 10 + SIZE)])  # not the anchor's state
    served = attend_block(q, k[:, :, verified], v[:, :, verified], 0.5, of_layer)
    close(served, trained, terms=LAYER)
