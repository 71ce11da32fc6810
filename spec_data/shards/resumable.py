"""Work that goes on where it was stopped, and never takes something half-written for complete."""

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_data.shards.errors import BusyError, ConfigError, DatasetError, FileError
from spec_data.shards.file_system import held_file, if_none_runs, lock
from spec_data.shards.files import (
    dump_json,
    is_temporary,
    read_object,
    sha256_json,
    temporary_files,
    write_atomically,
    writing,
)

CHECKSUM = "checksum"  # key of the SHA-256 of the other keys of a record
_SETTINGS = "begun"
PATIENCE = 0.5  # seconds; another process may hold a lock for an instant, to see whether it can


@contextlib.contextmanager
def process_lock(file: Path, busy: str) -> Iterator[None]:
    """Hold the lock `file`, which is released even if the process dies.

    BusyError, with the message `busy`: another process holds it for more than `PATIENCE`.
    """
    with contextlib.ExitStack() as held:
        try:
            with writing(file):
                held.enter_context(lock(file, PATIENCE))
        except TimeoutError:
            soft = held_file(file)
            raise BusyError(busy + (if_none_runs(soft) if soft.exists() else "")) from None
        yield


def differing_settings(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per field in which two tables of settings differ: `name: old -> new`.

    A field of a nested table is named with dots.
    """
    lines = []
    for name in sorted({*old, *new}):
        a, b = old.get(name, "(absent)"), new.get(name, "(absent)")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            lines += [f"{name}.{line}" for line in differing_settings(a, b)]
        elif a != b:
            lines.append(f"{name}: {a!r} -> {b!r}")
    return lines


def refuse_changes(
    changed: Sequence[str],
    where: object,
    advice: str = "Use the old settings, another --out, or delete it",
) -> None:
    """Raise ConfigError for what is at `where` if it was begun with other settings.

    `changed` are the lines of `differing_settings`; the message names them, and ends with `advice`.
    """
    if changed:
        raise ConfigError(
            f"{where} was begun with other settings, and data of both must not be mixed:\n  "
            + "\n  ".join(changed)
            + f"\n{advice}"
        )


def write_record(file: Path, record: Mapping[str, Any]) -> None:
    """Write a JSON object with its checksum, in one step."""
    plain = {name: value for name, value in record.items() if name != CHECKSUM}
    write_atomically(file, dump_json(plain | {CHECKSUM: sha256_json(plain)}))


def read_record(file: Path) -> dict[str, Any] | None:
    """Return what `write_record` wrote; None: there is no such file, or it was damaged."""
    try:
        record = read_object(file)
    except (OSError, DatasetError):
        return None
    return record if record.pop(CHECKSUM, None) == sha256_json(record) else None


class ResumableDirectory:
    """A directory that is written in parts, by one command with one set of settings.

    Its folder `work` holds the settings and a record of each finished part, and is deleted last.
    """

    def __init__(self, out: Path, work: str) -> None:
        """Use the folder named `work` in `out`; nothing is read or written."""
        self.out, self.work = out, out / work

    @contextlib.contextmanager
    def begun(self, settings: Mapping[str, Any], advice: str) -> Iterator[None]:
        """Begin with `settings`, or go on with the same, alone; remove half-written files.

        Raises:
            ConfigError: something else was begun here; `advice` says what to do.
            DatasetError: the directory holds files of something else.
            BusyError: another process writes here.
        """
        settings = json.loads(json.dumps(settings))  # tuples become lists, as in the file
        if (old := self.load(_SETTINGS)) is not None:
            refuse_changes(differing_settings(old, settings), self.out, advice)
        else:
            if self.out.exists() and not all(
                is_temporary(path) or path == self.work for path in self.out.iterdir()
            ):
                raise DatasetError(f"{self.out} is not empty; choose another (nothing was changed)")
            self.work.mkdir(parents=True, exist_ok=True)
            self.save(_SETTINGS, settings)
        busy = f"{self.out}: another process is writing here; wait for it"
        with contextlib.ExitStack() as held:
            try:
                held.enter_context(process_lock(self.work / "lock", busy))
            except FileError:
                if self.work.exists():
                    raise
                raise BusyError(
                    f"{self.out}: another process has just finished writing here; run the same "
                    "command again to see what there is"
                ) from None
            for file in temporary_files(self.out):
                file.unlink()
            yield

    def save(self, name: str, record: Mapping[str, Any]) -> None:
        """Record that the part `name` is finished."""
        write_record(self.work / f"{name}.json", record)

    def load(self, name: str) -> dict[str, Any] | None:
        """Return the record of a finished part; None: it is not finished, or the record damaged."""
        return read_record(self.work / f"{name}.json")

    def finish(self) -> None:
        """Delete the work folder, when everything else is complete."""
        shutil.rmtree(self.work, ignore_errors=True)
