"""Which documents make a shard of a view, and how many bytes it has.

A shard of which every document is kept stays a shard of its own; if nothing in it changes either,
the view uses the same file. The documents that are left of other shards are joined, in order, to
shards of at most as many tokens as the largest shard of their dataset.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spec_data.shards.checksums import arrow_schema, schema_of
from spec_data.shards.schema import ShardRecord
from spec_data.shards.writer import shard_bytes
from spec_data.views.stored_documents import Change, StoredDocuments, unit_of


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a view takes of one dataset.

    Attributes:
        stored: the dataset.
        keep: which of its D documents, bool [D].
        change: how they change.
    """

    stored: StoredDocuments
    keep: np.ndarray
    change: Change

    @property
    def unchanged(self) -> bool:
        """Whether a shard of the dataset can be a shard of the view as it is."""
        own = schema_of(self.stored.manifest)
        same = own.equals(arrow_schema(self.change.columns), check_metadata=True)
        return same and self.change.mask is None and self.stored.dataset.mirror is None


@dataclass(frozen=True, kw_only=True)
class ViewUnit:
    """One shard of a view.

    Attributes:
        part: the number of the part that it is made of.
        documents: their numbers in the dataset, ascending, int64 [n].
        shard: the number of the shard that is used as it is; None: a new shard is written.
    """

    part: int
    documents: np.ndarray
    shard: int | None = None


def view_units(parts: Sequence[Part]) -> list[ViewUnit]:
    """Return the shards of a view, in order: those of the first part, then of the others."""
    return [unit for number, part in enumerate(parts) for unit in _units(number, part)]


def _units(number: int, part: Part) -> Iterator[ViewUnit]:
    bounds, lengths = part.stored.bounds, part.stored.dataset.lengths
    most = max((record.tokens for record in part.stored.manifest.shards), default=0)
    unchanged = part.unchanged
    waiting: list[int] = []
    tokens = 0
    for shard in range(len(bounds) - 1):
        first, last = int(bounds[shard]), int(bounds[shard + 1])
        kept = first + np.flatnonzero(part.keep[first:last])
        if len(kept) == last - first:
            if waiting:
                yield ViewUnit(part=number, documents=np.array(waiting, np.int64))
            waiting, tokens = [], 0
            yield ViewUnit(part=number, documents=kept, shard=shard if unchanged else None)
            continue
        for document in kept.tolist():
            if waiting and tokens + int(lengths[document]) > most:
                yield ViewUnit(part=number, documents=np.array(waiting, np.int64))
                waiting, tokens = [], 0
            waiting.append(document)
            tokens += int(lengths[document])
    if waiting:
        yield ViewUnit(part=number, documents=np.array(waiting, np.int64))


def reused(parts: Sequence[Part], unit: ViewUnit) -> ShardRecord | None:
    """Return the record of the shard that a unit uses as it is; None if one is written."""
    if unit.shard is None:
        return None
    return parts[unit.part].stored.manifest.shards[unit.shard]


def unit_bytes(parts: Sequence[Part], unit: ViewUnit) -> int:
    """Return the exact size of a unit's shard; tokens that newly escape a codec are not known."""
    record = reused(parts, unit)
    if record is not None:
        return record.bytes
    part = parts[unit.part]
    data = unit_of(part.stored, unit.documents.tolist(), part.change, states=False)
    return shard_bytes(data, part.change.columns)
