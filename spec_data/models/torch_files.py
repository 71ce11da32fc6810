"""Read files of `torch.save` that may be a stranger's: tensors and plain values, no code.

`weights_only=True` runs no code of a file. But a file of some KB can still hold tensors of any
size: packed ones (a bomb), views of one number (a stride of 0), sparse ones, or storages that are
longer than what they were read from. All of these are refused before anything reads their values.
A call that `weights_only` lets through, such as that of `bytearray`, can ask for any memory too:
the process has a bound while it reads (Linux).
"""

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from spec_data.models.trial import MemoryBound
from spec_data.shards.errors import an

_DEEPEST = 100  # tables and lists in one another
_SPARE = 1 << 30  # bytes of memory to read a file, beside four times its own
_SHARED = 4  # times as many bytes as the file has: tensors that share a storage


class BadTensorsError(ValueError):
    """A file holds tensors that no trainer writes."""


def load_tensors(file: Path | io.BytesIO, mmap: bool = False) -> Any:
    """Return what a file of `torch.save` holds, on the CPU.

    Raises:
        BadTensorsError: it is packed, or holds tensors that are not plain and whole. Any other
            exception: it is damaged, or holds more than tensors and plain values.
    """
    size = _check_size(file)
    most = _SPARE + 4 * size
    try:
        with MemoryBound(most):
            value = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except MemoryError:
        raise BadTensorsError(f"reading it takes more than {most:,} bytes of memory") from None
    total = 0
    for name, tensor in _tensors("", value):
        if fault := _fault(tensor):
            raise BadTensorsError(f"{name or 'its tensor'} {fault}")
        total += tensor.nbytes
        if total > _SHARED * size or tensor.untyped_storage().nbytes() > size:
            raise BadTensorsError(f"its tensors have more bytes than the file, {size:,}")
    return value


def _check_size(file: Path | io.BytesIO) -> int:
    """Return the bytes of a file, of which a zip archive has no more and packs none."""
    if isinstance(file, Path):
        size = file.stat().st_size
    else:
        size = file.getbuffer().nbytes
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
        if packed or sum(entry.file_size for entry in entries) > size:
            raise BadTensorsError("it is packed, as torch.save never does; save it with torch.save")
    if isinstance(file, io.BytesIO):
        file.seek(0)
    return size


def _fault(tensor: Tensor) -> str:
    """Return why a tensor is not plain, or not all of it is in its storage; "": it is."""
    if type(tensor) not in (Tensor, Parameter) or tensor.is_nested:
        return f"is {an(type(tensor).__name__)} of its own form, not a plain tensor"
    if tensor.layout != torch.strided:
        return f"is sparse ({str(tensor.layout).removeprefix('torch.')}); save it dense"
    if tensor.is_quantized:
        return "is quantised by torch; save it dequantised"
    if tensor.is_meta:
        return "has no values (it is on the meta device)"
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        return (
            f"repeats numbers by its strides {list(tensor.stride())}: its shape "
            f"{list(tensor.shape)} has {tensor.nbytes:,} bytes, of which the file holds "
            f"{tensor.untyped_storage().nbytes():,}; save a contiguous copy"
        )
    return ""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in tables and lists, with their names."""
    waiting, seen = [(name, value, 0)], set[int]()
    while waiting:
        name, value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise BadTensorsError(f"it has more than {_DEEPEST} tables or lists in one another")
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, (dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}.{key}".lstrip("."), part, depth + 1) for key, part in items]
