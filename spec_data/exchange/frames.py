"""Tensors on their way between processes: the bytes of a safetensors file, read as they come.

No code can come with them. The head says names, dtypes and shapes, so what comes is compared with
what was asked for before its values are read, and these go straight into their tensors.
"""

import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
import torch
import xxhash
from torch import Tensor

assert sys.byteorder == "little", "safetensors are little-endian"

CHECKSUM_HEADER = "Spec-Checksum"
HEAD_BYTES = 1 << 16
"""Bytes of the largest head that is read."""
_TYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I32": torch.int32, "I64": torch.int64,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_PREFIX = 8  # bytes that say how long the head is

_Whole = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class Layout(NamedTuple):
    """What a tensor is, without its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"

    @property
    def bytes(self) -> int:
        """How many bytes its values take."""
        return math.prod(self.shape) * self.dtype.itemsize


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: Annotated[list[_Whole], msgspec.Meta(max_length=8)]
    data_offsets: tuple[_Whole, _Whole]


_HEAD = msgspec.json.Decoder(dict[str, _Entry])


class FrameError(ValueError):
    """Bytes that are no tensors, or not those that were asked for."""


def layout_of(tensor: Tensor) -> Layout:
    """Return the layout of a tensor."""
    return Layout(tensor.dtype, tuple(tensor.shape))


def encode(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """Return tensors as the parts of a body, which share the memory of those on the CPU."""
    head, parts, start = dict[str, _Entry](), list[memoryview](), 0
    for name, tensor in tensors.items():
        part = _bytes_of(tensor.detach().cpu().contiguous())
        span = (start, start + len(part))
        head[name] = _Entry(_NAMES[tensor.dtype], list(tensor.shape), span)
        parts.append(part)
        start += len(part)
    text = msgspec.json.encode(head)
    text += b" " * (-len(text) % 8)
    return [memoryview(len(text).to_bytes(_PREFIX, "little") + text), *parts]


def checksum(parts: Iterable[bytes | memoryview]) -> str:
    """Return the checksum of a body: it shows damage on the way, not who sent it."""
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def receive(
    read: Callable[[memoryview], None],
    size: int,
    check: Callable[[dict[str, Layout]], None],
) -> tuple[dict[str, Tensor], str]:
    """Read a body of `size` bytes; return its tensors, and its checksum.

    Args:
        read: fills the memory that it is given with the next bytes.
        check: raises for tensors that were not asked for; only then are values read.

    Raises:
        FrameError: bytes of another form; and what `read` and `check` raise.
    """
    digest = xxhash.xxh3_128()

    def next_bytes(view: memoryview) -> memoryview:
        read(view)
        digest.update(view)
        return view

    if size < _PREFIX:
        raise FrameError(f"{size} bytes are no tensors")
    length = int.from_bytes(next_bytes(memoryview(bytearray(_PREFIX))), "little")
    if length > min(HEAD_BYTES, size - _PREFIX):
        raise FrameError(f"a head of {length:,} bytes in a body of {size:,}")
    found = _layouts(bytes(next_bytes(memoryview(bytearray(length)))), size - _PREFIX - length)
    check(found)
    tensors = {}
    for name, layout in found.items():
        tensor = torch.empty(layout.shape, dtype=layout.dtype)
        view = _bytes_of(tensor)
        for start in range(0, len(view), 1 << 20):  # the checksum is of bytes still in the cache
            next_bytes(view[start : start + (1 << 20)])
        tensors[name] = tensor
    return tensors, digest.hexdigest()


def decode(
    body: bytes | memoryview, check: Callable[[dict[str, Layout]], None]
) -> dict[str, Tensor]:
    """Return the tensors of a whole body; see `receive`."""
    rest = memoryview(body)

    def read(view: memoryview) -> None:
        nonlocal rest
        view[:], rest = rest[: len(view)], rest[len(view) :]

    return receive(read, len(body), check)[0]


def _layouts(head: bytes, size: int) -> dict[str, Layout]:
    """Return the tensors that a head tells of, in the order of their values, which fill `size`."""
    try:
        entries = sorted(_HEAD.decode(head).items(), key=lambda pair: pair[1].data_offsets)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameError(f"a head that is not one of tensors ({error})") from None
    found, start = dict[str, Layout](), 0
    for name, entry in entries:
        if entry.dtype not in _TYPES:
            raise FrameError(f"{name!r} has dtype {entry.dtype!r}")
        found[name] = Layout(_TYPES[entry.dtype], tuple(entry.shape))
        first, last = entry.data_offsets
        if (first, last) != (start, start + found[name].bytes):
            raise FrameError(f"{name!r} ({found[name]}) at bytes {first} to {last}, not {start}")
        start = last
    if start != size:
        raise FrameError(f"{size:,} bytes of values, and the head tells of {start:,}")
    return found


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)
