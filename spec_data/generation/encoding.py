"""From the columns of a forward to the arrays of a unit.

`encode_columns` runs on the device of the target and only queues work there; `store` runs on the
host, when the result has arrived. No step in between asks the device for a number.

Shapes: n tokens of a batch that a column stores, W values of a token, D documents of the batch.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spec_data.generation.transfers import Arrival
from spec_data.shards.lossy import Tables, bf16_bits
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData
from spec_data.target.forward_batch import ForwardBatch

_NON_FINITE, _CONSTANT = 1, 2  # what makes the vector of a token unusable
_UNUSABLE, _AWAY = ".unusable", ".away"  # added to the name of a column


def encode_columns(
    values: Mapping[str, Tensor], columns: Sequence[Column], tables: Mapping[str, Tables]
) -> dict[str, Tensor]:
    """Return what is moved to the host, on the device of `values`.

    Args:
        values: the columns [n] or [n, W] of `forward_columns`.
        columns: the columns to store; the loss mask is stored already.
        tables: of the lossy columns.

    Returns:
        Each part of each column as it is stored; and for columns of floating point, which tokens
        are unusable, uint8 [n], and which escape a lossy codec, bool [n].
    """
    out = {}
    for column in columns:
        if column.name == "loss_mask":
            continue
        value = values[column.name]
        if value.is_floating_point():
            out[column.name + _UNUSABLE] = _unusable(value)
        if column.lossy is None:
            out[column.name] = column.coder.encode_tensor(value)
        else:
            codes, scale, away = column.lossy.encode_tensors(value, tables[column.name])
            out |= {column.name: codes, column.scale_part.name: scale, column.name + _AWAY: away}
    return out


def _unusable(value: Tensor) -> Tensor:
    """Return why the vector of each token [n] or [n, W] is unusable, uint8 [n]; 0: it is not.

    An all-zero vector is constant.
    """
    # Smallest and largest value of each token, [n]; both propagate NaN.
    low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
    finite = torch.isfinite(low) & torch.isfinite(high)
    found = (~finite).to(torch.uint8) * _NON_FINITE
    if value.ndim == 2 and value.shape[1] > 1:
        found += (finite & (low == high)).to(torch.uint8) * _CONSTANT
    return found


def store(
    arrival: Arrival,
    values: Mapping[str, Tensor],
    batch: ForwardBatch,
    columns: Sequence[Column],
    data: UnitData,
    broken: dict[int, str],
) -> None:
    """Copy what has arrived to the documents of a unit, and note those with unusable states.

    Args:
        arrival: of the result of `encode_columns`.
        values: the columns that it was made from; tokens that escape a codec are read from them.
        batch: whose documents these are.
        columns: the columns to store.
        data: of the unit.
        broken: receives the reason by document.
    """
    arrays = arrival.arrays()
    for column in columns:
        if column.name == "loss_mask":
            continue
        # Where the tokens of each document of the batch are stored in the unit.
        bounds = data.row_offsets(column)
        places = [slice(int(bounds[d]), int(bounds[d + 1])) for d in batch.documents]
        if column.name + _UNUSABLE in arrays:
            _find_broken(column.name, arrays[column.name + _UNUSABLE], batch, places, broken)
        parts = {p.name: arrays[p.name].view(p.storage) for p in column.parts}
        start = 0
        for place in places:
            stop = start + place.stop - place.start
            for name, array in parts.items():
                data.tokens[name][place] = array[start:stop]
            start = stop
        if column.lossy is not None and len(rows := np.flatnonzero(arrays[column.name + _AWAY])):
            # Index in the batch -> index in the unit, for the tokens that escape the codec.
            index = np.concatenate([np.arange(p.start, p.stop) for p in places])
            states = arrival.rows(values[column.name], rows)
            data.escapes[column.name].add(index[rows], bf16_bits(states))


def _find_broken(
    name: str, codes: np.ndarray, batch: ForwardBatch, places: list[slice], broken: dict[int, str]
) -> None:
    """Add the documents in which a token is unusable (uint8 [n]) to `broken`, with the reason."""
    if not codes.any():
        return
    start = 0
    for d, place in zip(batch.documents, places, strict=True):
        own = codes[start : start + place.stop - place.start]
        if (own == _NON_FINITE).any():
            broken[d] = f"non-finite-{name}"
        elif own.any():
            broken.setdefault(d, f"constant-{name}")
        start += len(own)
