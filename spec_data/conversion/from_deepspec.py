"""DeepSpec: `manifest.json`, `samples.idx` and raw `shard-*.bin` of its target cache, version 2.

A record of samples.idx has the sample, its shard, T, and the offsets of five arrays in that shard:
token ids (int32 [T]), attention mask and loss mask (uint8 [T]), aux states [T, n, H] and last state
[T, H], in bfloat16 or a plain cast to 8-bit floating point. `target_layer_ids` are outputs of
blocks, -1 the embedding; the last state is the one after the final norm.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.conversion.stored_samples import (
    AFTER,
    OUTPUTS,
    Conventions,
    SampleStates,
    SampleTokens,
    TargetSizes,
    chosen_layers,
    sample_tokens,
)
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import DatasetError, MissingError, TargetError

_VERSION = 2
_RECORD = np.dtype(
    [("sample", "<u8"), ("shard", "<u4"), ("length", "<u4")]
    + [(name, "<u8") for name in ("ids", "attention", "mask", "aux", "last")]
)
_DTYPES = {
    "bfloat16": (np.uint16, torch.bfloat16),
    "float8_e4m3fn": (np.uint8, torch.float8_e4m3fn),
    "float8_e5m2": (np.uint8, torch.float8_e5m2),
}
_FIXED = {"token_dtype": "int32", "mask_dtype": "uint8", "index_record_size": _RECORD.itemsize}


class DeepSpecCache:
    """A target cache of DeepSpec; see `stored_samples.Layout`."""

    tool = "DeepSpec"

    def __init__(self, root: Path, given: Sequence[int] | None, sizes: TargetSizes) -> None:
        """Open a directory.

        Raises:
            MissingError, DatasetError: it is no target cache of version 2, or files are missing.
            TargetError: the cache was made from a target of another size.
        """
        self.root = root
        about = _manifest(root / "manifest.json")
        if about["hidden_size"] != sizes.hidden_size:
            raise TargetError(
                f"{root}: states of width {about['hidden_size']}, but those of the target have "
                f"{sizes.hidden_size}; give the target that was captured"
            )
        usual = about["target_layer_ids"]
        layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, self.tool)
        if len(layers) != len(usual):
            raise DatasetError(f"{root}: {len(usual)} layers are stored, not {len(layers)}")
        self.conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
        self._hidden = sizes.hidden_size
        self._storage, self._dtype = _DTYPES[about["hidden_dtype"]]
        index = root / "samples.idx"
        if not index.is_file() or index.stat().st_size != about["num_samples"] * _RECORD.itemsize:
            raise DatasetError(f"{index}: missing, or not of {about['num_samples']} samples")
        self._index = np.fromfile(index, _RECORD)
        self._shards = [root / name for name in about["shards"]]
        missing = [file for file in self._shards if not file.is_file()]
        if missing:
            raise MissingError(f"{missing[0]}: missing; copy the cache again")

    def __len__(self) -> int:
        return len(self._index)

    def where(self, number: int) -> str:
        """Return the record of a sample."""
        return f"samples.idx record {number}"

    def files(self) -> Iterator[Path]:
        """Yield the index and the shards."""
        yield self.root / "samples.idx"
        yield from self._shards

    def tokens(self, number: int) -> SampleTokens:
        """Read ids and mask of a sample, and check that its states lie inside their shard."""
        length = self._length(number)
        self._array(number, "aux", length * len(self.conventions.layers) * self._hidden)
        self._array(number, "last", length * self._hidden)
        ids = self._array(number, "ids", length, np.dtype("<i4"))
        mask = self._array(number, "mask", length, np.dtype(np.uint8))
        return sample_tokens(torch.from_numpy(ids.copy()), torch.from_numpy(mask.copy()))

    def states(self, number: int) -> SampleStates:
        """Read the states of a sample."""
        length, layers = self._length(number), len(self.conventions.layers)
        aux = self._tensor(number, "aux", (length, layers, self._hidden))
        return SampleStates(aux=aux, last=self._tensor(number, "last", (length, self._hidden)))

    def _length(self, number: int) -> int:
        record = self._index[number]
        if record["sample"] != number or record["shard"] >= len(self._shards):
            raise BadRow(f"the record names sample {record['sample']}, shard {record['shard']}")
        if not record["length"]:
            raise BadRow("the record has no token")
        return int(record["length"])

    def _tensor(self, number: int, name: str, shape: tuple[int, ...]) -> Tensor:
        values = self._array(number, name, int(np.prod(shape))).copy()
        found = torch.from_numpy(values).view(self._dtype).view(shape)
        return found if self._dtype == torch.bfloat16 else found.bfloat16()

    def _array(
        self, number: int, name: str, count: int, dtype: np.dtype | None = None
    ) -> np.ndarray:
        """Map an array of a sample; states by default."""
        kind = dtype or np.dtype(self._storage).newbyteorder("<")
        record = self._index[number]
        file, offset = self._shards[int(record["shard"])], int(record[name])
        if offset + count * kind.itemsize > file.stat().st_size:
            raise BadRow(f"{name} ends beyond {file.name}: the shard is truncated, or the index")
        return np.memmap(file, kind, "r", offset, (count,))


def _manifest(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise MissingError(f"{file}: missing, so this is not what DeepSpec stores")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        wrong = {k: about[k] for k, v in _FIXED.items() if about[k] != v}
        version, dtype = about["version"], str(about["hidden_dtype"])
        found: dict[str, Any] = {k: int(about[k]) for k in ("num_samples", "hidden_size")}
        found["target_layer_ids"] = [int(k) for k in about["target_layer_ids"]]
        found["shards"] = [str(shard["file_name"]) for shard in about["shards"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file}: not the manifest of a target cache ({error!r})") from None
    if version != _VERSION or wrong or dtype not in _DTYPES:
        raise DatasetError(
            f"{file}: version {version} with hidden_dtype {dtype} {wrong or ''}: only version "
            f"{_VERSION} with {', '.join(_DTYPES)} is read"
        )
    return found | {"hidden_dtype": dtype}
