"""From columns to the arrays of a unit: tokens at their places, broken states at their document."""

import numpy as np
import pytest
import torch

from spec_data.capture.backend import ForwardBatch
from spec_data.generation.transfers import Arrival, encode_columns, store
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData

MASKS = ([0, 0, 0, 1], [0, 1, 1], [1, 1, 0, 0, 1])
COLUMNS = (
    Column(name="loss_mask", codec="bool8"),
    Column(name="hidden.L0", codec="bf16", width=2),
    Column(name="target_logsumexp", codec="float32", tokens="supervised"),
)


def stored(order: list[int], spoil=None) -> tuple[UnitData, dict[int, str], dict]:
    """Store three documents that a batch holds in another order; `spoil` changes the columns."""
    lengths = [len(mask) for mask in MASKS]
    data = UnitData.allocate(
        COLUMNS, ["a", "b", "c"], ["s"] * 3, [[], [], []], lengths, np.concatenate(MASKS)
    )
    dense = [[(d, t) for t in range(lengths[d])] for d in order]
    sparse = [[(d, t) for d, t in own if t + 1 < lengths[d] and MASKS[d][t + 1]] for own in dense]
    values = {
        "hidden.L0": torch.tensor([[10.0 * d + t, -1.0] for own in dense for d, t in own]),
        "target_logsumexp": torch.tensor([10.0 * d + t for own in sparse for d, t in own]),
    }
    places = {
        "hidden.L0": [place for own in dense for place in own],
        "target_logsumexp": [place for own in sparse for place in own],
    }
    if spoil:
        spoil(values, places)
    none = torch.zeros(0, 0, dtype=torch.long)
    batch = ForwardBatch(none, none, none, order, [lengths[d] for d in order])
    broken: dict[int, str] = {}
    arrival = Arrival(encode_columns(values, COLUMNS, {}))
    store(arrival, values, batch, COLUMNS, data, broken)
    return data, broken, places


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]])
def test_every_token_lies_at_its_place(order):
    data, broken, _ = stored(order)
    assert broken == {}
    states = data.tokens["hidden.L0"].astype(np.uint32) << 16
    wanted = [10 * d + t for d, mask in enumerate(MASKS) for t in range(len(mask))]
    assert states.view(np.float32)[:, 0].tolist() == wanted
    kept = [
        10 * d + t
        for d, mask in enumerate(MASKS)
        for t in range(len(mask))
        if t + 1 < len(mask) and mask[t + 1]
    ]
    assert data.tokens["target_logsumexp"].tolist() == kept


@pytest.mark.parametrize("column", ["hidden.L0", "target_logsumexp"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_broken_state_is_found_in_its_document(column, value):
    """Also in sparse columns, whose documents have fewer rows than tokens."""
    order = [2, 0, 1]
    for token in stored(order)[2][column]:

        def spoil(values, places, token=token):
            values[column][places[column].index(token)] = value

        assert stored(order, spoil)[1] == {token[0]: f"non-finite-{column}"}


def test_a_constant_vector_is_found_and_a_non_finite_one_counts_more():
    def spoil(values, places):
        values["hidden.L0"][places["hidden.L0"].index((1, 0))] = 3.0
        values["hidden.L0"][places["hidden.L0"].index((2, 1))] = 0.0
        values["hidden.L0"][places["hidden.L0"].index((2, 3)), 1] = torch.nan

    found = stored([0, 1, 2], spoil)[1]
    assert found == {1: "constant-hidden.L0", 2: "non-finite-hidden.L0"}
