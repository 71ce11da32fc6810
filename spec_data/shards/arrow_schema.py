"""The Arrow schema of a shard: a field per text and per part of a token column, then checksums."""

from collections.abc import Sequence

import pyarrow as pa

from spec_data.shards.checksums import CHECKSUMS
from spec_data.shards.schema import UNCHECKED, WITH_SIDES, Column, Manifest, format_version
from spec_data.shards.sides import shard_columns

_TURNS = pa.list_(pa.struct([("role", pa.string()), ("start", pa.int32()), ("end", pa.int32())]))


def arrow_schema(columns: Sequence[Column], version: str | None = None) -> pa.Schema:
    """Return the Arrow schema of every shard of a dataset; `version` None: that of the columns."""
    version = version or format_version(columns)
    fields = [
        pa.field("doc_id", pa.string(), nullable=False),
        pa.field("source", pa.string(), nullable=False),
        *(field for column in columns for field in column.fields()),
        pa.field("turns", _TURNS, nullable=False),
    ]
    if version != UNCHECKED:
        kind = pa.list_(pa.field("item", pa.uint64(), nullable=False), len(fields))
        fields.append(pa.field(CHECKSUMS, kind, nullable=False))
    return pa.schema(fields, metadata={"spec-data": version})


def schema_of(manifest: Manifest) -> pa.Schema:
    """Return the schema of every shard of a dataset, in the version that they were written in."""
    version = manifest.raw["format_version"]
    return arrow_schema(shard_columns(manifest), None if version == WITH_SIDES else version)
