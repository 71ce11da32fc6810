"""Block drafts: which blocks are drawn, what they see, and what a batch depends on."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from spec_data.shards.packing import PADDING, row_layout
from spec_train.drafts.block.blocks import (
    Blocks,
    anchor_candidates,
    expected_weights,
    sample_blocks,
)
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import build_draft, packed
from tests.spec_train.drafts.cases import (
    BLOCK_MASKS,
    LAYERS,
    VOCAB,
    WIDTH,
    case,
    gradients,
    lay_out,
    loss_of,
    make_documents,
    make_draft,
)
from tests.tolerance import close, close_gradients, network

dataset, head = any_draft.dataset, any_draft.head

COUNTS = {"terms": 320, "dtype": torch.float32}  # a sum of the weights of all slots
FORWARD = {"terms": network(2), "dtype": torch.float32}  # two layers; sums are kept in float64
BACKWARD = {"terms": network(2, backward=True, slots=320)}

KINDS = {
    "vanilla": case("dspark"),
    "rnn": case("dspark", markov_head_type="rnn", layout="mask"),
    "gated": case("dspark", markov_head_type="gated"),
    "dflash": case("dflash"),
}


def make_layout(
    masks: Sequence[Sequence[Sequence[int]]], padding: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss mask (garbage in padding), document ids and position ids of rows of documents."""
    lengths = [[len(m) for m in row] for row in masks]
    width = max(map(sum, lengths)) + padding
    document_ids, position_ids = row_layout(lengths, width)
    mask = torch.ones(len(masks), width, dtype=torch.bool)
    for b, row in enumerate(masks):
        flat = [bool(x) for m in row for x in m]
        mask[b, : len(flat)] = torch.tensor(flat)
    return mask, document_ids, position_ids


MASKS = [
    [[0, 1, 1, 1, 0, 1, 1], [1, 1, 1], [1]],
    [[0, 0, 1], [0, 1, 1, 1, 1, 1]],
    [[0, 0]],
]


def test_anchors_are_known_supervised_tokens_with_a_supervised_next_and_something_before() -> None:
    mask, document_ids, _ = make_layout(MASKS)
    found = [row.nonzero().flatten().tolist() for row in anchor_candidates(mask, document_ids)]
    # token 7 is the first of a document, so serving never starts a block there
    assert found == [[1, 2, 5, 8], [4, 5, 6, 7], []]
    blocks = sample_blocks(mask, document_ids, 10)
    assert blocks.anchors.tolist() == [[1, 2, 5, 8], [4, 5, 6, 7], [0] * 4]  # no unused blocks
    assert blocks.real.tolist() == [[True] * 4, [True] * 4, [False] * 4]


def test_a_sample_has_no_repetitions_is_sorted_and_depends_on_its_row_alone() -> None:
    masks = [[[1] * 30], [[0] + [1] * 20, [1] * 5], [[0, 1, 1]]]
    mask, document_ids, _ = make_layout(masks)
    candidates = anchor_candidates(mask, document_ids)
    torch.manual_seed(3)
    together = sample_blocks(mask, document_ids, 8)
    assert together.anchors.shape == (3, 8)
    assert together.real.sum(1).tolist() == [8, 8, 1]
    for b in range(3):
        kept = together.anchors[b][together.real[b]]
        assert candidates[b, kept].all() and (kept[1:] > kept[:-1]).all()
    torch.manual_seed(3)
    wider = torch.nn.functional.pad(document_ids, (0, 9), value=-1)
    for b in range(3):  # the same draws, row by row and with more padding
        alone = sample_blocks(torch.nn.functional.pad(mask[b : b + 1], (0, 9)), wider[b : b + 1], 8)
        own = together.real[b].sum()
        assert alone.anchors[0].tolist() == together.anchors[b, :own].tolist()
    torch.manual_seed(4)
    assert not torch.equal(sample_blocks(mask, document_ids, 8).anchors, together.anchors)
    seen = torch.zeros(mask.shape[1])
    for seed in range(400):
        torch.manual_seed(seed)
        seen[sample_blocks(mask[:1], document_ids[:1], 8).anchors[0]] += 1
    share = seen[candidates[0]] / 400
    assert share.min() > 0.18 and share.max() < 0.40  # 8 of 28, each as likely


@pytest.mark.parametrize("name", KINDS)
def test_a_block_sees_its_anchor_and_the_states_before_it_and_nothing_else(name: str) -> None:
    draft = make_draft(KINDS[name])
    document_ids, position_ids = row_layout([[6, 9, 5]], 22)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 22, len(LAYERS) * WIDTH, generator=generator, dtype=torch.float64)
    ids = torch.randint(VOCAB, (1, 22), generator=generator)
    blocks = Blocks(torch.tensor([[2, 9, 10, 17]]), torch.ones(1, 4, dtype=torch.bool))

    def states(aux: Tensor, ids: Tensor, blocks: Blocks = blocks) -> Tensor:
        context = draft.context(aux, position_ids, document_ids)
        return draft.block_states(context, ids, document_ids, position_ids, blocks)

    base = states(inputs, ids)
    for n, anchor in enumerate(blocks.anchors[0].tolist()):
        aux = inputs.clone().requires_grad_()
        states(aux, ids)[:, n].square().sum().backward()
        moved = aux.grad.abs().sum(-1)[0].nonzero().flatten().tolist()
        start = int((document_ids[0] == document_ids[0, anchor]).nonzero()[0])
        assert moved == list(range(start, anchor))
        for t in range(22):  # the anchor's token is read, and no other one
            other = ids.clone()
            other[0, t] = (other[0, t] + 1) % VOCAB
            same = torch.equal(states(inputs, other)[:, n], base[:, n])
            assert same == (t != anchor)
        elsewhere = blocks.anchors.clone()
        elsewhere[0, n - 1] = 12
        apart = states(inputs, ids, Blocks(elsewhere, blocks.real))[:, n]
        close(apart, base[:, n], terms=network(2))


@pytest.mark.parametrize("name", KINDS)
def test_blocks_that_are_not_kept_change_nothing(name: str) -> None:
    made = KINDS[name]
    draft, documents = make_draft(made), make_documents(made, BLOCK_MASKS)
    inputs = lay_out(made, documents, [[0, 1], [2, 4]])
    plain = loss_of(made, draft, **inputs)
    plain.loss.backward()
    expected = gradients(draft)
    assert all(gradient.isfinite().all() for gradient in expected.values())
    anchors, real = inputs["anchors"], inputs["real"]
    more = {"anchors": pad(anchors, (0, 2), value=10), "real": pad(real, (0, 2))}
    loss_of(made, draft, **inputs | more).loss.backward()
    close_gradients(gradients(draft), expected, terms=network(2, backward=True, slots=100))
    none = loss_of(made, draft, **inputs | {"real": torch.zeros_like(real)})
    assert float(none.loss.detach()) == 0
    none.loss.backward()
    assert not any(gradient.any() for gradient in gradients(draft).values())


@pytest.mark.parametrize(
    "changes", [{}, {"draft_vocab_size": 40, "layout": "mask", "loss": "ce+l1"}], ids=str
)
def test_counts_are_the_weights_of_all_blocks_or_their_expectation(dataset, head, changes):
    batch = packed(dataset, 96)
    draft = build_draft("dspark", dataset, head, **changes)
    counts = draft.slot_counts(batch)
    sums = draft.loss(batch, head, counts).sums
    close(counts, sums["term_weights"][:2].to(counts.dtype), **COUNTS)
    assert (counts[0] < counts[1]) == bool(changes)
    few = build_draft("dspark", dataset, head, num_anchors=6, **changes)
    drawn = torch.stack([few.loss(batch, head, counts).sums["term_weights"] for _ in range(100)])
    # a mean of 100 samples of blocks: the tolerance is their spread, not rounding
    torch.testing.assert_close(drawn.mean(0)[:2], few.slot_counts(batch), rtol=0.04, atol=0)


def test_a_document_shorter_than_a_block_counts_as_in_a_longer_pack() -> None:
    mask, documents = torch.tensor([[0, 1, 1, 1, 1]]), torch.zeros(1, 5, dtype=torch.int64)
    weights = 0.5 ** torch.arange(9, dtype=torch.float64)
    short = expected_weights(mask, documents, mask.bool(), weights, 8)
    longer = [pad(x, (0, 15), value=v) for x, v in ((mask, 0), (documents, PADDING))]
    assert short == expected_weights(*longer, longer[0].bool(), weights, 8) > 0
