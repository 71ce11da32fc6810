"""Where a dataset is generated: a directory, or a folder on remote storage (--out s3://bucket/data).

On remote storage, units are written to a local directory (the stage) and uploaded. The remote
folder decides what is finished; a stage is empty when a command begins, so that any machine can
resume.

    .generate/blobs/SHA256     files of plan, proof and dataset, named by content
    .generate/begun.json       which blobs are the plan; the first worker to create it decides
    .generate/proven.json      which are the proof of the target, its files and the codec tables
    .generate/unit-00000.index what the index of the dataset says about the documents of a unit
    .generate/unit-00000.json  a finished unit, written after its shard and its part of the index
    .generate/also-*.json      as in a local directory
    shards/unit-00000.arrow    created once

An object is created only if it does not exist, which the storage decides: no lock is needed, and
workers that take the same units lose time, but never mix their bytes. The manifest is written last.
"""

import hashlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.plan import (
    ALSO,
    DOCUMENTS,
    PLAN,
    PROOF,
    WITNESS,
    Plan,
    load_plan,
    read_plan_record,
    read_units,
)
from spec_data.generation.setup import (
    Setup,
    changed_settings,
    find_plan,
    refuse_other_files,
)
from spec_data.generation.units import SHARDS, finalize, finished_unit, read_unit_record
from spec_data.generation.workers import running_workers
from spec_data.shards.codecs import TABLES
from spec_data.shards.dataset_card import CARD
from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.files import (
    MANIFEST,
    cache_directory,
    dump_json,
    replace_durably,
    sha256_file,
    temporary_name,
    unit_name,
)
from spec_data.shards.follow import PROMPTS, WORK
from spec_data.shards.path_kinds import Kind, what_is
from spec_data.shards.resumable import process_lock, refuse_changes
from spec_data.shards.schema import Manifest, ShardRecord
from spec_data.shards.seal import datasets_files, index_part, part_name, target_file_names
from spec_data.shards.storage import Storage, scheme_of
from spec_data.terminal.paths import check_directory_to_write
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)

BEGUN, PROVEN = "begun", "proven"
STAGED_UNITS = 3
"""Units on the local disk at once: one is captured, one waits, one is written and uploaded."""


class LocalOutput:
    """A directory in which a dataset is generated.

    Attributes:
        directory: where files are written. name: of the output, for messages.
        units_at_once: most units that are on the local disk at a time; 0: all.
    """

    remote = False
    units_at_once = 0

    def __init__(self, directory: Path) -> None:
        self.directory, self.name = directory, str(directory)

    def manifest(self) -> Manifest | None:
        """Return the manifest of the finished dataset; None: it is not finished."""
        file = self.directory / MANIFEST
        if not file.is_file():
            return None
        manifest, work = Manifest.read(file), self.directory / WORK
        if work.is_dir() and not running_workers(work):  # left by a kill after sealing
            shutil.rmtree(work, ignore_errors=True)
        return manifest

    def differs(self, name: str, manifest: Manifest, sha256: str) -> str:
        """Say why a file of a finished dataset is not what was sealed; nothing: it is."""
        file = self.directory / name
        if file.is_dir():
            return "a folder lies in its place"
        if not file.is_file():
            return "missing"
        if name == CARD:  # it may be edited; nothing reads it
            return ""
        sizes = {record.file: record.bytes for record in manifest.shards}
        if (size := file.stat().st_size) != sizes.get(name, size):
            return f"{size:,} bytes, sealed {sizes[name]:,}"
        return "" if sha256_file(file) == sha256 else "its bytes are not those that were sealed"

    def put(self, name: str, file: Path) -> None:
        """Give a file of the dataset, whose bytes are on the disk, its name."""
        final = self.directory / name
        if final.is_dir():
            raise RunError(f"{final}: a folder lies in the place of a file; move it away")
        final.parent.mkdir(parents=True, exist_ok=True)
        replace_durably(file, final)

    def fetch_file(self, name: str) -> Path:
        """Return where a file of the dataset lies on the local disk."""
        return self.directory / name

    def plan(self, corpus: CorpusReader, setup: Setup) -> Plan:
        """Return the plan of all workers; see `setup.find_plan`."""
        return find_plan(corpus, setup, self.directory)

    def share_proof(self) -> bool:
        """Return False if another worker's proof of the target has replaced the one here."""
        return True

    def upload(self, unit: int) -> None:
        """Bring a unit that is finished on the local disk to where it stays."""

    def finalize(self, checked: set[int], others: bool) -> Manifest | None:
        """Turn finished units into a dataset, see `units.finalize`."""
        return finalize(self.directory, checked, others)


@contextmanager
def open_output(out: str, worker: str) -> Iterator[LocalOutput]:
    """Open the directory or URL `out` for worker "i/n"; a URL with an empty stage.

    Raises:
        ConfigError: it cannot be written. RunError: the storage does not answer, or another process
            on this machine is this worker.
    """
    if not scheme_of(out):
        output = LocalOutput(Path(out))
        if what_is(out) is not Kind.DATASET:  # a finished dataset may be read-only
            check_directory_to_write("--out", out)
            if not (output.directory / WORK / PLAN).is_file():
                refuse_other_files(output.directory)
        yield output
        return
    remote = RemoteOutput(out, worker)
    stage = remote.directory
    stage.parent.mkdir(parents=True, exist_ok=True)
    busy = (
        f"{remote.name}: another process on this machine is running worker {worker}; wait for "
        "it, or start each process with its own --workers i/n"
    )
    with process_lock(stage.with_name(f"{stage.name}.lock"), busy):
        shutil.rmtree(stage, ignore_errors=True)  # what a killed process left
        stage.mkdir()
        try:
            if remote.manifest() is None:
                remote.pull()
            yield remote
        finally:
            shutil.rmtree(stage, ignore_errors=True)


class RemoteOutput(LocalOutput):
    """A remote folder in which a dataset is generated, and its stage in `directory`."""

    remote = True
    units_at_once = STAGED_UNITS

    def __init__(self, url: str, worker: str) -> None:
        """Make the client; nothing is read."""
        self.storage = Storage(url, "--out", write=True)
        self.name = self.storage.url
        scheme, _, rest = self.name.partition("://")
        folder = cache_directory("staging") / scheme / quote(rest, safe="/ ._-")
        self.directory = folder.with_name(f"{folder.name}@{worker.replace('/', '-of-')}")
        self._uploaded: set[str] = set()  # also-*.json
        self._sizes: dict[str, int] | None = None  # of a finished dataset

    # -- what is there ----------------------------------------------------------------------------

    def manifest(self) -> Manifest | None:
        """Return the manifest, after deleting what generation needed; None: not finished."""
        if self.storage.size(MANIFEST) is None:
            return None
        file = self.directory / MANIFEST
        self.storage.download(MANIFEST, file)
        manifest = Manifest.read(file)
        for name in self.storage.sizes(WORK):
            self.storage.delete(name)
        return manifest

    def pull(self) -> None:
        """Read plan, proof and finished units into the stage.

        Raises:
            DatasetError: the folder holds something else, or a file is damaged.
        """
        if self.fetch(BEGUN):
            self.fetch(PROVEN)
            self.pull_records()
            return
        folders, there = (f"{WORK}/", f"{SHARDS}/"), self.storage.sizes()
        if MANIFEST in there:  # another worker has just finished it
            return
        if others := sorted(n for n in there if not n.startswith(folders)):
            raise DatasetError(
                f"{self.name} holds files that are not of an unfinished dataset (first: "
                f"{others[0]}); choose another --out (nothing was changed)"
            )

    def pull_records(self, by_name: bool = False) -> list[int]:
        """Read the records of finished units, and of other settings, that are not in the stage.

        The stage then has a file of each shard's size, without its content. Return the units that
        are not finished. With `by_name`, records that a list lacks are asked for: it may be late.
        """
        listed = self.storage.sizes(WORK)
        for name in listed:
            if Path(name).match(f"{WORK}/{ALSO}") and not (self.directory / name).is_file():
                self.storage.download(name, self.directory / name)
        missing = []
        for unit in range(len(read_units(self.directory / WORK))):
            name = f"{WORK}/{unit_name(unit)}.json"
            if finished_unit(self.directory, unit) is None and (by_name or name in listed):
                self._pull_record(unit, name)
            if finished_unit(self.directory, unit) is None:
                missing.append(unit)
        return missing

    def _pull_record(self, unit: int, name: str) -> None:
        """Read a unit's record, if it is one and the storage has a shard of its size."""
        with suppress(FileNotFoundError):
            (self.directory / name).write_bytes(self.storage.read(name))
        finished = read_unit_record(self.directory, unit)
        if finished is None or finished.record.file != f"{SHARDS}/{unit_name(unit)}.arrow":
            return
        if self.storage.size(finished.record.file) == finished.record.bytes:
            self._write_placeholder(finished.record)

    def differs(self, name: str, manifest: Manifest, sha256: str) -> str:
        """As of a local directory, by the size alone: to read all of it takes as long as a copy."""
        sizes = {record.file: record.bytes for record in manifest.shards}
        sizes |= {name: record.bytes for name, record in manifest.files.items()}
        if (size := self._stored_sizes(manifest).get(name)) is None:
            return "missing"
        if size != sizes.get(name, size):
            return f"{size:,} bytes, sealed {sizes[name]:,}"
        return ""

    def _stored_sizes(self, manifest: Manifest) -> dict[str, int]:
        """Return the sizes of all files, listed once; the list may lack what was just written."""
        if self._sizes is None:
            self._sizes = self.storage.sizes()
            names = [*manifest.checksums(), *datasets_files(manifest), CARD]
            self._sizes |= self.storage.sizes_of([n for n in names if n not in self._sizes])
        return self._sizes

    def put(self, name: str, file: Path) -> None:
        """Replace an object."""
        self.storage.write(name, file)

    def fetch_file(self, name: str) -> Path:
        """Download an object into the stage."""
        if not (file := self.directory / name).is_file():
            self.storage.download(name, file)
        return file

    # -- what all workers share -------------------------------------------------------------------

    def publish(self, step: str, names: Sequence[str]) -> bool:
        """Publish files of the stage as those of a step, unless another worker was first.

        Return False if it was; its files then replace those in the stage.
        """
        table = {name: sha256_file(self.directory / name) for name in names}
        for name, digest in table.items():
            file, blob = self.directory / name, f"{WORK}/blobs/{digest}"
            if self.storage.size(blob) != file.stat().st_size:  # a worker that starts has gigabytes
                self.storage.write(blob, file)
        content = dump_json(table).encode()
        if self.storage.write(f"{WORK}/{step}.json", content, create=True):
            return True
        if self.storage.read(f"{WORK}/{step}.json") == content:
            return True  # created by a try whose answer was lost, or the same by another worker
        for name in names:
            (self.directory / name).unlink()
        self.fetch(step)
        return False

    def fetch(self, step: str) -> bool:
        """Read the files of a step into the stage; return whether the step was published."""
        where = f"{WORK}/{step}.json"
        try:
            table = msgspec.json.decode(self.storage.read(where), type=dict[str, str])
        except FileNotFoundError:
            return False
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DatasetError(
                f"{self.storage.where(where)}: damaged ({error}); delete the folder"
            ) from None
        for name, digest in table.items():
            file = self.directory / name
            if not file.resolve().is_relative_to(self.directory.resolve()):
                raise DatasetError(f"{self.storage.where(where)}: {name} is outside the folder")
            self.storage.download(f"{WORK}/blobs/{digest}", file)
            if sha256_file(file) != digest:
                raise DatasetError(
                    f"{self.storage.where(f'{WORK}/blobs/{digest}')} ({name}): damaged; delete the "
                    "folder and generate again"
                )
        return True

    def plan(self, corpus: CorpusReader, setup: Setup) -> Plan:
        """Return the plan of the storage, or make and publish one.

        Raises:
            ConfigError: the plan of the storage was made with other settings.
        """
        if not (self.directory / WORK / PLAN).is_file():
            plan = find_plan(corpus, setup, self.directory)
            if self.publish(BEGUN, [f"{WORK}/{n}" for n in (DOCUMENTS, PROMPTS, PLAN)]):
                return plan
            self.pull_records()
        record = read_plan_record(self.directory / WORK)
        assert record is not None
        refuse_changes(changed_settings(corpus, setup, record.settings), self.name)
        return load_plan(self.directory / WORK)

    def share_proof(self) -> bool:
        """Publish what was proven about the target, its files and the tables; see `publish`."""
        names = [f"{WORK}/{PROOF}", f"{WORK}/{WITNESS}", *target_file_names(self.directory)]
        if (self.directory / TABLES).is_file():
            names.append(TABLES)
        return self.publish(PROVEN, names)

    # -- units ------------------------------------------------------------------------------------

    def upload(self, unit: int) -> None:
        """Upload the shard of a unit that is finished in the stage, then its record; free the disk.

        Raises:
            RunError: another worker has written other bytes, or the storage does not answer.
        """
        for file in sorted((self.directory / WORK).glob(ALSO)):
            if file.name not in self._uploaded:
                self.storage.write(f"{WORK}/{file.name}", file, create=True)
                self._uploaded.add(file.name)
        finished = finished_unit(self.directory, unit)
        assert finished is not None
        record, name = finished.record, f"{WORK}/{unit_name(unit)}.json"
        shard = self.directory / record.file
        created = self.storage.write(record.file, shard, create=True)
        if not created and not self._is_stored(record):
            raise RunError(
                f"{self.storage.where(record.file)}: another worker, or a killed run on another "
                "kind of machine, has written other bytes for this unit. If no other worker is "
                "running, delete this object and run the same command again"
            )
        if record.rows:
            part, data = f"{WORK}/{part_name(record)}", index_part(shard)
            self.storage.write(part, hashlib.sha256(data).digest() + data)
            (self.directory / part).write_bytes(data)
        self.storage.write(name, (self.directory / name).read_bytes())
        shard.unlink()
        self._write_placeholder(record)

    def _is_stored(self, record: ShardRecord) -> bool:
        """Return whether the shard on the storage has the bytes of `record`."""
        if self.storage.size(record.file) != record.bytes:
            return False
        other = temporary_name(self.directory / record.file)
        try:
            self.storage.download(record.file, other)
            return sha256_file(other) == record.sha256
        finally:
            other.unlink(missing_ok=True)

    def _write_placeholder(self, record: ShardRecord) -> None:
        """Stand for a shard on the storage by a file of its size that takes no space."""
        shard = self.directory / record.file
        shard.parent.mkdir(exist_ok=True)
        with shard.open("wb") as file:
            file.truncate(record.bytes)

    # -- the end ----------------------------------------------------------------------------------

    def finalize(self, checked: set[int], others: bool) -> Manifest | None:
        """Finish the dataset if all units are finished; return None if other workers are not done.

        Raises:
            DatasetError: the storage lost something. RunError: it does not answer.
        """
        if manifest := self.manifest():
            return manifest
        missing = self.pull_records(by_name=True)
        if missing:
            logger.info(
                "%s: %d of %d units are left for other workers; the one that finishes last seals "
                "the dataset",
                *(self.name, len(missing), len(read_units(self.directory / WORK))),
            )
            return None
        self._finalize_stage()
        files = (p.relative_to(self.directory) for p in self.directory.rglob("*") if p.is_file())
        names = {str(p) for p in files if p.parts[0] not in (SHARDS, WORK)} - {MANIFEST}
        for name in progress([*sorted(names), MANIFEST], desc="upload", unit="files", leave=False):
            self.storage.write(name, self.directory / name)
        return self.manifest()

    def _finalize_stage(self) -> None:
        """Fetch what the index says about each shard, and finalize the stage."""
        units = range(len(read_units(self.directory / WORK)))
        for unit in progress(units, desc="index", unit="shards", leave=False):
            finished = finished_unit(self.directory, unit)
            assert finished is not None
            name = f"{WORK}/{part_name(finished.record)}"
            if not finished.record.rows or (self.directory / name).is_file():
                continue
            data = b""
            with suppress(FileNotFoundError):
                data = self.storage.read(name)
            if hashlib.sha256(data[32:]).digest() != data[:32]:
                raise DatasetError(
                    f"{self.storage.where(name)}: missing or damaged; delete "
                    f"{self.storage.where(finished.record.file)} and the .json of this unit, and "
                    "run the same command again"
                )
            (self.directory / name).write_bytes(data[32:])
        finalize(self.directory, checked=set(units))
