"""Write the directory of a view, and seal it. It can be killed at any time, and run again.

    OUT/.view/view.json         what is being written; another view is refused
    OUT/.view/unit-00000.json   a finished shard: its record
    OUT/shards/unit-00000.arrow

A shard that does not change is linked (a hard link: both names are one file, which no command of
this project ever writes to), or copied where the file system has no hard links. The small files of
the target are copied. Sealing removes OUT/.view.
"""

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from filelock import FileLock, Timeout
from msgspec import structs

from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import (
    dump_json,
    replace_durably,
    sha256_json,
    temporary_files,
    temporary_name,
    unit_name,
    write_atomically,
    writing,
)
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST, VIEW_WORK, check_whole, checked_file
from spec_data.shards.records import plain
from spec_data.shards.schema import FileRecord, Manifest, ShardRecord
from spec_data.shards.seal import check_shard, file_records, seal
from spec_data.shards.writer import write_shard
from spec_data.terminal.paths import check_directory_to_write
from spec_data.terminal.progress import progress, size
from spec_data.views.stored_documents import StoredDocuments, unit_of
from spec_data.views.view_units import Part, ViewUnit, reused, unit_bytes

_BEGUN = "view.json"  # in VIEW_WORK
_HEAD = "target/head.safetensors"
_PATIENCE = 0.5  # seconds that another process may hold the lock


@dataclass(frozen=True, kw_only=True)
class View:
    """All that decides the bytes of a view.

    Attributes:
        parts: what is taken of each dataset; the files of the target are those of the first.
        units: its shards.
        draft: its manifest without shards, totals, files and fingerprint.
        tables: the bytes of codec.safetensors; None: the first dataset's, if a column is lossy.
    """

    parts: Sequence[Part]
    units: Sequence[ViewUnit]
    draft: dict[str, Any]
    tables: bytes | None = None

    @property
    def documents(self) -> int:
        """The number of its documents."""
        return sum(len(unit.documents) for unit in self.units)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        return sum(
            int(self.parts[unit.part].stored.dataset.lengths[unit.documents].sum())
            for unit in self.units
        )


@dataclass(frozen=True, kw_only=True)
class ViewSizes:
    """What a view needs on disk, in bytes, and of how much it is made.

    Attributes:
        documents, tokens, shards: of the view.
        bytes: of all shards.
        reused: shards that are used as they are; reused_bytes: theirs.
    """

    documents: int
    tokens: int
    shards: int
    bytes: int
    reused: int
    reused_bytes: int

    def __str__(self) -> str:
        """Return the lines that --dry-run prints."""
        written = self.bytes - self.reused_bytes
        return (
            f"documents      {self.documents:,}\n"
            f"tokens         {self.tokens:,}\n"
            f"shards         {self.shards:,}, {self.bytes:,} bytes ({size(self.bytes)})\n"
            f"  unchanged    {self.reused:,}, {self.reused_bytes:,} bytes: linked where the file "
            "system has hard links\n"
            f"  written      {self.shards - self.reused:,}, {written:,} bytes"
        )


def view_sizes(view: View) -> ViewSizes:
    """Compute what `write_view` writes; no state is read, and nothing is written.

    Raises:
        DatasetError: a dataset is damaged.
    """
    sizes, same = [], []
    for unit in progress(view.units, desc="sizes", unit="shards", leave=False):
        sizes.append(unit_bytes(view.parts, unit))
        same.append(unit.shard is not None)
    return ViewSizes(
        documents=view.documents,
        tokens=view.tokens,
        shards=len(sizes),
        bytes=sum(sizes),
        reused=sum(same),
        reused_bytes=sum(count for count, kept in zip(sizes, same, strict=True) if kept),
    )


def check_out(out: Path, inputs: Sequence[StoredDocuments]) -> None:
    """Check that a view can be written to `out`.

    Raises:
        ConfigError: it is read-only, one of the inputs or inside one, or holds other data.
    """
    check_directory_to_write("--out", out)
    for stored in inputs:
        own, other = out.resolve(), stored.dataset.path.resolve()
        if own.is_relative_to(other) or other.is_relative_to(own):
            raise ConfigError(
                f"--out {out}: it is, lies in, or contains the dataset {stored.dataset.path}; "
                "choose another directory"
            )
    began = (out / MANIFEST).is_file() or (out / VIEW_WORK).is_dir()
    if not began and any((out / name).exists() for name in (WORK, "shards")):
        raise ConfigError(
            f"--out {out}: it holds a dataset that is being generated; choose another directory"
        )


def write_view(out: Path, view: View) -> Manifest:
    """Write a view, or resume it; return its manifest, also if it is complete already.

    Raises:
        ConfigError: the directory holds another dataset or view.
        MissingError, DatasetError: an input is damaged, or the complete view is.
        RunError: the disk is full, or another process writes.
    """
    complete = _complete(out, view)
    if complete is not None:
        check_whole(out)
        return complete
    (out / VIEW_WORK).mkdir(parents=True, exist_ok=True)
    (out / "shards").mkdir(exist_ok=True)
    with view_lock(out / VIEW_WORK):
        complete = _complete(out, view)  # another process may have sealed it since
        if complete is not None:
            return complete
        begin_view(out, view)
        records = write_shards(out, view)
        draft = view.draft | {"files": copy_target(out, view.parts[0].stored)}
        _write_tables(out, view)
        manifest = seal(out, Manifest.of(draft), records)
    shutil.rmtree(out / VIEW_WORK, ignore_errors=True)
    return manifest


def _complete(out: Path, view: View) -> Manifest | None:
    """Return the manifest of the sealed view, None if there is none.

    Raises:
        ConfigError: the directory holds another dataset.
    """
    if not (out / MANIFEST).is_file():
        return None
    manifest = Manifest.read(out / MANIFEST)
    if plain(manifest.view) != view.draft["view"]:
        raise ConfigError(
            f"--out {out}: it holds another dataset, or a view made with other options; choose "
            "another directory, or delete this one"
        )
    if begun_view(out) == view.draft["view"]:  # killed after the manifest; not that of an append
        shutil.rmtree(out / VIEW_WORK, ignore_errors=True)
    return manifest


@contextmanager
def view_lock(work: Path) -> Iterator[None]:
    """Hold the lock of a directory that a view is written to; a process that dies releases it.

    Raises:
        RunError: another process holds it.
    """
    lock = FileLock(work / "lock")
    try:
        held = lock.acquire(timeout=_PATIENCE)
    except Timeout:
        raise RunError(
            f"{work.parent}: another process is writing here; wait for it, or stop it"
        ) from None
    with held:
        yield


def begun_view(out: Path) -> dict[str, Any] | None:
    """Return the manifest's `view` of what is being written to a directory; None: nothing is."""
    file = out / VIEW_WORK / _BEGUN
    if not file.is_file():
        return None
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["view"]
    return found


def begin_view(out: Path, view: View, first: int = 0) -> None:
    """Record what is being written, and remove what a killed run left half written.

    `first`: see `write_shards`.

    Raises:
        ConfigError: something else is being written. RunError: the disk is too small.
    """
    units = [[u.part, u.shard, u.documents.tolist()] for u in view.units]
    claim(out, {"view": view.draft["view"], "units": sha256_json(units)})
    _check_free_space(out, view, first)


def claim(out: Path, own: dict[str, Any]) -> None:
    """Record in a directory what is being written to it, `own`; remove what a killed run left.

    `own` has the manifest's `view`, and what else decides the bytes.

    Raises:
        ConfigError: something else is being written.
    """
    file = out / VIEW_WORK / _BEGUN
    if not file.is_file():
        write_atomically(file, dump_json(own))
    elif json.loads(file.read_text(encoding="utf-8")) != own:
        remedy = f"`spec-data gc {out} --yes`" if (out / MANIFEST).is_file() else "the directory"
        raise ConfigError(
            f"{out}: a view or an append with other options or inputs was begun here; "
            f"run that command again to finish it, or delete what it wrote: {remedy}"
        )
    for leftover in temporary_files(out):
        leftover.unlink()


def _check_free_space(out: Path, view: View, first: int) -> None:
    """Check that the shards that are still to be written fit on the disk.

    Raises:
        RunError: they do not.
    """
    wanted = [
        unit
        for number, unit in enumerate(view.units, first)
        if unit.shard is None and finished_record(out, unit_name(number)) is None
    ]
    free = shutil.disk_usage(out).free
    if sum(_about(view, unit) for unit in wanted) < free:
        return
    needed = sum(unit_bytes(view.parts, unit) for unit in wanted)
    if needed > free:
        raise RunError(
            f"{out}: {needed:,} bytes are still to be written, but only {free:,} are free; free "
            "some space and run the same command again"
        )


def _about(view: View, unit: ViewUnit) -> int:
    """Return about twice the bytes of a unit, without reading it."""
    part = view.parts[unit.part]
    tokens = int(part.stored.dataset.lengths[unit.documents].sum())
    return 2 * tokens * sum(column.bytes_per_token for column in part.change.columns)


def write_shards(out: Path, view: View, first: int = 0) -> list[ShardRecord]:
    """Write the shards that are missing, and return the records of all.

    `first` is the number of the first one in the names of files.
    """
    records = []
    with progress(total=view.documents, desc="documents", unit="docs") as bar:
        for number, unit in enumerate(view.units, first):
            record = finished_record(out, unit_name(number))
            if record is None:
                record = _write_unit(out, number, unit, view.parts)
                save_finished(out, unit_name(number), record)
            elif unit.shard is None:
                check_shard(out, record)
            records.append(record)
            bar.update(len(unit.documents))
    return records


def save_finished(out: Path, name: str, record: ShardRecord) -> None:
    """Record that a file with documents is finished; `name` is its name without an ending."""
    finished = structs.asdict(record)
    finished["checksum"] = sha256_json(finished)
    write_atomically(out / VIEW_WORK / f"{name}.json", dump_json(finished))


def finished_record(out: Path, name: str) -> ShardRecord | None:
    """Return the record of a file that an earlier run finished, None if it did not."""
    file = out / VIEW_WORK / f"{name}.json"
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
        checksum = raw.pop("checksum")
        record = msgspec.convert(raw, ShardRecord)
        shard = out / record.file
        whole = checksum == sha256_json(raw) and shard.stat().st_size == record.bytes
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return record if whole else None


def _write_unit(out: Path, number: int, unit: ViewUnit, parts: Sequence[Part]) -> ShardRecord:
    """Write, link or copy the shard of one unit."""
    part, path = parts[unit.part], out / "shards" / f"{unit_name(number)}.arrow"
    record = reused(parts, unit)
    if record is None:
        data = unit_of(part.stored, unit.documents.tolist(), part.change)
        return write_shard(path, data, part.change.columns)
    for document in unit.documents.tolist():  # all that the index is made of; no state is read
        stored = part.stored.find(document)
        _ = stored.turns, stored.mask(None)
    own = structs.replace(record, file=f"shards/{path.name}")
    source = part.stored.dataset.path / record.file
    link_or_copy(source, path)
    try:
        check_shard(out, own)
    except DatasetError:
        path.unlink()
        raise DatasetError(
            f"{source}: damaged: its bytes are not those of the manifest; copy this shard again "
            "(`spec-data verify` names the damage)"
        ) from None
    return own


def link_or_copy(source: Path, path: Path) -> None:
    """Give a file a second name by a hard link, or copy it where that is not possible.

    Raises:
        OSError: it cannot be copied either.
    """
    temporary = temporary_name(path)
    with writing(path, temporary):
        try:
            os.link(source, temporary)
        except OSError:  # another file system, or one without hard links
            with source.open("rb") as origin, temporary.open("wb") as copy:
                shutil.copyfileobj(origin, copy, 1 << 20)
                copy.flush()
                os.fsync(copy.fileno())
        replace_durably(temporary, path)
    temporary.unlink(missing_ok=True)  # renaming onto another name of the same file does nothing


def copy_target(out: Path, stored: StoredDocuments) -> dict[str, FileRecord]:
    """Copy the files of the target, and return their records."""
    names = [name for name in stored.manifest.files if name.startswith("target/")]
    for name in names:
        if stored.dataset.mirror is not None:
            stored.dataset.mirror.ensure(name)
        source = checked_file(stored.dataset.path, name, stored.manifest)
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        if name == _HEAD:
            link_or_copy(source, out / name)
        else:
            write_atomically(out / name, source.read_bytes())
    extra = {p for p in (out / "target").rglob("*") if p.is_file()} - {out / n for n in names}
    if extra:
        raise DatasetError(f"{min(extra)}: not a file of this view; delete it and run again")
    return file_records(out, sorted(names))


def _write_tables(out: Path, view: View) -> None:
    """Write codec.safetensors where a column is lossy."""
    if not view.draft.get("codec"):
        return
    stored = view.parts[0].stored
    _ = stored.dataset.tables  # reading them compares their hash with the manifest
    data = view.tables
    write_atomically(out / TABLES, data or (stored.dataset.path / TABLES).read_bytes())
