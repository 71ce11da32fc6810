"""DraftBatch: the one shape in which drafts see data."""

import pytest
import torch

from spec_data.shards.errors import DatasetError
from spec_train.data.batch import DraftBatch


def make_batch() -> DraftBatch:
    shape = (2, 6)
    ids = torch.arange(12).reshape(shape)
    return DraftBatch(
        input_ids=ids,
        loss_mask=ids % 2 == 0,
        position_ids=torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 0, 0]]),
        document_ids=torch.tensor([[0, 0, 0, 1, 1, -1], [0, 0, 0, 0, -1, -1]]),
        hidden={
            name: torch.full((*shape, 3), float(value), dtype=torch.bfloat16)
            for name, value in [("hidden.L10", 10), ("hidden.L2", 2), ("hidden.final", 99)]
        }
        | {"topk_logits": torch.full((*shape, 4), 1 / 3)},
        target_argmax=ids,
        target_logsumexp=torch.rand(shape),
        rows=[[4, 7], [1]],
    )


def test_aux_is_in_ascending_layer_order_whatever_the_order_asked_for():
    aux = make_batch().aux((10, 2))
    assert aux.shape == (2, 6, 6)
    assert aux[0, 0].tolist() == [2, 2, 2, 10, 10, 10]


@pytest.mark.parametrize("layers", [(2, 3), ()])
def test_a_layer_that_is_not_there_is_named(layers):
    with pytest.raises(DatasetError, match=r"hidden\.L3|no layers"):
        make_batch().aux(layers)


def test_only_states_change_dtype():
    batch = make_batch()
    moved = batch.to("cpu", torch.float32)
    assert {n: t.dtype for n, t in moved.hidden.items()} == dict.fromkeys(
        batch.hidden, torch.float32
    )
    assert moved.input_ids is batch.input_ids
    assert moved.target_logsumexp.dtype == torch.float32
    assert batch.to("cpu", torch.bfloat16).hidden["topk_logits"].dtype == torch.float32
    assert moved.rows == batch.rows
