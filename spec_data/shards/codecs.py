"""Codecs: how the values of a column are stored, encoded and decoded. The manifest names them.

Plain codecs (`CODECS`) store numbers. `bf16` stores the bits of a bfloat16 in a uint16, as Arrow
has no bfloat16: exact for a target that runs in bfloat16, rounded for one in float32.

Lossy codecs (`LOSSY`) store small codes on standardised channels, and one scale per token. Decoding
is these IEEE float32 operations, each rounded by itself, in this order:

    v = levels[code]  (int8c: v = code);   v = v * scale;   v = v * std;   v = v + mean

then one rounding to bfloat16, ties to even; fp8 stops after the scale. Separate multiplications and
additions produce the same bits in numpy, torch and CUDA as long as they are not fused: no FMA, no
addcmul, no torch.compile. Looking final values up in a table would be exact too, but then every
scale would need a table of its own, and a scale per token is worth having: it reduces the median
error of real aux states by a sixth to a third, and that of spiky channels by up to 98 %. Encoding
may differ in the last place between devices, because only the codes are stored.

Residual streams hold most of their energy in a few channels. So every channel is first divided by
its own standard deviation, and tokens far outside (massive activations) are stored in bf16. If that
leaves the error of a channel near its bound, tokens with a large error in one channel are too.

A lossless codec bf16z (exponent bytes under zstd-1, one blob per document) was measured and
rejected: it saves 31 % (11.0 bits; no entropy coder gets below 10.6), decodes 1.3 to 1.9 GB per
CPU-second, decodes only whole documents and not on a device, and makes the size of a shard depend
on its states.

Shapes: N tokens, H channels, W code bytes of a token.
"""

import math
import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError

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


# -- lossy codecs ----------------------------------------------------------------------------------

ESCAPE_FACTOR = 8.0
"""A token whose standardised RMS exceeds this many times the median is stored in bf16."""
_BLOCK = {
    "cpu": 1 << 17,
    "cuda": 1 << 26,
}  # elements processed at a time: what a CPU cache holds, or what keeps a GPU busy
_BUFFERS = threading.local()
_CONSTANT = 2.0**64  # inverse deviation of a constant channel: a token that differs from it escapes


@dataclass(frozen=True)
class Bound:
    """Largest accepted error of a codec: channel-normalised MSE (median, worst), and KL in nats."""

    median: float
    worst: float
    kl: float


@dataclass(frozen=True)
class Tables:
    """The tables that decode a column: mean and std float32 [H], levels float32 [L] (None: int8c).

    `std` is 0 for a constant channel. A token whose standardised RMS exceeds `limit` escapes, and
    so does a token with a squared error above `worst` in any standardised channel. Only the encoder
    uses these two.
    """

    mean: Tensor
    std: Tensor
    limit: float
    levels: Tensor | None = None
    worst: float = math.inf

    def to(self, device: torch.device | str) -> "Tables":
        """Return the tables on `device`; these themselves when they are there already."""
        if self.mean.device == torch.device(device):
            return self
        levels = None if self.levels is None else self.levels.to(device)
        return Tables(self.mean.to(device), self.std.to(device), self.limit, levels, self.worst)

    @cached_property
    def inverse(self) -> Tensor:
        """1 / std, float32 [H]; huge for constant channels."""
        return torch.where(self.std > 0, 1.0 / self.std, _CONSTANT)

    @cached_property
    def nearest(self) -> Tensor:
        """Code of the nearest level for every bfloat16, indexed by its 16 bits: uint8 [65536]."""
        levels = self._levels
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        borders = (levels[1:].astype(np.float64) + levels[:-1]) / 2
        codes = np.searchsorted(borders, np.nan_to_num(bits.view(np.float32)))
        return torch.from_numpy(codes.astype(np.uint8)).to(self.mean.device)

    @cached_property
    def pairs(self) -> np.ndarray:
        """Two float32 levels as one uint64, for two codes at once: uint64 [256] or [4096].

        4-bit codes: indexed by the byte that holds both. 6-bit codes: indexed by 12 bits, the byte
        with the low 4 bits of both codes, then their upper 2 bits each.
        """
        levels = self._levels
        index = np.arange(256 if len(levels) == 16 else 4096)
        first = (index & 15) | ((index >> 8 & 3) << 4)
        second = (index >> 4 & 15) | ((index >> 10 & 3) << 4)
        return np.stack([levels[first], levels[second]], -1).view(np.uint64).ravel()

    @property
    def _levels(self) -> np.ndarray:
        if self.levels is None:
            raise ValueError("this codec has no level table")
        return self.levels.cpu().numpy()


@dataclass(frozen=True)
class Encoded:
    """Encoded states: codes [N, W], scale uint16 [N] (bits of bf16), and the n escaped tokens.

    `escape_index` int64 [n] has their row numbers, `escape` uint16 [n, H] the bits of their states.
    """

    codes: np.ndarray
    scale: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray


@dataclass(frozen=True)
class LossyCodec:
    """A lossy codec of vectors. It stores `bits` per channel; H must be a multiple of `multiple`.

    `stronger` is the codec with the next smaller error.
    """

    name: str
    bits: int
    storage: np.dtype
    arrow: pa.DataType
    bound: Bound
    stronger: str
    multiple: int = 1
    standardised: bool = True
    logical: torch.dtype = torch.bfloat16

    def code_width(self, width: int) -> int:
        """Return W, the bytes of codes per token of `width` channels."""
        return width * self.bits // 8

    def encode(self, values: Tensor, tables: Tables) -> Encoded:
        """Encode states [N, H] on their device."""
        codes, scale, away = self.encode_tensors(values, tables)
        rows = away.nonzero().squeeze(1)
        return Encoded(
            codes.cpu().numpy().view(self.storage),
            scale.cpu().numpy().view(np.uint16),
            rows.cpu().numpy(),
            bf16_bits(values.detach()[rows]),
        )

    def encode_tensors(self, values: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Encode states [N, H] on their device, some tokens at a time; only queue work there.

        Return codes uint8 [N, W], the bits of the scale int16 [N], and which tokens escape,
        bool [N].
        """
        tables = tables.to(values.device)
        step = max(1, _BLOCK.get(values.device.type, 1 << 20) // values.shape[1])
        blocks = [self._encode_block(part, tables) for part in values.detach().split(step)]
        codes, scale, away = (torch.cat(column) for column in zip(*blocks, strict=True))
        return codes, scale.to(torch.bfloat16).view(torch.int16), away

    def _encode_block(self, values: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        """Encode states [n, H]: codes uint8 [n, W], scale [n], and bool [n], True for escapes."""
        x = values.to(torch.float32, copy=True)
        z = (x - tables.mean).mul_(tables.inverse)  # [n, H]
        rms = z.square().mean(-1).sqrt_()  # [n]
        away = ~(rms <= tables.limit)  # [n]; also True where the RMS is not a number
        source = (z if self.standardised else x).masked_fill_(away[:, None], 0.0)
        codes, scale = self._quantise(source, rms.masked_fill_(away, 0.0), tables)
        if tables.worst < math.inf:
            bad = self.squared_errors(values, codes, scale, tables).amax(-1) > tables.worst
            blank = torch.zeros(1, values.shape[1], device=values.device)
            no_codes, no_scale = self._quantise(blank, blank[:, 0].clone(), tables)
            codes = torch.where(bad[:, None], no_codes, codes)  # as those of the tokens above
            scale = torch.where(bad, no_scale, scale)  # the limit
            away |= bad
        return codes, scale, away

    def sample_errors(self, values: Tensor, tables: Tables) -> Tensor:
        """Return `squared_errors` [n, H] of those of the states [N, H] that do not escape."""
        step = max(1, _BLOCK.get(values.device.type, 1 << 20) // values.shape[1])
        parts = []
        for block in values.split(step):
            codes, scale, away = self._encode_block(block, tables)
            parts.append(self.squared_errors(block, codes, scale, tables)[~away])
        return torch.cat(parts)

    def squared_errors(
        self, values: Tensor, codes: Tensor, scale: Tensor, tables: Tables
    ) -> Tensor:
        """Return the squared errors of standardised states, float32 [n, H], before bf16 rounding.

        `values` [n, H] are the states, `codes` [n, W] and `scale` [n] what they were encoded to.
        """
        x = values.to(torch.float32)
        coded = self._values(codes, tables) * scale.to(torch.float32)[:, None]
        if self.standardised:
            return ((x - tables.mean).mul_(tables.inverse) - coded).square_()
        return (x - coded).mul_(tables.inverse).square_()

    def decode(self, codes: Tensor, scale: Tensor, tables: Tables) -> Tensor:
        """Decode codes [N, W] and scale [N] (bfloat16), on their device, to bfloat16 [N, H].

        The rows of escaped tokens are meaningless here: the caller overwrites them.
        """
        tables = tables.to(codes.device)
        v = self._values(codes, tables) * scale.to(torch.float32)[:, None]
        if self.standardised:
            v = v * tables.std
            v = v + tables.mean
        return v.to(torch.bfloat16)

    def decode_into(
        self, codes: np.ndarray, scale: np.ndarray, tables: Tables, out: Tensor
    ) -> None:
        """Decode stored codes [N, W] and scale uint16 [N] into the CPU tensor `out` [N, H].

        `out` is bfloat16, or float32 and then gets the same (rounded) values. Some tokens are
        decoded at a time so that they stay in the cache; no memory of document size is allocated.
        """
        width = out.shape[1]
        step = max(1, _BLOCK["cpu"] // width)
        work = _scratch(step, width)
        for a in range(0, len(codes), step):
            part = codes[a : a + step]
            block, target = work[: len(part)], out[a : a + len(part)]
            self._values_into(part, tables, block)
            block.mul_(bf16_tensor(scale[a : a + step]).float()[:, None])
            if self.standardised:
                block.mul_(tables.std)
                block.add_(tables.mean)
            target.copy_(block if out.dtype == torch.bfloat16 else block.to(torch.bfloat16))

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        """Quantise states [n, H] (overwritten) with RMS [n]: codes uint8 [n, W] and scale [n].

        The scale is float32, but exactly a bfloat16.
        """
        raise NotImplementedError

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        """Return the levels, float32 [N, H], of codes [N, W] on any device."""
        raise NotImplementedError

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        """Write the levels of stored codes [N, W] into `out`, float32 [N, H] on the CPU."""
        raise NotImplementedError


class Int8(LossyCodec):
    """Multiples of one step per token, which is its largest |z| divided by 127."""

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        scale = _ceil_bf16(source.abs().amax(-1) / 127)
        source /= torch.where(scale > 0, scale, 1.0)[:, None]
        return source.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8), scale

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        return codes.view(torch.int8).to(torch.float32)

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        # a copy, because torch warns about read-only memory
        own = torch.empty(codes.shape, dtype=torch.int8)
        np.copyto(own.numpy(), codes)
        out.copy_(own)


class LloydMax(LossyCodec):
    """Lloyd-Max levels, optimal for a Gaussian; each token is first divided by its own RMS."""

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        scale = rms.to(torch.bfloat16).to(torch.float32)
        source /= torch.where(scale > 0, scale, 1.0)[:, None]
        bits = source.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
        codes = tables.nearest[bits]
        low = codes & 15
        packed = low[:, 0::2] | low[:, 1::2] << 4  # uint8 [n, H/2]: channels 2i and 2i+1
        if self.bits == 6:
            top = codes >> 4
            # uint8 [n, H/2]: 4 bits for each pair of channels
            top = top[:, 0::2] | top[:, 1::2] << 2
            half = top.shape[1] // 2
            packed = torch.cat([packed, top[:, :half] | top[:, half:] << 4], dim=1)
        return packed, scale

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        if tables.levels is None:
            raise ValueError(f"{self.name} decodes with a level table")
        codes = codes.to(torch.int32)
        pairs = codes if self.bits == 4 else codes[:, : codes.shape[1] * 2 // 3]
        first, second = pairs & 15, pairs >> 4
        if self.bits == 6:
            top = codes[:, pairs.shape[1] :]
            top = torch.cat([top & 15, top >> 4], dim=1)
            first, second = first | (top & 3) << 4, second | (top >> 2) << 4
        return tables.levels[torch.stack([first, second], dim=-1).flatten(1)]

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        half = out.shape[1] // 2
        index = codes[:, :half]
        if self.bits == 6:
            index, top = index.astype(np.uint16), codes[:, half:].astype(np.uint16)
            index[:, : half // 2] |= (top & 15) << 8
            index[:, half // 2 :] |= (top >> 4) << 8
        np.take(tables.pairs, index.astype(np.intp), out=out.numpy().view(np.uint64), mode="clip")


class Float8(LossyCodec):
    """float8 e4m3 of the state divided by a token scale: for comparison with other projects."""

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        scale = _ceil_bf16(source.abs().amax(-1) / 448)
        source /= torch.where(scale > 0, scale, 1.0)[:, None]
        return source.clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8), scale

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        if tables.levels is None:
            raise ValueError(f"{self.name} decodes with a level table")
        return tables.levels[codes.to(torch.int32)]

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        np.take(tables._levels, codes.astype(np.intp), out=out.numpy(), mode="clip")


def _scratch(rows: int, width: int) -> Tensor:
    """Return this thread's float32 [rows, width] buffer; its content is undefined.

    It is reused because page faults of new memory cost more than the arithmetic. It is kept as a
    numpy array because a tensor made in inference mode could not be written to later.
    """
    found = getattr(_BUFFERS, "work", None)
    if found is None or found.size < rows * width:
        found = _BUFFERS.work = np.empty(rows * width, np.float32)
    return torch.from_numpy(found[: rows * width]).view(rows, width)


def bf16_bits(values: Tensor) -> np.ndarray:
    """Return the bits of `values` (any shape) as bfloat16: uint16, on the CPU."""
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).cpu()
    return bits.numpy().view(np.uint16)


def bf16_tensor(bits: np.ndarray) -> Tensor:
    """Return a new bfloat16 tensor of the same shape from uint16 bits."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def _ceil_bf16(values: Tensor) -> Tensor:
    """Round `values` (float32, not negative) up to the next bfloat16; the result is float32."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0xFFFF) & ~0xFFFF).view(torch.float32)


_U8, _I8 = (np.dtype(np.uint8), pa.uint8()), (np.dtype(np.int8), pa.int8())
LOSSY: dict[str, LossyCodec] = {
    codec.name: codec
    for codec in (
        Int8("int8c", 8, *_I8, Bound(3e-4, 3e-3, 5e-3), "bf16"),
        LloydMax("lm6c", 6, *_U8, Bound(1.5e-3, 5e-2, 3e-2), "int8c", multiple=4),
        LloydMax("lm4c", 4, *_U8, Bound(2e-2, 0.25, 0.2), "lm6c", multiple=2),
        Float8("fp8", 8, *_U8, Bound(2e-3, 2e-2, 3e-2), "int8c", standardised=False),
    )
}


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
