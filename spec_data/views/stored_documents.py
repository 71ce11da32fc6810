"""Copy documents of a dataset to the arrays of a unit: as they are, or with fewer columns or rows.

Every chunk is compared with its checksum before it is copied, so a damaged document is no part of a
view. Shapes: T tokens of a document, n of its tokens that a column stores, D documents.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from spec_data.shards.errors import DatasetError
from spec_data.shards.index import read_index
from spec_data.shards.lossy import Tables, bf16_tensor
from spec_data.shards.reader import INDEX, HiddenStatesDataset, mapped_file
from spec_data.shards.schema import Column, predicts_supervised
from spec_data.shards.shard import Place, Shard, StoredRows
from spec_data.shards.turn_masks import Turn, supervised_spans
from spec_data.shards.writer import Escapes, UnitData

MASK = "loss_mask"


@dataclass(frozen=True, kw_only=True)
class Change:
    """How the documents of a view differ from the stored ones.

    Attributes:
        columns: the token columns of the view.
        mask: the mask policy that is applied to the stored turns; None: the stored masks.
        tables: of the columns that are encoded, by name.
    """

    columns: tuple[Column, ...]
    mask: str | None = None
    tables: Mapping[str, Tables] = field(default_factory=dict)


class Stored(NamedTuple):
    """Where a document is stored."""

    shard: Shard
    place: Place

    @property
    def turns(self) -> list[Turn]:
        """Its turns: role, start and end."""
        found = self.shard.texts(self.place)["turns"]
        return [(turn["role"], turn["start"], turn["end"]) for turn in found]

    def mask(self, policy: str | None) -> np.ndarray:
        """Return its loss mask, bool [T]: the stored one, or that of a mask policy."""
        stored = self.shard.mask(self.place)
        if policy is None:
            return stored
        mask = np.zeros(len(stored), bool)
        for start, end in supervised_spans(len(mask), self.turns, policy):
            mask[start:end] = True
        return mask


class StoredDocuments:
    """The documents of a sealed dataset, by number."""

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        self.dataset = dataset
        self.manifest = dataset.manifest
        self.columns = {column.name: column for column in dataset.manifest.columns}
        rows = [record.rows for record in dataset.manifest.shards]
        self.bounds = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])
        """Shard s has the documents bounds[s] to bounds[s + 1], int64 [S + 1]."""

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def find(self, document: int) -> Stored:
        """Return where document `document` is stored.

        Raises:
            DatasetError: its shard is damaged.
        """
        number = int(np.searchsorted(self.bounds, document, "right")) - 1
        shard = self.dataset.shard(number)
        return Stored(shard, shard.place(document - int(self.bounds[number])))

    @cached_property
    def sources(self) -> pa.StringArray:
        """The source of each document, [D]."""
        path = self.dataset.path
        index = read_index(mapped_file(path, INDEX, self.manifest), self.manifest, path / INDEX)
        return index.column("source").combine_chunks()


def stored_tokens(column: Column, mask: np.ndarray) -> np.ndarray:
    """Return the tokens of a document that a column stores, int64 [n]; `mask` is bool [T]."""
    if not column.sparse:
        return np.arange(len(mask))
    return np.flatnonzero(predicts_supervised(mask, np.array([0, len(mask)])))


def document_id(input_ids: np.ndarray, mask: np.ndarray) -> str:
    """Return the id of a document, a hash of its tokens and its loss mask (FORMAT.md)."""
    parts = input_ids.astype(np.int32).tobytes(), mask.astype(np.uint8).tobytes()
    return hashlib.sha256(b"".join(parts)).hexdigest()[:32]


def unit_of(
    stored: StoredDocuments, documents: Sequence[int], change: Change, *, states: bool = True
) -> UnitData:
    """Return documents of a dataset as a unit of the view.

    Without `states` only the sizes are right: no state is read, and all values are zero.

    Raises:
        DatasetError: damage, or a column of the view stores a token that the dataset does not.
    """
    places = [stored.find(document) for document in documents]
    masks = [place.mask(change.mask) for place in places]
    texts = [place.shard.texts(place.place) for place in places]
    data = UnitData.allocate(
        change.columns,
        [text["doc_id"] for text in texts],
        [text["source"] for text in texts],
        [[(turn["role"], turn["start"], turn["end"]) for turn in text["turns"]] for text in texts],
        [len(mask) for mask in masks],
        np.concatenate(masks),
    )
    for column in change.columns:
        if column.name != MASK:
            _fill(data, column, stored.columns[column.name], places, masks, change, states)
    if change.mask is not None and states:
        bounds, ids = data.offsets, data.tokens["input_ids"]
        data.doc_ids = [
            document_id(ids[bounds[d] : bounds[d + 1]], mask) for d, mask in enumerate(masks)
        ]
    return data


def _fill(
    data: UnitData,
    column: Column,
    old: Column,
    places: Sequence[Stored],
    masks: Sequence[np.ndarray],
    change: Change,
    states: bool,
) -> None:
    """Fill one column of a unit from `old`, the column as it is stored."""
    bounds = data.row_offsets(column)
    escaped = [data.escapes[column.name]] if column.lossy else []
    for number, (place, mask) in enumerate(zip(places, masks, strict=True)):
        first, last = int(bounds[number]), int(bounds[number + 1])
        rows = _rows(column, old, place, mask)
        if states:
            found = _encoded(
                column, old, _taken(place.shard.stored(old, place.place), rows), change
            )
            data.tokens[column.name][first:last] = found.values
            if column.lossy:
                data.tokens[column.scale_part.name][first:last] = found.scale
        elif column.lossy and old.lossy:
            found = _escapes_alone(old, place, rows)
        if column.lossy and (states or old.lossy):
            escaped.append(Escapes(found.escape_index.astype(np.int64) + first, found.escape))
    if column.lossy:
        data.escapes[column.name] = Escapes(
            np.concatenate([part.rows for part in escaped]),
            np.concatenate([part.bits for part in escaped]),
        )


def _rows(column: Column, old: Column, place: Stored, mask: np.ndarray) -> np.ndarray | None:
    """Return which stored rows of a document the view keeps, int64 [n]; None: all."""
    before = place.shard.mask(place.place)
    if column.tokens == old.tokens and (not column.sparse or np.array_equal(before, mask)):
        return None
    known, wanted = stored_tokens(old, before), stored_tokens(column, mask)
    rows = np.searchsorted(known, wanted)
    inside = rows < len(known)
    if not inside.all() or not np.array_equal(known[rows], wanted):
        raise DatasetError(
            f"{place.shard.where(place.place.row)}, column {column.name}: the new mask needs "
            "tokens that are not stored; generate the dataset with --teacher all and --final all"
        )
    return rows


def _taken(stored: StoredRows, rows: np.ndarray | None) -> StoredRows:
    """Return some of the rows (ascending) of a document's column."""
    if rows is None:
        return stored
    _, here, there = np.intersect1d(
        rows, stored.escape_index, assume_unique=True, return_indices=True
    )
    return StoredRows(
        stored.values[rows], stored.scale[rows], here.astype(np.int32), stored.escape[there]
    )


def _encoded(column: Column, old: Column, stored: StoredRows, change: Change) -> StoredRows:
    """Return rows with the codec of the view: as they are, or encoded from bf16."""
    if column.codec == old.codec or column.lossy is None:
        return stored
    states = bf16_tensor(stored.values)  # [n, H]
    made = column.lossy.encode(states, change.tables[column.name])
    return StoredRows(made.codes, made.scale, made.escape_index.astype(np.int32), made.escape)


def _escapes_alone(old: Column, place: Stored, rows: np.ndarray | None) -> StoredRows:
    """Return a document's escaped tokens without their states, to know the size of a shard."""
    index = place.shard.values(old.escape_parts[0], place.place)
    if rows is not None:
        index = np.intersect1d(rows, index, assume_unique=True, return_indices=True)[1]
    none = np.zeros(0, np.uint16)
    return StoredRows(none, none, index, np.zeros((len(index), old.width or 1), np.uint16))
