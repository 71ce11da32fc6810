"""How documents of a dataset are reached from Python: as rows of a dataset of `datasets` are.

`ds[3]` is one document, a dict; `ds[0:3]` and `ds[[0, 5]]` are one dict with a list per column;
`len(ds)`, iteration, negative numbers and `column_names` work as they do there.
"""

import operator
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, SupportsIndex, overload

import torch

from spec_data.shards.schema import Column

TEXTS = ("doc_id", "source", "turns")


class DocumentAccess:
    """Base class of datasets: a subclass has a length and reads one document by its number."""

    path: Path
    _columns: dict[str, Column]

    def __len__(self) -> int:
        raise NotImplementedError

    def _document(self, index: int) -> dict[str, Any]:
        """Read document `index`; a negative one counts from the end."""
        raise NotImplementedError

    @property
    def num_rows(self) -> int:
        """Number of documents."""
        return len(self)

    @property
    def column_names(self) -> list[str]:
        """The keys of a document: `doc_id`, `source`, `turns` and the token columns."""
        return [*TEXTS, *self._columns]

    @property
    def features(self) -> dict[str, str]:
        """What a document holds by column: type, and shape in T tokens, as "bfloat16 [T, 4096]"."""
        found = {"doc_id": "string", "source": "string", "turns": "list of {role, start, end}"}
        for name, column in self._columns.items():
            kind = torch.bfloat16 if column.lossy else column.coder.logical
            shape = "[T]" if column.width is None else f"[T, {column.width}]"
            found[name] = f"{str(kind).removeprefix('torch.')} {shape}"
        return found

    def __repr__(self) -> str:
        names = ", ".join(self.column_names)
        return f"{type(self).__name__}({str(self.path)!r}, {len(self):,} documents: {names})"

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self._document(index) for index in range(len(self)))

    @overload
    def __getitem__(self, index: SupportsIndex) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int]) -> dict[str, list[Any]]: ...
    def __getitem__(self, index: Any) -> dict[str, Any]:
        """Return a document, or the documents of a slice or of a list of numbers.

        One document is a dict of fresh tensors (safe to modify), with `doc_id`, `source` and
        `turns`. Several are one dict with a list of these values per column.

        Raises:
            IndexError: no such document. TypeError: not a number, a slice or a list of numbers.
            DatasetError: damaged data.
        """
        if isinstance(index, str):
            raise TypeError(
                f"ds[{index!r}] would hold the column of all documents in memory; open the dataset "
                f"with columns=[{index!r}] and iterate, or take ds[0:100][{index!r}]"
            )
        if hasattr(index, "__index__") and not getattr(index, "ndim", 0):
            return self._document(operator.index(index))
        if isinstance(index, slice):
            chosen = list(range(len(self))[index])
        else:
            try:
                chosen = [operator.index(number) for number in index]
            except TypeError:
                raise TypeError(
                    f"ds[{index!r}]: a number, a slice or a list of numbers is expected"
                ) from None
        rows = [self._document(number) for number in chosen]
        return {name: [row[name] for row in rows] for name in self.column_names}
