"""Layouts with one table per sample, written by `torch.save`.

Those of SpecForge, Model-Optimizer and TorchSpec differ in the names of files and tensors alone.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.conversion.stored_samples import (
    Conventions,
    SampleStates,
    SampleTokens,
    TargetSizes,
    joined_states,
    sample_tokens,
)
from spec_data.conversion.torch_files import load_table
from spec_data.shards.errors import MissingError


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
