"""From the columns of a forward to the arrays of a unit: encoded on the device, copied, stored.

On a CPU nothing moves: arrays are views of the tensors. On CUDA a stream of its own copies into
page-locked memory beside the next forward; torch keeps such memory and uses it again. The arrays of
a batch are read after the next forward was started, so the device never waits for the host. Full
logits are copied at once: two batches of them would fill the memory of the host.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import ForwardBatch
from spec_data.shards.blobs import compress, compressors
from spec_data.shards.codecs import Encoded, Tables, bf16_bits, encode_tensors
from spec_data.shards.schema import Column
from spec_data.shards.writer import UnitData


class CopyStream:
    """The queue of copies of a CUDA device, beside the queue of its computation."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._beside = torch.cuda.Stream(device)

    def after_compute(self) -> None:
        """Let copies that are queued from now on wait for all computation queued so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, source: Tensor) -> Tensor:
        """Queue a copy to the host; the memory of `source` stays valid until it is done."""
        into = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        source.record_stream(self._stream)
        return into

    def rows(self, source: Tensor, index: Tensor) -> Tensor:
        """Return some rows, on the host, of a tensor that is computed.

        They pass what was queued in the meantime: copies that wait for the next forward.
        """
        with torch.cuda.stream(self._beside):
            return source.index_select(0, index.to(source.device)).cpu()

    def mark(self) -> torch.cuda.Event:
        """Return an event, whose `synchronize` waits for all copies queued so far."""
        event = torch.cuda.Event()
        event.record(self._stream)
        return event


def copy_stream(device: torch.device, columns: Sequence[str]) -> CopyStream | None:
    """Return what copies states for `columns` to the host, one batch late; None: at once."""
    return None if device.type != "cuda" or "logits" in columns else CopyStream(device)


class Arrival:
    """The tensors of one batch, on their way to the host."""

    def __init__(self, tensors: Mapping[str, Tensor], stream: CopyStream | None = None) -> None:
        """Start to move tensors that are computed, or whose computation was queued."""
        self._stream = stream
        if stream is None:
            self._moved = {name: value.cpu() for name, value in tensors.items()}
            return
        sources = {name: value.contiguous() for name, value in tensors.items()}
        stream.after_compute()
        self._moved = {name: stream.copy(value) for name, value in sources.items()}
        self._event = stream.mark()

    def arrays(self) -> dict[str, np.ndarray]:
        """Wait for the tensors and return them."""
        if self._stream is not None:
            self._event.synchronize()
        return {name: value.numpy() for name, value in self._moved.items()}

    def rows(self, values: Tensor, index: np.ndarray) -> Tensor:
        """Return some rows, on the host, of a tensor that was computed when the copies began.

        Nothing may be computed from it first: that would wait for the next forward.
        """
        chosen = torch.from_numpy(index)
        if self._stream is None:
            return values[chosen.to(values.device)].cpu()
        self._event.synchronize()
        return self._stream.rows(values, chosen)


# -- encoding --------------------------------------------------------------------------------------
# `encode_columns` only queues work on the device of the target; `store` runs on the host, when the
# result has arrived. No step in between asks the device for a number.
#
# Shapes: n tokens of a batch that a column stores, W values of a token.

_NON_FINITE, _CONSTANT = 1, 2  # what makes the vector of a token unusable
_UNUSABLE, _AWAY = ".unusable", ".away"  # added to the name of a column


def encode_columns(
    values: Mapping[str, Tensor], columns: Sequence[Column], tables: Mapping[str, Tables]
) -> dict[str, Tensor]:
    """Return what is moved to the host, on the device of `values`.

    `values` are the columns [n] or [n, W] of `forward_columns`; the loss mask is stored already.

    Returns:
        Each column as it is stored, or its codes, int8 [n, W]; for columns of floating point, which
        tokens are unusable, uint8 [n]; and of lossy ones which do not fit the codes, bool [n].
    """
    out = {}
    for column in columns:
        if column.name == "loss_mask":
            continue
        value = values[column.name]
        if value.is_floating_point():
            out[column.name + _UNUSABLE] = _unusable(value, column.may_be_constant)
        if column.lossy:
            codes, away = encode_tensors(value, tables[column.name])
            out |= {column.name: codes, column.name + _AWAY: away}
        else:
            out[column.name] = column.coder.encode_tensor(value)
    return out


def _unusable(value: Tensor, may_be_constant: bool) -> Tensor:
    """Return why the vector of each token [n] or [n, W] is unusable, uint8 [n]; 0: it is not.

    An all-zero vector is constant.
    """
    # Smallest and largest value of each token, [n]; both propagate NaN.
    low, high = (value, value) if value.ndim == 1 else (value.amin(-1), value.amax(-1))
    finite = torch.isfinite(low) & torch.isfinite(high)
    reason = (~finite).to(torch.uint8) * _NON_FINITE
    if not may_be_constant:
        reason += (finite & (low == high)).to(torch.uint8) * _CONSTANT
    return reason


def store(
    arrival: Arrival,
    values: Mapping[str, Tensor],
    batch: ForwardBatch,
    columns: Sequence[Column],
    data: UnitData,
    broken: dict[int, str],
) -> None:
    """Copy what has arrived to the documents of a unit, and note those with unusable states.

    `arrival` has what `encode_columns` made from `values`, of which tokens that escape a codec are
    read. `broken` receives the reason by document.
    """
    arrays = arrival.arrays()
    for column in columns:
        if column.name == "loss_mask":
            continue
        bounds, start = data.row_offsets(column), 0  # of the tokens in the unit, and in the batch
        stored = arrays[column.name]
        reasons = arrays.get(column.name + _UNUSABLE)
        slices = []
        for d in batch.documents:
            there = slice(int(bounds[d]), int(bounds[d + 1]))
            here = slice(start, start + there.stop - there.start)
            slices.append(here)
            if not column.lossy:
                data.tokens[column.name][there] = stored[here].view(column.storage)
            if reasons is not None and reasons[here].any():
                if (reasons[here] == _NON_FINITE).any():
                    broken[d] = f"non-finite-{column.name}"
                else:
                    broken.setdefault(d, f"constant-{column.name}")
            start = here.stop
        if not column.lossy:
            continue
        away = np.flatnonzero(arrays[column.name + _AWAY])
        states = np.zeros((0, column.width or 1), np.uint16)
        if len(away):
            states = bf16_bits(arrival.rows(values[column.name], away))
        codes = [stored[here] for here in slices]
        blobs = compressors().map(compress, codes, itertools.repeat(column.codec))
        for d, here, blob in zip(batch.documents, slices, blobs, strict=True):
            first, last = np.searchsorted(away, [here.start, here.stop])
            rows = (away[first:last] - here.start).astype(np.int32)
            data.coded[column.name][d] = Encoded(blob, rows, states[first:last])
