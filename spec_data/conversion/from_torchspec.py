"""TorchSpec: `dataset.json`, `manifest.jsonl` and `samples/*.pt` of its offline dataset, version 1.

A table has `input_ids` [1, T], `hidden_states` [1, T, n * H], `last_hidden_states` [1, T, H] and
`packed_loss_mask`: lengths such as "2,3,2", of tokens that are alternately not supervised and
supervised. dataset.json says whether the last state is before the final norm. Layer ids are outputs
of blocks. They are not stored; without the option they are 1, L/2-1 and L-4.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from spec_data.conversion.stored_samples import (
    AFTER,
    BEFORE,
    OUTPUTS,
    Conventions,
    TargetSizes,
    chosen_layers,
)
from spec_data.conversion.table_layout import TableLayout, TableNames
from spec_data.corpus.bad_rows import BadRow
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.layer_ids import eagle3_layers

logger = logging.getLogger(__name__)

_NAMES = TableNames(aux="hidden_states", last="last_hidden_states")
_VERSION = 1


def open_torchspec(path: Path, given: Sequence[int] | None, sizes: TargetSizes) -> TableLayout:
    """Open a directory that TorchSpec wrote; see `layouts.open_layout`."""
    about = _json(path / "dataset.json")
    if not isinstance(about, dict) or about.get("version") != _VERSION:
        raise DatasetError(
            f"{path / 'dataset.json'}: not an offline dataset of TorchSpec, version {_VERSION}"
        )
    usual = eagle3_layers(sizes.blocks)
    layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, "TorchSpec")
    before = bool(about.get("last_hidden_states_prenorm"))
    conventions = Conventions(
        counting=OUTPUTS, stored_layers=layers, final_norm=BEFORE if before else AFTER
    )
    files = _files(path)
    return TableLayout("TorchSpec", path, files, _NAMES, conventions, sizes, _mask_of)


def _json(file: Path) -> Any:
    if not file.is_file():
        raise MissingError(f"{file}: missing, so this is not what TorchSpec stores")
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetError(f"{file}: not JSON: {error}") from None


def _files(root: Path) -> list[Path]:
    """Return the samples of the split "train", in the order of manifest.jsonl."""
    manifest = root / "manifest.jsonl"
    if not manifest.is_file():
        raise MissingError(f"{manifest}: missing; the dataset of TorchSpec has no sample")
    found, others = [], 0
    try:
        lines = manifest.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise DatasetError(f"{manifest}: not UTF-8: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            split, file = row["split"], root / row["file"]
            inside = root.resolve() in file.resolve().parents
        except (ValueError, KeyError, TypeError):
            raise DatasetError(f"{manifest}:{number}: not a row of TorchSpec") from None
        if not inside:
            raise DatasetError(f"{manifest}:{number}: {row['file']} lies outside {root}")
        if split == "train":
            found.append(file)
        else:
            others += 1
    if others:
        logger.warning("warning: %s: %d samples of other splits are left out", root, others)
    if not found:
        raise MissingError(f"{manifest}: no sample of the split 'train'")
    return found


def _mask_of(table: dict[str, Any], length: int) -> torch.Tensor | None:
    """Return the mask int64 [T] of a table; as TorchSpec reads it, cut or filled with zeros."""
    packed = table.get("packed_loss_mask")
    if packed is None:
        return None
    try:
        runs = [int(part) for part in str(packed).split(",")]
    except ValueError:
        raise BadRow(f"packed_loss_mask {str(packed)[:40]!r}: expected lengths") from None
    if min(runs) < 0:
        raise BadRow("packed_loss_mask has a negative length")
    lengths = torch.tensor([min(run, length) for run in runs])  # damaged ones may be huge
    mask = (torch.arange(len(runs)) % 2).repeat_interleave(lengths)[:length]
    return torch.cat([mask, torch.zeros(length - len(mask), dtype=torch.int64)])
