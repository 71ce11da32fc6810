"""The P-EAGLE draft: what it draws, chunks, one gradient.

The loss itself is compared with slow loops in `test_references`.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spec_data.shards.packing import pack_documents
from spec_train.drafts.peagle.draft import PeagleDraft
from spec_train.losses import menu
from spec_train.training.loss import LossOnRanks
from tests.spec_train.drafts import any_draft
from tests.spec_train.drafts.any_draft import batch_of, build_draft, packed
from tests.spec_train.drafts.test_references import CASES, check
from tests.tolerance import close, close_gradients, network

dataset, head = any_draft.dataset, any_draft.head

FORWARD = {"terms": network(2), "dtype": torch.float32}  # two layers; sums are kept in float64
BACKWARD = {"terms": network(2, backward=True, slots=320)}


def test_the_loss_trains_on_the_elements_that_were_counted(dataset, head):
    """Also of two equal batches of a step."""
    draft = build_draft("peagle", dataset, head)
    batches = [batch_of(dataset, [[i], [i + 1]], 40) for i in (0, 2, 4, 0, 6)]
    for _ in range(2):  # what was drawn for another step is not used
        counts = [draft.slot_counts(batch.without_hidden()) for batch in batches]
        losses = [draft.loss(batch, head, sum(counts)) for batch in batches[:-1]]
        for found, count in zip(losses, counts, strict=False):
            assert found.sums["supervised"].sum() == count
        assert losses[0].loss != losses[3].loss
    torch.manual_seed(5)
    one = draft.draw(batches[0])
    assert not torch.equal(one, draft.draw(batches[0]))
    torch.manual_seed(5)
    assert torch.equal(one, draft.draw(batches[0]))


def test_evaluation_is_the_same_every_time_and_however_documents_are_packed(dataset, head):
    draft = build_draft("peagle", dataset, head).eval()
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


def test_a_distributed_wrapper_reduces_every_gradient_once(dataset, head, one_rank):
    """For any number of segments, their gradients reach the parameters together."""
    batch = packed(dataset)
    reduced = []
    for segments in (1, 3):
        draft = build_draft("peagle", dataset, head, segments=segments)
        draft.eval()  # the same elements in both
        wrapper = torch.nn.parallel.DistributedDataParallel(LossOnRanks(draft))
        calls: list[int] = []

        def hook(
            state: Any, bucket: dist.GradBucket, calls: list[int] = calls
        ) -> torch.futures.Future[Tensor]:
            calls.append(bucket.buffer().numel())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        wrapper.register_comm_hook(None, hook)
        wrapper(batch, head, draft.slot_counts(batch))[0].backward()
        assert sum(calls) == sum(p.numel() for p in draft.trainable_parameters())
        reduced.append({n: p.grad for n, p in draft.named_parameters() if p.requires_grad})
    close_gradients(*reduced, **BACKWARD)


def test_small_chunks_of_the_head_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks may end between elements of one slot: the teacher is then computed again, the same."""
    default = menu.head_loss.__defaults__
    assert default is not None
    monkeypatch.setattr(menu.head_loss, "__defaults__", (2, *default[1:]))
    check(CASES["peagle"], "one row")
