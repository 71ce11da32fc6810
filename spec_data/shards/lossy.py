"""Lossy codecs of hidden states: small codes on standardised channels, one scale per token.

Decoding is these IEEE float32 operations, each rounded by itself, in this order:

    v = levels[code]  (int8c: v = code);   v = v * scale;   v = v * std;   v = v + mean

then one rounding to bfloat16, ties to even; fp8 stops after the scale. Separate multiplications and
additions give the same bits in numpy, torch and CUDA, so long as nobody fuses them: no FMA, no
addcmul, no torch.compile. Tables alone would be exact too, but a scale per token (it took a sixth
to a third off the median error of real aux states, and up to 98 % off that of spiky channels) would
need one table per scale. Encoding is free to differ in the last place between devices: only codes
are stored.

Residual streams hold most of their energy in a few channels, so every channel is divided by its
own standard deviation first, and tokens far outside (massive activations) are kept in bf16.

A lossless bf16z (exponent bytes under zstd-1, one blob per document) was measured and left out: it
saves 31 % (11.0 bits; no entropy coder gets below 10.6), decodes 1.3 to 1.9 GB per CPU-second and
whole documents only, not on a device, and sizes are no longer known before the states are.

Shapes: N tokens, H channels, W code bytes of a token.
"""

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

ESCAPE_FACTOR = 8.0
"""Tokens beyond this many times the median RMS (standardised) are stored in bf16."""
_BLOCK = {"cpu": 1 << 17, "cuda": 1 << 26}  # elements in flight: a cache, or what keeps a GPU busy
_BUFFERS = threading.local()
_CONSTANT = 2.0**64  # inverse deviation of a constant channel: a token that differs escapes


@dataclass(frozen=True)
class Bound:
    """The worst believable error of a codec: channel-normalised MSE, and nats of the teacher."""

    median: float
    worst: float
    kl: float


@dataclass(frozen=True)
class Tables:
    """What decoding a column needs: mean, std float32 [H], levels float32 [L] (None: int8c).

    `std` is 0 for a channel that never changed; `limit` is the RMS beyond which a token escapes.
    """

    mean: Tensor
    std: Tensor
    limit: float
    levels: Tensor | None = None

    def to(self, device: torch.device | str) -> "Tables":
        """The same tables on a device."""
        if self.mean.device == torch.device(device):
            return self
        levels = None if self.levels is None else self.levels.to(device)
        return Tables(self.mean.to(device), self.std.to(device), self.limit, levels)

    @cached_property
    def inverse(self) -> Tensor:
        """1 / std, float32 [H]; huge for constant channels."""
        return torch.where(self.std > 0, 1.0 / self.std, _CONSTANT)

    @cached_property
    def nearest(self) -> Tensor:
        """Code of the level nearest to every bfloat16, by its 16 bits: uint8 [65536]."""
        levels = self._levels
        bits = np.arange(1 << 16, dtype=np.uint32) << 16
        borders = (levels[1:].astype(np.float64) + levels[:-1]) / 2
        codes = np.searchsorted(borders, np.nan_to_num(bits.view(np.float32)))
        return torch.from_numpy(codes.astype(np.uint8)).to(self.mean.device)

    @cached_property
    def pairs(self) -> np.ndarray:
        """Two levels side by side (as one uint64) for what two codes look like together.

        Indexed by a byte of two 4-bit codes, or by 12 bits: that byte, then two 2-bit tops.
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
    """Codes [N, W] and scale [N] (bits of bf16), and the tokens that escaped: rows, bits [n, H]."""

    codes: np.ndarray
    scale: np.ndarray
    escape_index: np.ndarray
    escape: np.ndarray


@dataclass(frozen=True)
class LossyCodec:
    """A codec of vectors. `bits` per channel; `multiple` divides every width it can pack."""

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
        """Stored values (of one byte) per token of `width` channels."""
        return width * self.bits // 8

    def encode(self, values: Tensor, tables: Tables) -> Encoded:
        """Codes of states [N, H], computed on their device, a block of tokens at a time."""
        tables = tables.to(values.device)
        step = max(1, _BLOCK.get(values.device.type, 1 << 20) // values.shape[1])
        blocks = [self._encode_block(part, tables) for part in values.detach().split(step)]
        codes = torch.cat([b[0] for b in blocks]) if blocks else torch.zeros(0, dtype=torch.uint8)
        codes = codes.reshape(len(values), self.code_width(values.shape[1]))
        scale = torch.cat([b[1] for b in blocks]) if blocks else torch.zeros(0)
        away = torch.cat([b[2] for b in blocks]) if blocks else torch.zeros(0, dtype=torch.bool)
        rows = away.nonzero().squeeze(1)
        return Encoded(
            codes.cpu().numpy().view(self.storage),
            bf16_bits(scale),
            rows.cpu().numpy(),
            bf16_bits(values.detach()[rows]),
        )

    def _encode_block(self, values: Tensor, tables: Tables) -> tuple[Tensor, Tensor, Tensor]:
        x = values.to(torch.float32, copy=True)
        z = (x - tables.mean).mul_(tables.inverse)
        rms = z.square().mean(-1).sqrt_()
        away = ~(rms <= tables.limit)
        source = (z if self.standardised else x).masked_fill_(away[:, None], 0.0)
        codes, scale = self._quantise(source, rms.masked_fill_(away, 0.0), tables)
        return codes, scale, away

    def decode(self, codes: Tensor, scale: Tensor, tables: Tables) -> Tensor:
        """States, bfloat16 [N, H], of codes [N, W] and scale [N] (bfloat16), on their device.

        Tokens that escaped are not among them: their bits are stored as they are.
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
        """`decode` of stored arrays into a CPU buffer [N, H] (bf16, or float32 of the same bf16).

        Works in blocks that stay in the cache; nothing of the size of the document is allocated.
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
        """Codes (one byte each) and scale (float32 that is a bf16) of a block."""
        raise NotImplementedError

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        """Levels float32 [N, H] of codes on any device."""
        raise NotImplementedError

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        """`_values` of stored codes into float32 [N, H] on the CPU."""
        raise NotImplementedError


class Int8(LossyCodec):
    """Whole steps of the largest |z| of a token over 127."""

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        scale = _ceil_bf16(source.abs().amax(-1) / 127)
        source /= torch.where(scale > 0, scale, 1.0)[:, None]
        return source.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8), scale

    def _values(self, codes: Tensor, tables: Tables) -> Tensor:
        return codes.view(torch.int8).to(torch.float32)

    def _values_into(self, codes: np.ndarray, tables: Tables, out: Tensor) -> None:
        own = torch.empty(codes.shape, dtype=torch.int8)  # torch warns of read-only memory
        np.copyto(own.numpy(), codes)
        out.copy_(own)


class LloydMax(LossyCodec):
    """Best levels for a Gaussian; a token is divided by its own RMS first."""

    def _quantise(self, source: Tensor, rms: Tensor, tables: Tables) -> tuple[Tensor, Tensor]:
        scale = rms.to(torch.bfloat16).to(torch.float32)
        source /= torch.where(scale > 0, scale, 1.0)[:, None]
        bits = source.to(torch.bfloat16).view(torch.int16).to(torch.int32) & 0xFFFF
        codes = tables.nearest[bits]
        low = codes & 15
        packed = low[:, 0::2] | low[:, 1::2] << 4
        if self.bits == 6:
            top = codes >> 4
            top = top[:, 0::2] | top[:, 1::2] << 2  # a nibble for each pair of channels
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
    """e4m3 of the state over a token scale: what others offer, kept for comparison."""

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
    """A float32 [rows, width] buffer of this thread, used again: fresh pages cost more than maths.

    Kept as an array: a tensor made in inference mode could not be written outside it.
    """
    found = getattr(_BUFFERS, "work", None)
    if found is None or found.size < rows * width:
        found = _BUFFERS.work = np.empty(rows * width, np.float32)
    return torch.from_numpy(found[: rows * width]).view(rows, width)


def bf16_bits(values: Tensor) -> np.ndarray:
    """The bits of `values` as bfloat16, uint16, on the CPU."""
    bits = values.to(torch.bfloat16).contiguous().view(torch.int16).cpu()
    return bits.numpy().view(np.uint16)


def bf16_tensor(bits: np.ndarray) -> Tensor:
    """A fresh bfloat16 tensor of bits."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(torch.bfloat16)


def _ceil_bf16(values: Tensor) -> Tensor:
    """The smallest bfloat16 that is no smaller, as float32; `values` are not negative."""
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
