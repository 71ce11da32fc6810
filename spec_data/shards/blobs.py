"""Codes of lossy columns as bytes: a blob per document, of which zstd frames are most.

Both lossy codecs have the same codes, -127 to 127. zstd spends at least a bit on a byte, so the
codec `packed`, which all new datasets have, puts several codes to a byte where they are small. The
codec `rotated`, of datasets written before, has one to a byte: such a dataset is still read, and
resumed, repaired and copied with the same bytes.

Shapes: N tokens of a document, H components.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import pyarrow as pa

PACKED, ROTATED = "packed", "rotated"
LOSSY = (PACKED, ROTATED)
LARGEST = 127
"""The largest code."""


def compress(codes: np.ndarray, codec: str = PACKED) -> np.ndarray:
    """Return codes int8 [N, H] as the bytes of a lossy codec, uint8; none of no tokens."""
    content = _LAYOUTS[codec][0](codes) if len(codes) else []
    return np.frombuffer(b"".join(content), np.uint8)


def decompress(blob: np.ndarray, tokens: int, width: int, codec: str = PACKED) -> np.ndarray:
    """Return the codes int8 [N, H] that `compress` made `blob` of.

    Raises:
        ValueError: the blob does not hold `tokens` tokens of `width` channels.
    """
    if not tokens and not len(blob):
        return np.zeros((0, width), np.int8)
    return _LAYOUTS[codec][1](blob, tokens, width)


@cache
def compressors() -> ThreadPoolExecutor:
    """Return threads for `compress` and `decompress`, which release the interpreter lock."""
    return ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="zstd")


os.register_at_fork(after_in_child=compressors.cache_clear)  # a child has none of the threads


# -- frames ----------------------------------------------------------------------------------------
# Bytes [N, m] are cut into zstd frames of some columns, token by token: similar variances share a
# table of zstd.

_COLUMNS = 128


def _cut(values: np.ndarray) -> Iterator[np.ndarray]:
    """Return the parts [N, 128 or less] of bytes [N, m]."""
    return (values[:, a : a + _COLUMNS] for a in range(0, values.shape[1], _COLUMNS))


def _frame(values: np.ndarray) -> bytes:
    """Return bytes as a frame, made as a stream.

    Of input that it knows to be small, zstd searches shorter matches, which cost more.
    """
    frame = pa.BufferOutputStream()
    with pa.CompressedOutputStream(frame, "zstd") as stream:
        stream.write(values.tobytes())
    return frame.getvalue().to_pybytes()


def _inflated(frames: np.ndarray, size: int) -> np.ndarray:
    """Return the `size` bytes that frames hold together, uint8."""
    if not size and not len(frames):
        return np.zeros(0, np.uint8)
    try:
        raw = pa.Codec("zstd").decompress(pa.py_buffer(frames), decompressed_size=size)
    except OSError as error:
        raise ValueError(str(error)) from None
    return np.frombuffer(raw, np.uint8)


def _laid_out(flat: np.ndarray, tokens: int, columns: int) -> np.ndarray:
    """Return bytes [N, columns] of the content of their frames, one after another."""
    values = np.empty((tokens, columns), np.uint8)
    for part in _cut(values):
        part[:] = flat[: part.size].reshape(part.shape)
        flat = flat[part.size :]
    return values


# -- packed ----------------------------------------------------------------------------------------
# A component has as many codes to a byte as its largest one in the document allows: a byte is a
# number whose digits are codes plus half the base. With m bytes a token, byte b holds components b,
# b + m, b + 2 m, ... of those with equally many: so digits are read and written as whole slices.

_BASES = {1: 2 * LARGEST + 1, 2: 15, 3: 5, 5: 3}
"""The base of the digits, by how many codes are in a byte."""
_TO_A_BYTE = np.array([0, 5, 3, *[2] * 5, *[1] * (LARGEST - 7)], np.uint8)
"""How many codes are in a byte, by the largest |code|; 0: all are zero, and none is stored."""


def _packed(codes: np.ndarray) -> Iterator[bytes]:
    to_a_byte = _TO_A_BYTE[np.abs(codes).max(0)]  # [H]
    head = _frame(to_a_byte)
    yield len(head).to_bytes(4, "little")
    yield head
    for digits, base in _BASES.items():
        chosen = codes.take(np.flatnonzero(to_a_byte == digits), axis=1)
        yield from map(_frame, _cut(_joined(chosen, digits, base)))


def _joined(codes: np.ndarray, digits: int, base: int) -> np.ndarray:
    """Return codes int8 [N, n] as bytes [N, m] of some digits each."""
    step = -(-codes.shape[1] // digits)
    joined = np.zeros((len(codes), step), np.uint8)
    for first in reversed(range(0, codes.shape[1], step or 1)):
        digit = codes[:, first : first + step].view(np.uint8) + np.uint8(base // 2)
        joined *= np.uint8(base)
        joined[:, : digit.shape[1]] += digit
    return joined


def _unpacked(blob: np.ndarray, tokens: int, width: int) -> np.ndarray:
    start = 4 + int.from_bytes(blob[:4], "little")
    to_a_byte = _inflated(blob[4:start], width)
    places = [np.flatnonzero(to_a_byte == digits) for digits in (*_BASES, 0)]
    steps = [-(-len(at) // digits) for at, digits in zip(places, _BASES, strict=False)]
    order = np.concatenate(places)  # component by place in `codes`
    if len(order) < width:
        raise ValueError("a component with another number of codes to a byte than 0, 1, 2, 3, 5")
    flat = _inflated(blob[start:], tokens * sum(steps))
    codes, first = np.zeros((tokens, width), np.uint8), 0
    for at, step, base in zip(places, steps, _BASES.values(), strict=False):
        joined, flat = _laid_out(flat, tokens, step), flat[tokens * step :]
        _split(joined, base, codes[:, first : first + len(at)])
        first += len(at)
    return codes.view(np.int8).take(order.argsort(), axis=1)


def _split(joined: np.ndarray, base: int, out: np.ndarray) -> None:
    """Undo `_joined` into `out` [N, n]: by divisions, which are twice as fast as tables."""
    step = joined.shape[1]
    for first in range(0, out.shape[1], step or 1):
        part = out[:, first : first + step]
        rest = joined // np.uint8(base)
        digit = joined - rest * np.uint8(base)
        np.subtract(digit[:, : part.shape[1]], np.uint8(base // 2), out=part)
        joined = rest


# -- rotated ---------------------------------------------------------------------------------------


def _grouped(codes: np.ndarray) -> Iterator[bytes]:
    return map(_frame, _cut(codes))


def _ungrouped(blob: np.ndarray, tokens: int, width: int) -> np.ndarray:
    return _laid_out(_inflated(blob, tokens * width), tokens, width).view(np.int8)


_LAYOUTS = {PACKED: (_packed, _unpacked), ROTATED: (_grouped, _ungrouped)}
