"""Seal a directory of finished shards as a dataset: index, card, `datasets` files, manifest.

The manifest is written last: a dataset is sealed when its manifest exists.
"""

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.shards.checksums import CHECKSUMS, arrow_schema, list_views, row_checksums
from spec_data.shards.dataset_card import CARD, dataset_card
from spec_data.shards.errors import DatasetError
from spec_data.shards.files import dump_json, sha256_file, write_atomically, xxh3_file
from spec_data.shards.index import INDEX_SCHEMA, index_column, with_prompt
from spec_data.shards.reader import INDEX, MANIFEST
from spec_data.shards.schema import (
    FORMAT_VERSION,
    OLD_VERSION,
    FileRecord,
    Manifest,
    ShardRecord,
    mask_counts,
    totals_of,
)


def seal(
    directory: Path,
    draft: Manifest,
    records: Sequence[ShardRecord],
    parts: Path | None = None,
    prompts: np.ndarray | None = None,
) -> Manifest:
    """Write everything except the shards, and return the manifest.

    `draft` is the manifest without what is counted here. A shard whose part of the index is in
    `parts` (see `index_part`) is not read. `prompts`, uint64 [N], are those of the documents, see
    `prompt_keys`; None: a dataset of format 1.0.

    Raises:
        DatasetError: a shard or target file is not the one its record describes.
    """
    manifest = draft.changed(
        where=str(directory / MANIFEST),
        shards=tuple(records),
        totals=totals_of(records),
        format_version=OLD_VERSION if prompts is None else FORMAT_VERSION,
    )
    write_atomically(directory / INDEX, index_content(directory, manifest, parts, prompts))
    others = [name for name in draft.files if not name.startswith("target/")]
    files = file_records(directory, [INDEX, *others, *target_file_names(directory)])
    if changed := [name for name, record in draft.files.items() if files.get(name) != record]:
        raise DatasetError(
            f"{directory / changed[0]}: changed since it was written; delete {directory} and "
            "generate again"
        )
    card = dataset_card(manifest)
    manifest = manifest.changed(files=files, card=hashlib.sha256(card.encode()).hexdigest())
    manifest = manifest.with_fingerprint()
    for name, text in datasets_files(manifest).items():
        write_atomically(directory / name, text)
    write_atomically(directory / CARD, card)
    write_atomically(directory / MANIFEST, dump_json(manifest.to_json()))
    return manifest


def datasets_files(manifest: Manifest) -> dict[str, str]:
    """Return the text of the files with which `datasets` opens the shards, by name."""
    state: dict[str, Any] = {
        "_data_files": [{"filename": r.file} for r in manifest.shards],
        "_fingerprint": manifest.fingerprint[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    return {"state.json": dump_json(state), "dataset_info.json": dump_json({})}


def target_file_names(directory: Path) -> list[str]:
    """List the files of `target/`, relative to the dataset, sorted, without leftover .tmp files."""
    files = (p for p in (directory / "target").rglob("*") if p.is_file())
    names = (str(p.relative_to(directory)) for p in files if not p.name.startswith("."))
    return sorted(names)


def file_records(directory: Path, names: Sequence[str]) -> dict[str, FileRecord]:
    """Return size and checksums of small files of a dataset, by name."""
    files = {name: directory / name for name in names}
    return {
        name: FileRecord(bytes=f.stat().st_size, sha256=sha256_file(f), xxh3=xxh3_file(f))
        for name, f in files.items()
    }


def check_shard(directory: Path, record: ShardRecord) -> None:
    """Compare a shard's size and checksum with its record.

    Raises:
        DatasetError: the shard is missing, truncated or changed.
    """
    file = directory / record.file
    if not file.is_file() or file.stat().st_size != record.bytes:
        raise DatasetError(
            f"{file}: missing or truncated; delete it and run the same command again"
        )
    if sha256_file(file) != record.sha256:
        raise DatasetError(
            f"{file}: its bytes are not those that were written; delete it and run the same "
            "command again"
        )


def index_part(shard: Path) -> bytes:
    """Return what the index says about the documents of a shard, as an Arrow stream."""
    return arrow_stream(_index_rows(pa.ipc.open_stream(pa.memory_map(str(shard)))))


def part_name(record: ShardRecord) -> str:
    """Return the name of the file with the part of the index that is about a shard."""
    return f"{Path(record.file).stem}.index"


def arrow_stream(batch: pa.RecordBatch) -> bytes:
    """Return a record batch as an Arrow stream."""
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue()


def index_content(
    directory: Path, manifest: Manifest, parts: Path | None, prompts: np.ndarray | None
) -> bytes:
    """Return index.arrow: one small row per document, in shard order, in one record batch.

    The arguments are those of `seal`.

    Raises:
        DatasetError: the columns of a shard are not those of the manifest.
    """
    tables = [INDEX_SCHEMA.empty_table()]
    for number, record in enumerate(manifest.shards):
        if parts and (part := parts / part_name(record)).is_file():
            (batch,) = pa.ipc.open_stream(part.read_bytes())
        else:
            stream = pa.ipc.open_stream(pa.memory_map(str(directory / record.file)))
            if not stream.schema.equals(arrow_schema(manifest.columns), check_metadata=True):
                raise DatasetError(
                    f"{directory / record.file}: its columns are not those of this dataset"
                )
            batch = _index_rows(stream)
        shard = pa.array(np.full(batch.num_rows, number, np.int32))
        rows = pa.Table.from_batches([batch]).append_column("shard", shard)
        tables.append(rows.select(INDEX_SCHEMA.names).cast(INDEX_SCHEMA))
    index = pa.concat_tables(tables)
    arrays, schema = [index_column(index, name) for name in INDEX_SCHEMA.names], INDEX_SCHEMA
    if prompts is not None:
        arrays, schema = [*arrays, pa.array(prompts, pa.uint64())], with_prompt(schema)
    batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
    return arrow_stream(batch)


def _index_rows(stream: pa.RecordBatchStreamReader) -> pa.RecordBatch:
    """Make the index rows of one shard from its own columns, but not its states."""
    small = stream.read_all().select(["doc_id", "source", "loss_mask", CHECKSUMS])
    (batch,) = small.combine_chunks().to_batches()
    offsets, mask = list_views(batch.column("loss_mask"))
    supervised, first = mask_counts(mask, offsets)
    numbers = {
        "row": np.arange(batch.num_rows),
        "tokens": np.diff(offsets),
        "supervised": supervised,
        "first_supervised": first,
    }
    return pa.RecordBatch.from_pydict(
        {
            "doc_id": batch.column("doc_id"),
            "source": batch.column("source"),
            **{name: pa.array(values.astype(np.int32)) for name, values in numbers.items()},
            "checksum": pa.array(row_checksums(batch)),
        }
    )
