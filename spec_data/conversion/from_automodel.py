"""NVIDIA AutoModel: `manifest.json` and `shard-*.safetensors` of its DSpark cache, version 1.

A shard has samples padded to one length S: `input_ids` and `loss_mask` [B, S],
`target_hidden_states` [B, S, n * H] and `target_last_hidden_states` [B, S, H], after the final
norm. `target_layer_ids` are outputs of blocks. Lengths are not stored: padding is the last run of
one token id that is not supervised. What a tokenizer pads on the left stays, because the target
attended to it. The cache of its EAGLE-3 recipe holds probabilities over a draft vocabulary and no
final state: it cannot be converted.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from spec_data.conversion.stored_samples import (
    AFTER,
    OUTPUTS,
    Conventions,
    SampleStates,
    SampleTokens,
    TargetSizes,
    chosen_layers,
    joined_states,
    sample_tokens,
)
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import DatasetError, MissingError, TargetError

_VERSION = 1
_SHARD = re.compile(r"shard-(\d{6})\.safetensors")


class AutoModelCache:
    """A DSpark cache of AutoModel; see `stored_samples.Layout`."""

    tool = "AutoModel"

    def __init__(self, root: Path, given: Sequence[int] | None, sizes: TargetSizes) -> None:
        """Open a directory.

        Raises:
            MissingError, DatasetError: it is no DSpark cache of version 1, or shards are missing.
            TargetError: the last block is among the layers.
        """
        self.root, self._sizes = root, sizes
        about = _manifest(root / "manifest.json")
        usual = about["target_layer_ids"]
        layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, self.tool)
        if len(layers) != len(usual):
            raise DatasetError(f"{root}: {len(usual)} layers are stored, not {len(layers)}")
        if sizes.blocks - 1 in layers:
            raise TargetError(
                f"{root}: layer {sizes.blocks - 1} is the last block, whose state AutoModel stores "
                "after the final norm. That is no output of a block, so it cannot be converted; "
                "capture without this layer"
            )
        self.conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
        self._count, self._per_shard = about["num_samples"], about["shard_size"]
        found = sorted(p for p in root.iterdir() if _SHARD.fullmatch(p.name))
        self._shards = found
        expected = -(-self._count // self._per_shard)
        if [int(_SHARD.fullmatch(p.name)[1]) for p in found] != list(range(expected)):  # type: ignore[index]
            raise MissingError(f"{root}: expected {expected} shards from 0 on, found {len(found)}")

    def __len__(self) -> int:
        return self._count

    def where(self, number: int) -> str:
        """Return the shard of a sample, and its row."""
        return f"{self._shard(number).name} row {number % self._per_shard}"

    def files(self) -> Iterator[Path]:
        """Yield the shards."""
        yield from self._shards

    def tokens(self, number: int) -> SampleTokens:
        """Read ids and mask of a sample without its padding, and check the shapes of its states."""
        found = self._tokens(number)
        self._states(number, len(found.ids), header=True)
        return found

    def states(self, number: int) -> SampleStates:
        """Read the states of a sample without its padding."""
        return self._states(number, len(self._tokens(number).ids))

    def _tokens(self, number: int) -> SampleTokens:
        padded = sample_tokens(self._row(number, "input_ids"), self._row(number, "loss_mask"))
        kept = (padded.ids != padded.ids[-1]) | padded.mask.bool()  # type: ignore[union-attr]
        length = int(kept.nonzero().max()) + 1 if kept.any() else 0
        if not length:
            raise BadRow("it has nothing but padding")
        return SampleTokens(ids=padded.ids[:length], mask=padded.mask[:length])  # type: ignore[index]

    def _states(self, number: int, length: int, header: bool = False) -> SampleStates:
        names = ("target_hidden_states", "target_last_hidden_states")
        aux, end = (self._row(number, name, header)[:length] for name in names)
        layers = len(self.conventions.stored_layers)
        return joined_states(aux, end, length, layers, self._sizes.hidden_size)

    def _shard(self, number: int) -> Path:
        return self._shards[number // self._per_shard]

    def _row(self, number: int, name: str, header: bool = False) -> Tensor:
        """Return a row of a tensor; with `header` one without memory, of its shape."""
        at = number % self._per_shard
        try:
            with safe_open(self._shard(number), "pt") as file:
                part = file.get_slice(name)
                shape = part.get_shape()
                if not shape or at >= shape[0]:
                    raise BadRow(f"{name} has shape {shape}, and no row {at}")
                return torch.empty(shape[1:], device="meta") if header else part[at]
        except (SafetensorError, OSError) as error:
            raise BadRow(f"{name}: {error}") from None


def _manifest(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise MissingError(f"{file}: missing, so this is not what AutoModel stores")
    try:
        about = json.loads(file.read_text(encoding="utf-8"))
        if "target_probs_topk" in about:
            raise DatasetError(
                f"{file.parent}: this is the EAGLE-3 cache of AutoModel. It holds probabilities "
                "over a draft vocabulary instead of the final state, so no dataset can be made "
                "from it; capture with `spec-data generate`"
            )
        found: dict[str, Any] = {k: int(about[k]) for k in ("num_samples", "shard_size")}
        found["target_layer_ids"] = [int(k) for k in about["target_layer_ids"]]
        version, complete = about["format_version"], about.get("complete", True)
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, DatasetError):
            raise
        raise DatasetError(f"{file}: not the manifest of a DSpark cache ({error!r})") from None
    if version != _VERSION:
        raise DatasetError(f"{file}: format version {version} is not read")
    if complete is not True:
        raise DatasetError(
            f"{file}: marked as not complete: AutoModel was stopped, or is still writing. Run its "
            "precompute to the end first"
        )
    empty = [k for k, v in found.items() if not v or (isinstance(v, int) and v < 0)]
    if empty:
        raise DatasetError(f"{file}: {empty[0]} is {found[empty[0]]}, so there is nothing to read")
    return found
