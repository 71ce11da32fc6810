"""Codecs: how the values of a column are stored, encoded and decoded. The manifest names them.

Plain codecs (`CODECS`) store numbers; `bf16` the bits of a bfloat16, which Arrow does not have.

The lossy codecs store vectors as small integers under zstd, a blob per document (`blobs`, where
they differ: all else is the same). A vector is centred, its channels are divided by the square root
of their deviation, and it is rotated into the eigenbasis of the covariance. There the components
are uncorrelated, so one step for all is the best way to spend bits on a squared error, and zstd
gives each component the bits that it needs. Tokens that do not fit (massive activations: a code
beyond 127) are stored in bf16.

Decoding is exact on every device, for any number of tokens at a time, threads, and order of sums:
the basis is an integer matrix too, and the encoder leaves to bf16 every token whose product could
exceed 2**24, so that all sums are integers that float32 holds (in torch's default precision of
float32 products, not in TF32; autocast changes nothing). One multiplication and one addition per
value follow, each rounded by itself, then the rounding to bfloat16. Encoding multiplies by the
inverse of that matrix in float32, whose rounding depends on the device: a coordinate half-way
between two integers may get either, with the same error. What rounding the basis to 8 bits costs
is thereby undone: 1 % of the error that is left.

The tables are fitted to a sample of states, and stored in codec.safetensors. A sample of fewer
tokens than components will do: the eigenvectors that it says nothing about are then arbitrary. That
costs bits and no error, less than shrinking the covariance does.

docs/performance.md has what was measured, CONTRIBUTING.md what was rejected.

Shapes: N tokens, H channels, as many components.
"""

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from spec_data.shards.blobs import LARGEST, LOSSY, PACKED, compress
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.file_heads import instead

# -- plain codecs ----------------------------------------------------------------------------------

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

    def decode_into(self, stored: np.ndarray, out: Tensor | np.ndarray) -> None:
        """Decode into `out` of the same shape: a CPU tensor, converting to its dtype, or `bits`."""
        bits = self.bits(out) if isinstance(out, Tensor) else out
        if bits is None:
            out.copy_(bf16_tensor(stored))  # type: ignore[union-attr]  # without bits: a tensor
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
    """Widen bf16 bits (uint16) to float32 `bits` (uint32), as many at a time as fit the cache."""
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


# -- lossy codecs ----------------------------------------------------------------------------------

_EXACT = float((1 << 24) - (1 << 10))  # sums below are exact in float32; the margin is for rounding
_AT_ONCE = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Values processed at a time: what a CPU's cache holds, or what keeps a GPU busy."""


@dataclass(frozen=True)
class Tables:
    """What decodes a column: (codes @ matrix) * scale + mean, with matrix = factors * basis.

    Attributes:
        mean: float32 [H].
        scale: float32 [H], the width of one unit of the integer product in each channel.
        basis: int8 [H, H], a component in each row, in falling order of variance.
        factors: int16 [H], 1 but for components that are so wide that they have a larger step.
    """

    mean: Tensor
    scale: Tensor
    basis: Tensor
    factors: Tensor

    def to(self, device: torch.device | str) -> "Tables":
        """Return the tables on `device`, moved there once; these themselves when they are there."""
        if self.mean.device == torch.device(device):
            return self
        if str(device) not in self._moved:
            parts = (self.mean, self.scale, self.basis, self.factors)
            self._moved[str(device)] = Tables(*(part.to(device) for part in parts))
        return self._moved[str(device)]

    @cached_property
    def _moved(self) -> dict[str, "Tables"]:
        return {}

    @cached_property
    def matrix(self) -> Tensor:
        """Integers that decode, float32 [H, H]."""
        return self.factors.float()[:, None] * self.basis.float()

    @cached_property
    def inverse(self) -> Tensor:
        """What encodes centred vectors, float32 [H, H]."""
        inverse = torch.linalg.inv(self.basis.double())
        return (inverse / self.scale.double()[:, None] / self.factors.double()).float()

    @cached_property
    def reach(self) -> Tensor:
        """The largest |integer| of each component in `matrix`, float32 [H]."""
        return self.matrix.abs().amax(1)


@dataclass(frozen=True)
class Encoded:
    """The n tokens of one document in a lossy column.

    `blob` uint8 has the codes; `rows` int32 [k], ascending, are the tokens that are stored in bf16,
    whose bits are in `states`, uint16 [k, H].
    """

    blob: np.ndarray
    rows: np.ndarray
    states: np.ndarray

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.blob.nbytes + self.rows.nbytes + self.states.nbytes


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [n, H] times right [H, H] in float32, under autocast too.

    Not in an `autocast(enabled=False)`: where the thread that leaves one has no autocast around it,
    as a reader's, it empties the cache of cast weights that all threads share. A trainer then casts
    them again, and the gradients of a step add up in another order, by chance. With `out`, autocast
    changes nothing.
    """
    return torch.mm(left, right, out=left.new_empty(left.shape))


def encode_tensors(values: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
    """Return codes int8 [N, H] of states [N, H], and which tokens do not fit, bool [N].

    This only queues work on the device of the states. Codes of tokens that do not fit are zero.
    """
    tables = tables.to(values.device)
    step = max(1, _AT_ONCE.get(values.device.type, 1 << 20) // values.shape[1])
    codes, away = [], []
    for part in values.detach().split(step):
        rounded = _product(part.float() - tables.mean, tables.inverse).round_()  # [n, H]
        size = rounded.abs()
        fits = (size.amax(-1) <= LARGEST) & (size @ tables.reach < _EXACT)  # False for NaN
        codes.append(torch.where(fits[:, None], rounded, 0.0).to(torch.int8))
        away.append(~fits)
    return torch.cat(codes), torch.cat(away)


def encode(values: Tensor, tables: Tables, codec: str = PACKED) -> Encoded:
    """Encode the states [N, H] of a document with a lossy codec."""
    codes, away = encode_tensors(values, tables)
    rows = away.nonzero().squeeze(1)
    states = bf16_bits(values.detach()[rows])
    blob = compress(codes.cpu().numpy(), codec)
    return Encoded(blob, rows.cpu().numpy().astype(np.int32), states)


def decode(codes: Tensor, tables: Tables) -> Tensor:
    """Decode codes int8 [N, H], on their device, to bfloat16 [N, H].

    The rows of tokens that are stored in bf16 are meaningless: the caller overwrites them.
    """
    tables = tables.to(codes.device)
    values = _product(codes.to(torch.float32), tables.matrix)
    return values.mul_(tables.scale).add_(tables.mean).to(torch.bfloat16)


def decode_into(codes: np.ndarray, tables: Tables, out: Tensor) -> None:
    """Decode codes int8 [N, H] into the CPU tensor `out` [N, H], bfloat16 or float32."""
    step = max(1, _AT_ONCE["cpu"] // out.shape[1])
    for a in range(0, len(codes), step):
        out[a : a + step] = decode(torch.from_numpy(codes[a : a + step]), tables)


def bf16_bits(values: Tensor) -> np.ndarray:
    """Return the bits of `values` (any shape) as bfloat16: uint16, on the CPU."""
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).cpu()
    return bits.numpy().view(np.uint16)


def bf16_tensor(bits: np.ndarray) -> Tensor:
    """Return a new bfloat16 tensor of the same shape from uint16 bits."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


# -- tables ------------------------------------------------------------------------------------

_MASSIVE = 5.0  # times the median distance from the centre: no part of the statistics
_MOST_MASSIVE = 0.25  # at most this share of tokens
_FLOOR = 1e-3  # deviation of a constant channel, in mean deviations
_USED = 0.8  # of the largest code, by the widest token of the sample
_ROWS = 4096  # tokens at a time
_PARTS = {
    "mean": torch.float32,
    "scale": torch.float32,
    "basis": torch.int8,
    "factors": torch.int16,
}
"""The tensors of a column's tables."""
TABLES = "codec.safetensors"


class Basis:
    """The eigenbasis of a column, from which `tables` makes tables of any step."""

    def __init__(self, states: Tensor) -> None:
        """Fit to sampled states [N, H], N >= 1, finite; on their device.

        Massive tokens (attention sinks) are left out: they would be the first component.
        """
        states = _without_massive(states)
        mean = states.mean(0, dtype=torch.float64)
        deviation = sum((part.double() - mean).square().sum(0) for part in states.split(_ROWS))
        deviation = (deviation / len(states)).sqrt()
        least = max(_FLOOR * float(deviation.mean()), 1e-4 * float(mean.abs().mean()), 1e-30)
        weight = deviation.clamp_min(least).rsqrt()
        covariance = sum(
            z.T @ z for z in ((part.double() - mean) * weight for part in states.split(_ROWS))
        )
        variance, vectors = torch.linalg.eigh(covariance / len(states))
        basis = vectors.flip(1).T  # [component, channel], in falling order of variance
        unit = max(float(variance.clamp_min(0).sqrt().mean()), least**0.5)
        quantum = float(basis.abs().max()) / 127
        self._tables = Tables(
            mean.float(),
            (quantum * unit / weight).float(),
            (basis / quantum).round().to(torch.int8),
            torch.ones(len(mean), dtype=torch.int16, device=mean.device),
        )
        self._widest = torch.zeros_like(self._tables.mean)  # coordinates at a step of 1
        for part in states.split(_ROWS):
            coordinates = (part.float() - self._tables.mean) @ self._tables.inverse
            self._widest = torch.maximum(self._widest, coordinates.abs().amax(0))

    def tables(self, step: float) -> Tables:
        """Return tables whose components have `step` times the mean deviation as their step.

        A component that would leave the codes has a multiple of it.
        """
        factors = (self._widest / (step * _USED * LARGEST)).ceil().clamp(1, 1 << 14)
        tables = replace(
            self._tables, scale=self._tables.scale * step, factors=factors.to(torch.int16)
        )
        # not inverted again: the basis is the same
        tables.__dict__["inverse"] = self._tables.inverse / step / factors
        return tables


def _without_massive(states: Tensor) -> Tensor:
    """Return the states [n, H] of a sample [N, H] that are no massive activations."""
    centre = states.float().median(0).values
    distance = torch.cat([(part.float() - centre).norm(dim=1) for part in states.split(_ROWS)])
    limit = max(_MASSIVE * distance.median(), distance.quantile(1 - _MOST_MASSIVE))
    return states[distance <= limit]


def save_tables(tables: Mapping[str, Tables]) -> bytes:
    """Return the bytes of codec.safetensors for the tables of every lossy column."""
    return save(
        {
            f"{name}.{part}": getattr(table, part).cpu().contiguous()
            for name, table in sorted(tables.items())
            for part in _PARTS
        }
    )


def load_tables(file: Path, widths: Mapping[str, int], sha256: str | None) -> dict[str, Tables]:
    """Read the tables of lossy columns from codec.safetensors; `widths` is H by name.

    `sha256` is the file's hash as the manifest has it; None: do not compare.

    Raises:
        MissingError: no such file.
        DatasetError: the file has another hash, or lacks tables that a column can be decoded with.
    """
    if not file.is_file():
        raise MissingError(f"{file}: missing, so lossy columns cannot be decoded; copy it again")
    data = file.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    if sha256 is not None and digest != sha256:
        why = (
            f"sha256 is {digest[:16]}..., the manifest says {sha256[:16]}...: these are the tables "
            "of another dataset, or damaged; copy the file again"
        )
        raise DatasetError(f"{file}: {instead(file, why)}")
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise DatasetError(f"{file}: damaged ({error}); copy it again") from None
    tables = {}
    for column, width in widths.items():
        parts = {name: tensors.get(f"{column}.{name}") for name in _PARTS}
        for wrong in _impossible(width, parts):
            raise DatasetError(
                f"{file}: no tables that decode column {column}: {wrong}; "
                "copy the file again, or generate the dataset again"
            )
        tables[column] = Tables(**{name: part for name, part in parts.items() if part is not None})
    return tables


def _impossible(width: int, parts: Mapping[str, Tensor | None]) -> Iterator[str]:
    """Yield what is wrong with the parts of a column's tables: no column has such ones."""
    for name, part in parts.items():
        dtype, shape = _PARTS[name], (width, width) if name == "basis" else (width,)
        if part is None:
            yield f"{name} is missing"
        elif part.dtype != dtype or part.shape != shape:
            stored, wanted = (str(kind).removeprefix("torch.") for kind in (part.dtype, dtype))
            yield f"{name} is {stored} {list(part.shape)} instead of {wanted} {list(shape)}"
        elif not bool(part.isfinite().all()):
            yield f"{name} is not finite"
        elif name in ("scale", "factors") and bool((part <= 0).any()):
            yield f"{name} is not above 0"


# -- by name ---------------------------------------------------------------------------------------

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
        DatasetError: this release has no such codec; the message lists those that it has.
    """
    if name not in CODECS:
        raise DatasetError(
            f"column {column!r} is stored with codec {name!r}, which this release cannot read "
            f"(known: {', '.join([*CODECS, *LOSSY])}); upgrade spec-data"
        )
    return CODECS[name]
