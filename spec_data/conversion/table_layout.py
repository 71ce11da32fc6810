"""Layouts with one table per sample, written by `torch.save`.

Those of SpecForge, Model-Optimizer and TorchSpec differ in the names of files and tensors alone.
"""

import gzip
import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from spec_data.conversion.stored_samples import (
    AFTER,
    BEFORE,
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
from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.files import write_atomically
from spec_data.shards.layer_ids import eagle3_layers, from_block_inputs
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column

# -- torch files -----------------------------------------------------------------------------------
# Read what `torch.save` wrote, without running any code of it.
#
# Only `torch.load(weights_only=True)` is used, which builds tensors and plain values and refuses
# everything else. A file that it refuses is a bad row.


def load_table(file: Path) -> dict[str, Any]:
    """Return the table of tensors that a .pt, .ckpt or .ckpt.gz file holds, memory-mapped.

    A compressed file is decompressed in memory.

    Raises:
        BadRow: the file is missing, damaged, holds code, or holds no table.
    """
    try:
        if file.suffix == ".gz":
            with gzip.open(file, "rb") as packed:
                data = io.BytesIO(packed.read())
            found = torch.load(data, map_location="cpu", weights_only=True)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except MemoryError:
        raise
    except Exception as error:  # of many types: the one for refused contents is no torch class
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise BadRow(
            "the file is damaged, or it holds more than tensors and plain values, which could run "
            f"code when it is loaded ({reason})"
        ) from None
    if not isinstance(found, dict):
        raise BadRow(f"the file holds a {type(found).__name__}, not a table of tensors")
    return found


# -- table layout ----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TableNames:
    """The names of the tensors in a table: aux states [T, n * H], last state [T, H], mask [T]."""

    aux: str
    last: str
    mask: str = "loss_mask"
    ids: str = "input_ids"


class TableLayout:
    """A directory with one table per sample; see `stored_samples.Layout`."""

    def __init__(
        self,
        tool: str,
        root: Path,
        files: Sequence[Path],
        names: TableNames,
        conventions: Conventions,
        sizes: TargetSizes,
        mask_of: Callable[[dict[str, Any], int], Any] | None = None,
    ) -> None:
        """Describe a directory.

        Args:
            tool: the tool that wrote it.
            root, files: the directory, and its samples.
            names: of the tensors in each table.
            conventions: of the tool.
            sizes: of the target.
            mask_of: returns the mask of a table of T tokens; not given: the tensor of this name.
        """
        self.tool, self.root, self.conventions = tool, root, conventions
        self._files, self._names, self._sizes = list(files), names, sizes
        self._mask_of = mask_of or (lambda table, _length: table.get(names.mask))

    def __len__(self) -> int:
        return len(self._files)

    def where(self, number: int) -> str:
        """Return the file of a sample, below the directory."""
        return self._files[number].relative_to(self.root).as_posix()

    def files(self) -> Iterator[Path]:
        """Yield the files of the samples."""
        yield from self._files

    def tokens(self, number: int) -> SampleTokens:
        """Read ids and mask of a sample; the states are not read, but for their shapes."""
        table = load_table(self._files[number])
        found = sample_tokens(table.get(self._names.ids), None)
        mask = self._mask_of(table, len(found.ids))
        if mask is not None:
            found = sample_tokens(found.ids, mask)
        self._states(table, len(found.ids))
        return found

    def states(self, number: int) -> SampleStates:
        """Read the states of a sample."""
        table = load_table(self._files[number])
        tokens = sample_tokens(table.get(self._names.ids), None)
        return self._states(table, len(tokens.ids))

    def _states(self, table: dict[str, Any], tokens: int) -> SampleStates:
        layers, hidden = len(self.conventions.stored_layers), self._sizes.hidden_size
        aux, last = table.get(self._names.aux), table.get(self._names.last)
        return joined_states(aux, last, tokens, layers, hidden)


def files_in_order(root: Path, suffixes: Sequence[str], tool: str) -> list[Path]:
    """Return the files of a directory that end with one of `suffixes`; numbers count as numbers.

    Raises:
        MissingError: there is none.
    """
    found = [p for p in root.rglob("*") if p.name.endswith(tuple(suffixes)) and p.is_file()]
    if not found:
        raise MissingError(
            f"{root}: no file {' or '.join('*' + s for s in suffixes)}, so this is not what "
            f"{tool} stores"
        )
    return sorted(found, key=lambda file: _by_number(file.relative_to(root).as_posix()))


def _by_number(name: str) -> list[tuple[int, str]]:
    """Return a key under which data_2 comes before data_10."""
    parts = re.split(r"(\d+)", name)
    return [(int(p), "") if p.isdigit() else (-1, p) for p in parts]


# -- from specforge --------------------------------------------------------------------------------
# SpecForge: `rows_A-B/data_I.ckpt` or `.ckpt.gz`, written by scripts/prepare_hidden_states.py.
#
# A table has `input_ids` [T], `loss_mask` [T], `aux_hidden_state` [1, T, n * H] and `hidden_state`
# [1, T, H], which is the input of the LM head. Layer ids are those of SGLang's engine: outputs of
# blocks. They are not stored; without the option they are 1, L/2-1 and L-4.


NAMES = TableNames(aux="aux_hidden_state", last="hidden_state")


def open_specforge(path: Path, given: Sequence[int] | None, sizes: TargetSizes) -> TableLayout:
    """Open a directory that SpecForge wrote; see `layouts.open_layout`."""
    usual = eagle3_layers(sizes.blocks)
    layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, "SpecForge")
    conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
    files = files_in_order(path, (".ckpt", ".ckpt.gz"), "SpecForge")
    return TableLayout("SpecForge", path, files, NAMES, conventions, sizes)


# -- to specforge ----------------------------------------------------------------------------------
# Write a dataset as SpecForge reads it; see `from_specforge` for the layout.


_GROUP = 2000  # files of a folder


class SpecForgeWriter:
    """Writes documents as tables of tensors; see `write_out.DocumentWriter`."""

    def __init__(self, dataset: HiddenStatesDataset, layers: list[int], out: Path) -> None:
        """Prepare to write some layers of a dataset to `out`."""
        self._layers, self._out = layers, out
        self.columns = [*(layer_column(k) for k in layers), FINAL]
        self.states_per_token = len(self.columns)

    def file(self, number: int) -> Path:
        """Return the file of a document."""
        first = number // _GROUP * _GROUP
        return self._out / f"rows_{first}-{first + _GROUP}" / f"data_{number}.ckpt"

    def write(self, number: int, document: dict[str, Any]) -> None:
        """Write a document."""
        states = [document[layer_column(k)].bfloat16() for k in self._layers]
        table = {
            NAMES.ids: document["input_ids"].long(),
            NAMES.mask: document["loss_mask"].long(),
            NAMES.aux: torch.cat(states, -1)[None],  # [1, T, n * H]
            NAMES.last: document[FINAL].bfloat16()[None],  # [1, T, H]
        }
        data = io.BytesIO()
        torch.save(table, data)
        write_atomically(self.file(number), data.getvalue())

    def finish(self, dataset: HiddenStatesDataset, count: int) -> list[str]:
        """Return what to know about the directory."""
        ids = ",".join(map(str, self._layers))
        return [f"the layers are {ids} (outputs of blocks, as SGLang counts)"]


# -- from modelopt ---------------------------------------------------------------------------------
# NVIDIA Model-Optimizer: one `CONVERSATION.pt` per conversation, of compute_hidden_states_hf.py.
#
# A table has `input_ids` [T], `aux_hidden_states` [T, n * H] and `hidden_states` [T, H], the state
# after the final norm; `loss_mask` [T] only if the dump was made with --answer-only-loss. The ids
# of its --aux-layers are outputs of blocks. They are not stored; without the option they are the
# inputs of the blocks 2, L/2 and L-3.


_NAMES = TableNames(aux="aux_hidden_states", last="hidden_states")


def open_modelopt(path: Path, given: Sequence[int] | None, sizes: TargetSizes) -> TableLayout:
    """Open a directory that Model-Optimizer wrote; see `layouts.open_layout`."""
    inputs = sorted({2, max(0, sizes.blocks // 2), max(1, sizes.blocks - 3)})
    usual = from_block_inputs(inputs)
    layers = chosen_layers(given, usual, sizes.blocks, OUTPUTS, "Model-Optimizer")
    conventions = Conventions(counting=OUTPUTS, stored_layers=layers, final_norm=AFTER)
    files = files_in_order(path, (".pt",), "Model-Optimizer")
    return TableLayout("Model-Optimizer", path, files, _NAMES, conventions, sizes)


# -- from torchspec --------------------------------------------------------------------------------
# TorchSpec: `dataset.json`, `manifest.jsonl` and `samples/*.pt` of its offline dataset, version 1.
#
# A table has `input_ids` [1, T], `hidden_states` [1, T, n * H], `last_hidden_states` [1, T, H] and
# `packed_loss_mask`: lengths such as "2,3,2", of tokens that are alternately not supervised and
# supervised. dataset.json says whether the last state is before the final norm. Layer ids are
# outputs of blocks. They are not stored; without the option they are 1, L/2-1 and L-4.


logger = logging.getLogger(__name__)

_TORCHSPEC_NAMES = TableNames(aux="hidden_states", last="last_hidden_states")
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
    return TableLayout("TorchSpec", path, files, _TORCHSPEC_NAMES, conventions, sizes, _mask_of)


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
