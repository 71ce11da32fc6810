"""The EAGLE-3 draft: batches against plain tensors, training against serving.

The loss itself is compared with slow loops in `test_reference`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.packing import pack_documents, shift_left
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.eagle3.draft import Eagle3Draft, Unroll, eagle3_loss
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.drafts.eagle3.tools import batch_of, build, packed
from tests.tolerance import close, close_gradients, network, same_choice

dataset, head = eagle3_tools.dataset, eagle3_tools.head

FORWARD = {"terms": network(4), "dtype": torch.float32}  # four steps; sums are kept in float64
BACKWARD = {"terms": network(4, backward=True, slots=320)}


def _gradients(draft: Eagle3Draft, loss: Tensor) -> dict[str, Tensor]:
    names = {k: p for k, p in draft.named_parameters() if p.requires_grad}
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


# --- batches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("changes", [{}, {"loss": "lk-lambda"}, {"layers": "0,2"}])
def test_the_loss_of_a_batch_is_that_of_its_shifted_tensors(
    dataset: HiddenStatesDataset, head: TargetHead, changes: dict[str, Any]
) -> None:
    draft, batch = build(dataset, head, **changes), packed(dataset)
    ids = batch.document_ids
    plain = eagle3_loss(
        draft,
        aux_hidden_states=batch.aux(draft.config.layers),
        input_ids=shift_left(batch.input_ids, ids),
        loss_mask=shift_left(batch.loss_mask, ids),
        final_hidden=shift_left(batch.hidden["hidden.final"], ids),
        head=head,
        target_argmax=shift_left(batch.target_argmax, ids),
        document_ids=ids,
        steps=4,
        kind=draft.options.loss,
    )
    counts = draft.slot_counts(batch)
    found = draft.loss(batch, head, counts)
    close(found.loss, plain.loss, **FORWARD)
    assert torch.equal(counts, plain.sums["supervised"])
    assert counts[0] > counts[3] > 0
    assert found.sums.keys() == plain.sums.keys()
    for name, value in plain.sums.items():
        close(found.sums[name], value, **FORWARD, magnitude=value.abs(), name=name)
    figures = Eagle3Draft.summarise(found.sums)
    close(figures["loss"], float(found.loss.detach()), **FORWARD)


@pytest.mark.parametrize("backend", ["dense", "merged"])
def test_packing_and_order_change_neither_loss_nor_gradient(
    dataset: HiddenStatesDataset, head: TargetHead, backend: str
) -> None:
    draft = build(dataset, head)
    draft.use_attention(backend)
    layouts = [
        (pack_documents(dataset.lengths.tolist(), 64), 64),
        ([[i] for i in range(len(dataset))], 40),
        (pack_documents(dataset.lengths.tolist(), 90)[::-1], 97),
    ]
    results = []
    for rows, width in layouts:
        batch = batch_of(dataset, rows, width)
        out = draft.loss(batch, head, draft.slot_counts(batch))
        results.append((out, _gradients(draft, out.loss)))
    first, gradients = results[0]
    assert all(g.abs().max() > 0 for g in gradients.values())
    for out, other in results[1:]:
        close(out.loss, first.loss, **FORWARD)
        close_gradients(other, gradients, **BACKWARD)
        for name, value in first.sums.items():
            close(out.sums[name], value, **FORWARD, magnitude=value.abs(), name=name)


@pytest.mark.parametrize(
    "wrong",
    [
        {"logits": None},
        {"slot_mask": torch.ones(1, 5)},
        {"final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "final_hidden": torch.zeros(1, 5, 32)},
        {"logits": None, "target_probs": torch.zeros(1, 5, 40)},
        {"kind": "mse"},
    ],
)
def test_contradictory_arguments_are_refused(
    dataset: HiddenStatesDataset, head: TargetHead, wrong: dict[str, Any]
) -> None:
    good = {
        "aux_hidden_states": torch.zeros(1, 5, 96),
        "input_ids": torch.zeros(1, 5, dtype=torch.long),
        "loss_mask": torch.ones(1, 5),
        "logits": torch.zeros(1, 5, 64),
    }
    draft = build(dataset, head)
    eagle3_loss(draft, **good)
    with pytest.raises(DraftError):
        eagle3_loss(draft, **good | wrong)


def test_renormalised_probabilities_alone_are_refused_for_a_reduced_vocabulary(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    """The planted failure: acceptance with `target_probs` would be that of a renormalised target.

    Over the full vocabulary they are the target's own probabilities.
    """
    shape = (1, 5)
    given = {
        "aux_hidden_states": torch.zeros(*shape, 96),
        "input_ids": torch.zeros(shape, dtype=torch.long),
        "loss_mask": torch.ones(shape),
        "position_mask": torch.ones(shape),
    }
    reduced, whole = build(dataset, head), build(dataset, head, draft_vocab_size=0)
    uniform = torch.full((*shape, 64), 1 / 64)
    eagle3_loss(whole, target_probs=uniform, **given)
    some = torch.full((*shape, 40), 1 / 40)
    with pytest.raises(DraftError, match="need target_mass"):
        eagle3_loss(reduced, target_probs=some, **given)
    eagle3_loss(reduced, target_probs=some, target_mass=torch.ones(shape), **given)


# --- serving -------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("backend", ["dense", "merged"])
@torch.no_grad()
def test_serving_drafts_what_the_unroll_computes(
    dataset: HiddenStatesDataset, head: TargetHead, norm_output: bool, backend: str
) -> None:
    """A decode loop with a KV cache, document by document, equals chains inside packs."""
    draft, depth = build(dataset, head, norm_output=norm_output), 4
    draft.use_attention(backend)
    batch = packed(dataset)
    chains = draft.chains(batch, head, depth)
    known = shift_left(batch.input_ids, batch.document_ids)
    every = torch.arange(known.shape[1]).expand_as(known)
    aux = batch.aux(draft.config.layers)
    unroll = Unroll(draft, aux, known, batch.document_ids, batch.position_ids, every)
    states = [unroll.advance(known)]
    states += [unroll.advance(chains[..., s]) for s in range(depth - 1)]
    logits = torch.stack([draft.logits(state) for state in states], dim=2)  # [B, T, S, Vd]
    for b in range(len(known)):
        for d in range(int(batch.document_ids[b].max()) + 1):
            slots = (batch.document_ids[b] == d).nonzero().squeeze(1)[:-1]
            cache, features = draft.new_caches(), draft.project(aux[b : b + 1, slots])
            for t, slot in enumerate(slots.tolist()):
                token, carried = known[b, slot].view(1, 1), features[:, t : t + 1]
                for s in range(depth):
                    carried = draft.step(token, carried, torch.tensor([[t + s]]), cache)
                    served = draft.logits(carried)[0, 0]
                    close(served, logits[b, slot, s], **FORWARD)
                    token = chains[b, slot, s].view(1, 1)
                    choice = (draft.draft_ids == token[0]).nonzero()[0, 0]
                    same_choice(served, choice, **FORWARD)
                for layer in cache:
                    layer.crop(t + 1)
                assert cache[0].length == t + 1


@torch.no_grad()
def test_a_prefill_in_pieces_is_the_prefill_in_one(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = build(dataset, head)
    tokens, carried = torch.randint(0, 64, (1, 7)), torch.randn(1, 7, 32)
    positions, cache = torch.arange(7)[None], draft.new_caches()
    whole = draft.step(tokens, carried, positions)
    pieces = [
        draft.step(tokens[:, part], carried[:, part], positions[:, part], cache)
        for part in (slice(0, 3), slice(3, 4), slice(4, 7))
    ]
    close(torch.cat(pieces, 1), whole, **FORWARD)
