"""From documents to a batch, whoever has put them together: one document a row, then padding.

`fit` packs several documents into a row instead (`data.stream`), to the same losses. B rows, T
slots of the longest document, H hidden size.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.batch import PLAIN, DraftBatch
from spec_data.shards.documents import Document, Origin
from spec_data.shards.errors import DatasetError
from spec_data.shards.packing import row_layout

OTHERS = ("logits", "topk_ids", "topk_logits", "target_probs", "target_mass")
"""Columns of a batch that are neither of `PLAIN` nor hidden states."""
_NEEDED = ("input_ids", "loss_mask", "target_argmax")
_DTYPES = {"input_ids": torch.int64, "loss_mask": torch.bool, "target_argmax": torch.int64}
_EXPECTED = (
    "expected documents: ds[i], a list of them, ds[0:4], or a dict of columns of tokens with "
    + ", ".join(_NEEDED)
)


def collate(
    documents: Any, columns: Iterable[str] | None = None, dtype: torch.dtype | None = None
) -> DraftBatch:
    """Make a batch of documents, one per row: what `DataLoader(ds, collate_fn=collate)` needs.

    Args:
        documents: a document `ds[i]` or another dict of its columns, a list of them, `ds[0:4]` (a
            dict with a list per column), what the default collate function of a DataLoader makes of
            documents (a dict with a tensor [B, T, ...] per column; `attention_mask` says which
            tokens are padding), or a batch, which is returned.
        columns: those to take besides the ids, the mask and the target's choice; None: all.
        dtype: of the hidden states; None: as they are.

    Raises:
        DatasetError: no documents, of several lengths in one document, of other columns, without
            one of `columns`, or of several targets.

    >>> ds = spec_data.open_dataset("data")
    >>> batch = spec_train.collate([ds[0], ds[3]])
    >>> batch.input_ids.shape == (2, max(ds.lengths[[0, 3]]))
    True
    """
    if isinstance(documents, DraftBatch):
        return documents
    rows = _rows(documents)
    names = list(dict.fromkeys((*_NEEDED, *(_columns_of(rows[0]) if columns is None else columns))))
    names = [name for name in names if name not in ("position_ids", "document_ids")]
    for row in rows:
        if missing := [name for name in names if name not in row]:
            raise DatasetError(
                f"the document has no {', '.join(missing)}; open the dataset with all columns"
            )
    lengths = [_length_of(row, names) for row in rows]
    document_ids, position_ids = row_layout([[length] for length in lengths], max(lengths))
    out = {name: _padded(name, [row[name] for row in rows], max(lengths), dtype) for name in names}
    plain: dict[str, Any] = {name: out.pop(name) for name in names if name in PLAIN}
    return DraftBatch(
        **plain,
        position_ids=position_ids,
        document_ids=document_ids,
        hidden=out,
        rows=_numbers(rows),
        origin=common_origin(rows),
    )


def origin_of(documents: Any) -> Origin | None:
    """Return where documents, in any form that `collate` takes, were read; None: unknown."""
    known = documents if isinstance(documents, list | tuple) else [documents]
    return common_origin([document for document in known if isinstance(document, Document)])


def supervision_of(documents: Any) -> str:
    """Return what the teacher of documents is made of, as a manifest has it."""
    if (origin := origin_of(documents)) is not None:
        return origin.supervision
    row = _rows(documents)[0]
    kinds = {"logits": "logits", "topk_ids": "topk:1"}
    return next((kind for name, kind in kinds.items() if name in row), "final-hidden")


def common_origin(documents: Sequence[Any]) -> Origin | None:
    """Return the origin of the first document that has one.

    Raises:
        DatasetError: documents of several targets: a batch has one head.
    """
    given = [getattr(document, "origin", None) for document in documents]
    known = {origin.head: origin for origin in reversed(given) if origin is not None}
    if len(known) > 1:
        places = " and ".join(sorted(origin.location for origin in known.values()))
        raise DatasetError(
            f"the documents of a batch are of several targets ({places}): no draft can learn from "
            "them together"
        )
    return next((origin for origin in given if origin is not None), None)


def _rows(documents: Any) -> list[Mapping[str, Any]]:
    """Return the documents one by one, with their columns of tokens."""
    if isinstance(documents, Mapping):
        return _rows_of_columns(documents)
    if isinstance(documents, str | bytes | Tensor) or not isinstance(documents, Iterable):
        raise DatasetError(f"{type(documents).__name__}: {_EXPECTED}")
    rows = list(documents)
    for row in rows:
        if not isinstance(row, Mapping) or "input_ids" not in row or _depth(row["input_ids"]) != 1:
            raise DatasetError(f"a list with {_shown(row)}: {_EXPECTED}")
    if not rows:
        raise DatasetError(f"no document; {_EXPECTED}")
    return rows


def _rows_of_columns(columns: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the documents of a dict of columns: those of one document, or of several."""
    if "input_ids" not in columns:
        raise DatasetError(f"{_shown(columns)}: {_EXPECTED}")
    depth = _depth(columns["input_ids"])
    if depth == 1:
        return [columns]
    count = len(columns["input_ids"])
    if depth != 2 or not count:
        raise DatasetError(f"input_ids of {count} documents in {depth} dimensions; {_EXPECTED}")
    if "document_ids" in columns:
        raise DatasetError(
            "columns with document_ids are packs, not documents: make a DraftBatch of them"
        )
    names = [*_columns_of(columns), *(n for n in ("attention_mask",) if n in columns)]
    for name in names:
        if len(columns[name]) != count:
            raise DatasetError(f"{name} has {len(columns[name])} rows, input_ids has {count}")
    origin = getattr(columns, "origin", None)
    numbers = [getattr(columns, "number", None)] if count == 1 else [None] * count
    return [
        Document({name: columns[name][i] for name in names}, origin, numbers[i])
        if "attention_mask" not in names
        else _without_padding({name: columns[name][i] for name in names}, origin)
        for i in range(count)
    ]


def _without_padding(row: dict[str, Any], origin: Origin | None) -> Document:
    """Return a document without the tokens of which its attention mask is 0."""
    mask = torch.as_tensor(row.pop("attention_mask")).bool()
    length = int(mask.sum())
    if not bool(mask[:length].all()):
        raise DatasetError(
            "attention_mask: padding on the left or inside a document; a batch is padded on the "
            "right"
        )
    return Document({name: values[:length] for name, values in row.items()}, origin)


def _columns_of(row: Mapping[str, Any]) -> list[str]:
    """Return the columns of tokens that a batch can have."""
    return [n for n in row if n in PLAIN or n in OTHERS or n.startswith("hidden.")]


def _depth(values: Any) -> int:
    """Return the dimensions of a tensor, an array, or lists of them."""
    if hasattr(values, "ndim"):
        return int(values.ndim)
    if isinstance(values, list | tuple):
        return 1 + (_depth(values[0]) if len(values) else 0)
    return 0


def _length_of(row: Mapping[str, Any], names: Sequence[str]) -> int:
    length = len(row["input_ids"])
    for name in names:
        if len(row[name]) != length:
            raise DatasetError(f"a document has {length} input_ids and {len(row[name])} of {name}")
    if not length:
        raise DatasetError("a document without a token")
    return length


def _padded(name: str, values: Sequence[Any], width: int, dtype: torch.dtype | None) -> Tensor:
    """Return a column of several documents as one tensor [B, T, ...], zero in padding."""
    tensors = [torch.as_tensor(value) for value in values]
    shapes = {tuple(tensor.shape[1:]) for tensor in tensors}
    if len(shapes) > 1:
        raise DatasetError(f"{name} has other widths in other documents: {sorted(shapes)}")
    kind = _DTYPES.get(name, tensors[0].dtype)
    if dtype is not None and name.startswith("hidden."):
        kind = dtype
    out = torch.zeros(len(tensors), width, *shapes.pop(), dtype=kind, device=tensors[0].device)
    for row, tensor in zip(out, tensors, strict=True):
        row[: len(tensor)] = tensor
    return out


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Return the number of every row's document in its dataset, or in the batch."""
    given = [getattr(row, "number", None) for row in rows]
    return [[i if number is None else number] for i, number in enumerate(given)]


def _shown(value: Any) -> str:
    """Return what somebody passed as a document, for a message."""
    if isinstance(value, Mapping):
        return f"a dict of {', '.join(map(str, value)) or 'nothing'}"
    return type(value).__name__
