"""Open the files of one shard: the shard itself, and its file in each side of the dataset."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from spec_data.shards.arrow_schema import arrow_schema
from spec_data.shards.index import index_numbers, side_checksum
from spec_data.shards.mirror import Mirror
from spec_data.shards.ranged_shard import open_ranged
from spec_data.shards.schema import Manifest, ShardRecord
from spec_data.shards.shard import IndexRows, Shard
from spec_data.shards.sides import sides_of


def open_shard(
    place: Path | Mirror,
    manifest: Manifest,
    number: int,
    index: IndexRows,
    table: pa.Table,
    check: str,
) -> Shard:
    """Map shard `number` of a dataset, and its files in the sides, which it reads from.

    Args:
        place: the directory of the dataset, or the mirror of a remote one.
        manifest: of the dataset.
        number: of the shard.
        index: what the index says about its documents.
        table: the index, which has the checksums of the rows of each side.
        check: one of checking.CHECKS.

    Raises:
        DatasetError: a file is damaged, of another dataset, or another file under its name.
    """

    def opened(
        record: ShardRecord,
        rows: IndexRows,
        sides: Sequence[Shard] = (),
        expected: pa.Schema | None = None,
    ) -> Shard:
        if isinstance(place, Mirror):
            return open_ranged(place, manifest, record, rows, check, sides, expected)
        return Shard(place, manifest, record, rows, check, sides, expected)

    sides = [
        opened(
            side.shards[number],
            replace(index, checksums=index_numbers(table, side_checksum(count))),
            expected=arrow_schema(side.columns),
        )
        for count, side in enumerate(sides_of(manifest), 1)
    ]
    return opened(manifest.shards[number], index, sides)
