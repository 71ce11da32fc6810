"""`spec-data copy`: write the documents of a dataset or a view to shards of their own.

    OUT/.view/begun.json        what is being written; anything else is refused
    OUT/.view/unit-00000.json   a finished shard: its record

It can be killed at any time: the same command goes on and ends with the same bytes, which depend on
the rows of the input alone. Every chunk is compared with its checksum before it is copied.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from msgspec import structs

from spec_data.shards.blobs import compress
from spec_data.shards.codecs import TABLES, Encoded, Tables, bf16_tensor, encode, save_tables
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import atomic_write, unit_name, write_atomically
from spec_data.shards.packing import cut_units
from spec_data.shards.pictures import refuse_images
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset, check_whole
from spec_data.shards.records import plain
from spec_data.shards.resumable import ResumableDirectory
from spec_data.shards.schema import (
    OLD_VERSION,
    CodecTables,
    Column,
    FileRecord,
    Manifest,
    ShardRecord,
)
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import UnitData, write_shard
from spec_data.terminal.progress import progress
from spec_data.views.derive import derived
from spec_data.views.rows import check_out

logger = logging.getLogger(__name__)

WORK = ".view"
_MOST_TOKENS = 1 << 20  # of a shard, where no source says how large its shards are


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What is written: all that decides the bytes.

    Attributes:
        dataset: the documents.
        columns: as they are stored in the copy.
        draft: its manifest without shards, totals and files.
        encoders: tables of columns that are encoded anew, by name.
        tables: of all lossy columns of the copy, by name.
        sample: what made the encoders: documents, tokens, held_out_tokens.
    """

    dataset: HiddenStatesDataset
    columns: tuple[Column, ...]
    draft: Manifest
    encoders: Mapping[str, Tables] = field(default_factory=dict)
    tables: Mapping[str, Tables] = field(default_factory=dict)
    sample: Mapping[str, int] = field(default_factory=dict)


def plain_copy(dataset: HiddenStatesDataset) -> Copy:
    """Return the copy that changes nothing but where the documents lie.

    A dataset has one table of a column, so what a view reads with several is stored in bf16.
    """
    manifest = dataset.manifest
    several = dataset.columns_of_several_tables()
    if several:
        logger.warning(
            "warning[codec]: %s will be stored in bf16, because the documents come from datasets "
            "that encode them differently; copy these one by one, and merge the copies",
            ", ".join(several),
        )
    columns = tuple(
        structs.replace(c, codec="bf16", quality=0.0) if c.name in several else c
        for c in manifest.columns
    )
    draft = derived("copy", {}, [manifest], columns, {})
    return Copy(dataset=dataset, columns=columns, draft=draft, tables=dict(dataset.tables))


def copy_bytes(copy: Copy) -> int:
    """Return the bytes of the values in the shards: about as many where columns are lossy."""
    dataset = copy.dataset
    sparse = int((dataset.supervised - (dataset.first_supervised == 0)).sum())
    tokens = int(dataset.lengths.sum())
    return int(sum(c.bytes_per_token * (sparse if c.sparse else tokens) for c in copy.columns))


def write_copy(out: Path, copy: Copy) -> Manifest:
    """Write a copy, or resume it; return its manifest, also if it is complete already.

    Raises:
        ConfigError: the directory holds another dataset, or another copy was begun there.
        MissingError, DatasetError: an input is damaged, or the complete copy is.
        RunError: the disk is too small, or another process writes.
    """
    check_out(out, [copy.dataset])
    refuse_images(copy.dataset.sources, "copy")
    work = ResumableDirectory(out, WORK)
    if not (out / MANIFEST).is_file():
        advice = "run that command again, or choose another directory"
        with work.begun(plain(copy.draft.provenance), advice):
            if not (out / MANIFEST).is_file():  # else another process has finished it since
                manifest = _write(work, copy)
                work.finish()
                return manifest
    manifest = Manifest.read(out / MANIFEST)
    if manifest.provenance != copy.draft.provenance:
        raise ConfigError(
            f"--out {out}: it holds another dataset, or one made with other options; choose "
            "another directory, or delete this one"
        )
    work.finish()  # killed after the manifest
    check_whole(out)
    return manifest


def _write(work: ResumableDirectory, copy: Copy) -> Manifest:
    """Write what is missing of a copy, and seal it."""
    out, draft = work.out, copy.draft
    (out / "shards").mkdir(exist_ok=True)
    records = _write_shards(work, copy)
    draft = draft.changed(files=_copy_target(out, copy.dataset))
    lossy = [column.name for column in copy.columns if column.lossy]
    if lossy:
        data = save_tables({name: copy.tables[name] for name in lossy})
        write_atomically(out / TABLES, data)
        digest = hashlib.sha256(data).hexdigest()
        draft = draft.changed(codec=CodecTables(file=TABLES, sha256=digest, **copy.sample))
    dataset = copy.dataset
    prompts = dataset.prompts if dataset.manifest.format_version != OLD_VERSION else None
    return seal(out, draft, records, prompts=prompts)


def _units(dataset: HiddenStatesDataset) -> dict[str, range]:
    """Return the documents of each shard by its name: as many tokens as shards have now."""
    records = [record for source in dataset.sources for record in source.manifest.shards]
    most = max((record.tokens for record in records), default=_MOST_TOKENS)
    units = cut_units(dataset.lengths, most)
    return {unit_name(number): range(*unit) for number, unit in enumerate(units)}


def _write_shards(work: ResumableDirectory, copy: Copy) -> list[ShardRecord]:
    """Write the shards that are missing, and return the records of all."""
    out, dataset, records = work.out, copy.dataset, dict[str, ShardRecord]()
    units = _units(dataset)
    for name in units:
        if (finished := work.load(name)) is not None:
            record = msgspec.convert(finished, ShardRecord)
            if (out / record.file).is_file():
                check_shard(out, record)
                records[name] = record
    left = sum(len(documents) for name, documents in units.items() if name not in records)
    needed, free = copy_bytes(copy) * left // max(1, len(dataset)), shutil.disk_usage(out).free
    if needed > free:
        raise RunError(
            f"{out}: about {needed:,} bytes are still to be written, but only {free:,} are free; "
            "free some space and run the same command again"
        )
    with progress(total=len(dataset), desc="documents", unit="docs") as bar:
        for name, documents in units.items():
            if name not in records:
                path = out / "shards" / f"{name}.arrow"
                data = _unit_of(copy, documents)
                records[name] = write_shard(path, data, copy.columns)
                work.save(name, plain(records[name]))
            bar.update(len(documents))
    return [records[name] for name in units]


def _unit_of(copy: Copy, documents: Sequence[int]) -> UnitData:
    """Return documents as a unit of the copy."""
    dataset, chosen = copy.dataset, pa.array(documents)
    masks = [dataset.mask_of(document) for document in documents]
    data = UnitData.allocate(
        copy.columns,
        dataset.id_array.take(chosen).to_pylist(),
        dataset.index.column("source").take(chosen).to_pylist(),
        [dataset.turns_of(document) for document in documents],
        [len(mask) for mask in masks],
        np.concatenate(masks),
    )
    for column in (column for column in copy.columns if column.name != "loss_mask"):
        bounds = data.row_offsets(column)
        for number, document in enumerate(documents):
            rows = dataset.stored_rows(document, column)
            if column.name in copy.encoders:
                states = bf16_tensor(rows.values)
                coded = encode(states, copy.encoders[column.name], column.codec)
            elif column.lossy:
                blob = compress(rows.values, column.codec)
                coded = Encoded(blob, rows.escape_index, rows.escape)
            else:
                data.tokens[column.name][bounds[number] : bounds[number + 1]] = rows.values
                continue
            data.coded[column.name][number] = coded
    return data


def _copy_target(out: Path, dataset: HiddenStatesDataset) -> dict[str, FileRecord]:
    """Copy the files of the target, and return their records."""
    names = [name for name in dataset.manifest.files if name.startswith("target/")]
    for name in names:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out / name) as temporary:
            shutil.copyfile(dataset.file(name), temporary)
    extra = {p for p in (out / "target").rglob("*") if p.is_file()} - {out / n for n in names}
    if extra:
        raise DatasetError(f"{min(extra)}: not a file of this copy; delete it and run again")
    return file_records(out, sorted(names))
