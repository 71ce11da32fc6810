"""Plain codecs: how the values of a column are stored, encoded and decoded.

The manifest declares one codec per column. `bf16` stores the bits of a bfloat16 in a uint16, as
Arrow has no bfloat16: exact for a target that runs in bfloat16, rounded for one in float32. The
other codecs of this file store plain numbers. The lossy codecs of hidden states are in lossy.py.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError
from spec_data.shards.lossy import LOSSY, LossyCodec

_SAME_BYTES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.float32): torch.float32,
}
_CACHED_VALUES = 1 << 15  # values widened at a time: they stay in the CPU's cache


@dataclass(frozen=True)
class Codec:
    """One way to store numbers: `storage` and `arrow` on disk, `logical` in a reader's tensors."""

    name: str
    storage: np.dtype
    arrow: pa.DataType
    logical: torch.dtype

    def encode(self, values: Tensor) -> np.ndarray:
        """Encode `values` (any shape) to numbers of dtype `storage`, C-contiguous, on the CPU."""
        return self.encode_tensor(values).cpu().numpy().view(self.storage)

    def encode_tensor(self, values: Tensor) -> Tensor:
        """Encode on the device of `values`, to a tensor whose bytes are those of `encode`."""
        if self.name == "bf16":
            return values.detach().to(torch.bfloat16).contiguous().view(torch.int16)
        return values.detach().to(_SAME_BYTES[self.storage]).contiguous()

    def decode(self, stored: np.ndarray) -> Tensor:
        """Decode to a new tensor of dtype `logical`, of the same shape; never a view."""
        out = torch.empty(stored.shape, dtype=self.logical)
        self.decode_into(stored, out)
        return out

    def decode_into(self, stored: np.ndarray, out: Tensor | np.ndarray) -> None:
        """Decode into `out` of the same shape: a CPU tensor, converting to its dtype, or `bits`."""
        bits = self.bits(out) if isinstance(out, Tensor) else out
        if bits is None:
            values = torch.from_numpy(stored.view(np.int16).copy()).view(torch.bfloat16)
            out.copy_(values)  # type: ignore[union-attr]  # without bits it is a tensor
        elif self.name == "bf16" and bits.dtype == np.uint32:
            _widen(stored, bits)
        else:
            np.copyto(bits, stored, casting="unsafe")

    def bits(self, out: Tensor) -> np.ndarray | None:
        """Return the memory of a CPU tensor for `decode_into`; None: its dtype needs a conversion.

        Slicing such an array takes a tenth of the time that slicing a tensor takes.
        """
        if self.name != "bf16":
            return out.numpy()
        if out.dtype == torch.bfloat16:
            return out.view(torch.uint16).numpy()
        if out.dtype == torch.float32:
            return out.view(torch.int32).numpy().view(np.uint32)
        return None


def _widen(stored: np.ndarray, bits: np.ndarray) -> None:
    """Widen bf16 bits (uint16) to float32 `bits` (uint32) of the same shape, without allocating.

    The bits move up by 16, as many values at a time as the CPU's cache holds.
    """
    rows = max(1, _CACHED_VALUES // max(1, stored[:1].size))
    for start in range(0, len(stored), rows):
        part = bits[start : start + rows]
        np.copyto(part, stored[start : start + rows])
        np.left_shift(part, 16, out=part)


def tensor_of(bits: np.ndarray) -> Tensor:
    """Return the tensor that `Codec.bits` was made of; both share memory."""
    if bits.dtype == np.uint16:
        return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(bits.view(np.float32) if bits.dtype == np.uint32 else bits)


CODECS = {
    codec.name: codec
    for codec in (
        Codec("bf16", np.dtype(np.uint16), pa.uint16(), torch.bfloat16),
        Codec("int32", np.dtype(np.int32), pa.int32(), torch.int64),
        Codec("bool8", np.dtype(np.uint8), pa.uint8(), torch.bool),
        Codec("float32", np.dtype(np.float32), pa.float32(), torch.float32),
    )
}


def codec_named(name: str, column: str) -> Codec:
    """Return the plain codec of a name.

    Raises:
        DatasetError: this release has no such codec; the message lists the known ones.
    """
    if name not in CODECS:
        raise _unknown(name, column)
    return CODECS[name]


def lossy_codec(name: str, column: str) -> LossyCodec | None:
    """Return the lossy codec of a name, or None when the name is a plain codec's.

    Raises:
        DatasetError: this release has no such codec.
    """
    if name not in CODECS and name not in LOSSY:
        raise _unknown(name, column)
    return LOSSY.get(name)


def _unknown(name: str, column: str) -> DatasetError:
    return DatasetError(
        f"column {column!r} is stored with codec {name!r}, which this release cannot read "
        f"(known: {', '.join([*CODECS, *LOSSY])}); upgrade spec-data"
    )
