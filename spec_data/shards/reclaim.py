"""Units that somebody deletes once they are used: where the disk is short, and nowhere else.

`spec-train fit --follow --follow-keep N` says so in .generate/follow-keep.json. From then on the
directory never becomes a dataset: `spec-data generate` keeps at most N unused units ahead, and
nothing is sealed. A unit is marked as used before its shard is deleted, so that nobody makes it
again, and the mark and the shard can only disagree in the harmless way.
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

logger = logging.getLogger(__name__)

RING = "follow-keep.json"


def ring_size(directory: Path) -> int:
    """How many units are kept on disk for their only user; 0: this is to become a dataset."""
    file = directory / WORK / RING
    if not file.is_file():
        return 0
    try:
        return int(json.loads(file.read_text(encoding="utf-8"))["keep"])
    except (ValueError, KeyError, TypeError) as error:
        raise DatasetError(f"{file}: damaged ({error}); delete it to keep all units") from None


@contextmanager
def ring_lock(work: Path) -> Iterator[None]:
    """Sealing and giving units away exclude each other."""
    with FileLock(work / "ring.lock"):
        yield


def start_ring(directory: Path, keep: int) -> None:
    """Give the units of an unsealed directory away: from now on they may be deleted.

    Raises:
        ConfigError: the directory is a sealed dataset.
    """
    work = directory / WORK
    if (directory / MANIFEST).is_file():
        raise ConfigError(
            f"--follow-keep {keep}: {directory} is a sealed dataset, of which nothing is ever "
            "deleted; leave the flag out"
        )
    with ring_lock(work):
        if (directory / MANIFEST).is_file():  # just now
            raise ConfigError(f"--follow-keep {keep}: {directory} was sealed; leave the flag out")
        write_atomically(work / RING, dump_json({"keep": keep}))


def units_used(directory: Path) -> int:
    """Units that were used and deleted."""
    return sum(1 for _ in (directory / WORK).glob("unit-*.used"))


def delete_unit(directory: Path, unit: int) -> None:
    """Delete a used unit's shard; only after `start_ring`.

    Raises:
        DatasetError: the directory is not given away, or sealed.
    """
    if not ring_size(directory) or (directory / MANIFEST).is_file():
        raise DatasetError(f"{directory}: not given away with --follow-keep; nothing was deleted")
    marker = used_marker(directory, unit)
    if not marker.is_file():
        write_atomically(marker, "")
    (directory / f"shards/{unit_name(unit)}.arrow").unlink(missing_ok=True)


_POLL = 0.2  # seconds


_SAY_AGAIN = 60.0  # seconds


def wait_for_room(out: Path, unit: int) -> None:
    """Return when `unit` may be written; at once where units are not given away.

    That is a rule on its number, not on how many units there are: whoever makes the one that is
    needed next must never wait for those that made later ones.
    """
    said = -_SAY_AGAIN
    while (ring := ring_size(out)) and unit >= units_used(out) + ring:
        if time.monotonic() - said > _SAY_AGAIN:
            said = time.monotonic()
            logger.info(
                "%s: %d units wait for `spec-train fit --follow-keep`; going on when it has used "
                "one (delete %s/%s to keep all units instead)",
                *(out, ring, WORK, RING),
            )
        time.sleep(_POLL)
