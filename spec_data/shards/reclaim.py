"""Delete units after their last use, for runs whose disk cannot hold the whole dataset.

`spec-train fit --follow --follow-keep N` writes .generate/follow-keep.json. From then on the
directory cannot be sealed, and `spec-data generate` stays at most N unused units ahead of training.
A unit is marked as used before its shard is deleted, so that it is never generated again. A process
killed between the two leaves a marked unit with a shard, which is harmless.
"""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.files import dump_json, unit_name, write_atomically
from spec_data.shards.follow import WORK, used_marker
from spec_data.shards.reader import MANIFEST

_POLL = 0.2  # seconds between two looks
_LOG_AGAIN = 60.0  # seconds between two log lines

logger = logging.getLogger(__name__)

FOLLOW_KEEP = "follow-keep.json"


def units_to_keep(directory: Path) -> int:
    """Return how many units --follow-keep keeps on disk; 0: units are kept for a dataset.

    Raises:
        DatasetError: follow-keep.json is damaged.
    """
    file = directory / WORK / FOLLOW_KEEP
    if not file.is_file():
        return 0
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["keep"])
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file}: damaged ({error}); delete it to keep all units") from None


@contextmanager
def seal_lock(work: Path) -> Iterator[None]:
    """Hold the lock that makes sealing and `allow_deletion` exclude each other."""
    with FileLock(work / "ring.lock"):
        yield


def allow_deletion(directory: Path, keep: int) -> None:
    """Mark an unsealed directory: its units may be deleted from now on, and `keep` are kept.

    Raises:
        ConfigError: the directory is a sealed dataset.
    """
    work = directory / WORK
    if (directory / MANIFEST).is_file():
        raise ConfigError(
            f"--follow-keep {keep}: {directory} is a sealed dataset, and units of a sealed "
            "dataset are never deleted; leave the flag out"
        )
    with seal_lock(work):
        if (directory / MANIFEST).is_file():  # sealed since the first check
            raise ConfigError(f"--follow-keep {keep}: {directory} is sealed; leave the flag out")
        write_atomically(work / FOLLOW_KEEP, dump_json({"keep": keep}))


def units_used(directory: Path) -> int:
    """Return how many units were used and deleted."""
    return sum(1 for _ in (directory / WORK).glob("unit-*.used"))


def delete_unit(directory: Path, unit: int) -> None:
    """Mark a unit as used and delete its shard; only allowed after `allow_deletion`.

    Raises:
        DatasetError: deletion was not allowed, or the directory is sealed.
    """
    if not units_to_keep(directory) or (directory / MANIFEST).is_file():
        raise DatasetError(
            f"{directory}: no --follow-keep run may delete units here; nothing was deleted"
        )
    marker = used_marker(directory, unit)
    if not marker.is_file():
        write_atomically(marker, "")
    (directory / f"shards/{unit_name(unit)}.arrow").unlink(missing_ok=True)


def room_for(out: Path, unit: int) -> bool:
    """Tell whether `unit` may be written now; always without --follow-keep."""
    keep = units_to_keep(out)
    return not keep or unit < units_used(out) + keep


def wait_for_room(out: Path, unit: int) -> None:
    """Return when `unit` may be written; at once without --follow-keep.

    The limit is on the unit's number, not on a count: the worker that generates the next unit
    never waits for workers that generated later ones (no deadlock).
    """
    logged = -_LOG_AGAIN
    while not room_for(out, unit):
        if time.monotonic() - logged > _LOG_AGAIN:
            logged = time.monotonic()
            logger.info(
                "%s: %d units wait for `spec-train fit --follow-keep`; generation continues when "
                "it has used one (delete %s/%s to keep all units instead)",
                *(out, units_to_keep(out), WORK, FOLLOW_KEEP),
            )
        time.sleep(_POLL)
