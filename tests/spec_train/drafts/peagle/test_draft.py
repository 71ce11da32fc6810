"""The P-EAGLE draft: batches against plain tensors, segments, precision, one gradient.

The loss itself is compared with slow loops in `test_reference`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spec_data.shards.packing import pack_documents, shift_left
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts.peagle.draft import PeagleDraft, peagle_loss
from spec_train.losses.head import TargetHead
from tests.spec_train.drafts.eagle3 import tools as eagle3_tools
from tests.spec_train.drafts.eagle3.tools import batch_of, packed
from tests.spec_train.drafts.peagle.tools import build
from tests.tolerance import close, close_gradients, network

dataset, head = eagle3_tools.dataset, eagle3_tools.head

FORWARD = {"terms": network(2), "dtype": torch.float32}  # two layers; sums are kept in float64
BACKWARD = {"terms": network(2, backward=True, slots=320)}


def gradients(draft: PeagleDraft, loss: Tensor) -> dict[str, Tensor]:
    names = {k: p for k, p in draft.named_parameters() if p.requires_grad}
    return dict(zip(names, torch.autograd.grad(loss, list(names.values())), strict=True))


@pytest.mark.parametrize("changes", [{}, {"segments": 3}, {"layers": "0,2"}])
def test_the_loss_of_a_batch_is_that_of_its_shifted_tensors(
    dataset: HiddenStatesDataset, head: TargetHead, changes: dict[str, Any]
) -> None:
    draft, batch = build(dataset, head, **changes), packed(dataset)
    ids, sample = batch.document_ids, draft.draw(batch)
    plain = peagle_loss(
        draft,
        aux_hidden_states=batch.aux(draft.config.layers),
        input_ids=shift_left(batch.input_ids, ids),
        loss_mask=shift_left(batch.loss_mask, ids),
        final_hidden=shift_left(batch.hidden["hidden.final"], ids),
        head=head,
        document_ids=ids,
        sample=sample,
    )
    counts = draft.slot_counts(batch.without_hidden(), sample)
    found = draft.loss(batch, head, counts, sample)
    close(found.loss, plain.loss, **FORWARD)
    assert counts.tolist() == [plain.sums["supervised"].sum().item()]
    assert found.sums.keys() == plain.sums.keys()
    for name, value in plain.sums.items():
        close(found.sums[name], value, **FORWARD, magnitude=value.abs(), name=name)
    figures = PeagleDraft.summarise(found.sums)
    close(figures["loss"], float(found.loss.detach()), **FORWARD)
    assert {f"accept_rate/{d}" for d in range(1, 5)} <= figures.keys()
    assert figures["product_limit_length"] is not None


def test_the_loss_trains_on_the_elements_that_were_counted(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = build(dataset, head)
    batches = [batch_of(dataset, [[i], [i + 1]], 40) for i in range(0, 8, 2)]
    counts = [draft.slot_counts(batch.without_hidden()) for batch in batches]
    for batch, count in zip(batches, counts, strict=True):
        first = draft.loss(batch, head, sum(counts))
        assert first.sums["supervised"].sum() == count
        assert torch.equal(draft.loss(batch, head, sum(counts)).loss, first.loss)
    fresh = [
        float(draft.loss(b, head, c).loss.detach()) for b, c in zip(batches, counts, strict=True)
    ]
    again = torch.stack([draft.slot_counts(batch) for batch in batches])
    assert fresh != [
        float(draft.loss(b, head, c).loss.detach()) for b, c in zip(batches, again, strict=True)
    ]
    torch.manual_seed(5)
    one = draft.draw(batches[0])
    assert not torch.equal(one, draft.draw(batches[0]))
    torch.manual_seed(5)
    assert torch.equal(one, draft.draw(batches[0]))


def test_evaluation_is_the_same_every_time_and_however_documents_are_packed(
    dataset: HiddenStatesDataset, head: TargetHead
) -> None:
    draft = build(dataset, head).eval()
    figures = []
    for rows, width in (
        (pack_documents(dataset.lengths.tolist(), 64), 64),
        ([[i] for i in range(len(dataset))], 40),
        (pack_documents(dataset.lengths.tolist(), 90)[::-1], 97),
    ):
        batch = batch_of(dataset, rows, width)
        sums = draft.loss(batch, head, draft.slot_counts(batch)).sums
        figures.append(PeagleDraft.summarise(sums))
    close(figures[1], figures[0], **FORWARD)
    close(figures[2], figures[0], **FORWARD)


@pytest.fixture
def one_rank(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_distributed_wrapper_reduces_every_gradient_once(
    dataset: HiddenStatesDataset, head: TargetHead, one_rank: None
) -> None:
    """For any number of segments, their gradients reach the parameters together."""
    batch = packed(dataset)
    reduced = []
    for segments in (1, 3):
        draft = build(dataset, head, segments=segments)
        draft.eval()  # the same elements in both
        wrapper = torch.nn.parallel.DistributedDataParallel(draft)
        calls: list[int] = []

        def hook(
            state: Any, bucket: dist.GradBucket, calls: list[int] = calls
        ) -> torch.futures.Future[Tensor]:
            calls.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapper.register_comm_hook(None, hook)
        wrapper(batch, head, draft.slot_counts(batch)).loss.backward()
        assert sum(calls) == sum(p.numel() for p in draft.trainable_parameters())
        reduced.append({n: p.grad for n, p in draft.named_parameters() if p.requires_grad})
    close_gradients(*reduced, **BACKWARD)
