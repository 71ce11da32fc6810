"""A dataset that is passed on: a trainer deletes the shards that it has used.

    .generate/pass-on.json    of `generate --pass-on`: most bytes of shards at a time, and of each
    .generate/passed.json     of `fit --follow`: which run it is, and how far

Unit u is captured as soon as the shards of all units up to u fit. So several workers need not ask
each other, and the shard that a trainer waits for is always among those that fit first.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from msgspec.structs import replace

from spec_data.shards.errors import ConfigError
from spec_data.shards.files import dump_json, unit_name, write_atomically, write_once
from spec_data.shards.records import Count, JsonRecord, as_record, plain, read_json

if TYPE_CHECKING:
    import numpy as np

PASS_ON, PASSED = "pass-on.json", "passed.json"
_ADVICE = "Generate again into another --out"


class Growing(Protocol):
    """A dataset that is still being generated: `FollowedDataset`, which says what each does.

    Attributes:
        units: where its units begin, int64 [U + 1].
        passed_on: whether shards that were trained on are deleted.
    """

    path: Path
    units: "np.ndarray"
    passed_on: bool

    def unit_of(self, index: int) -> int:
        """Return the unit of a document."""

    def ring(self) -> "Ring":
        """Return how many bytes of shards it may hold."""

    def pass_on(self, run: Path | None, kept: list[int], trained: int, needed: int) -> None:
        """Begin, or go on, to delete shards that `run` has used."""

    def pass_all_on(self, run: Path) -> None:
        """Delete the shards that a kill after the last checkpoint of `run` has left."""

    def forget(self, trained: int) -> None:
        """Close the units before `trained`."""

    def free(self, trained: int) -> None:
        """Delete the shards of the units before `trained`."""


class Ring(JsonRecord, frozen=True):
    """What the producer says: the most bytes of all shards, and those that each unit may take."""

    most: Count
    units: list[Count]

    @classmethod
    def read(cls, work: Path) -> "Ring":
        """Read it; MissingError, DatasetError: it is missing, or damaged."""
        return as_record(read_json(work / PASS_ON), cls, work / PASS_ON, _ADVICE)

    def write(self, work: Path) -> None:
        """Replace what was said before."""
        write_atomically(work / PASS_ON, dump_json(plain(self)))


class Passed(JsonRecord, frozen=True):
    """What the consumer says.

    Attributes:
        run: its run directory; empty: none has begun.
        kept: units with documents that every validation reads; they stay.
        trained: a durable checkpoint contains the units before this one.
        freed: their shards are deleted, but for the kept ones, up to this one.
        needed: bytes of shards that the run needs at a time.
    """

    run: str = ""
    kept: list[Count] = []
    trained: Count = 0
    freed: Count = 0
    needed: Count = 0

    @classmethod
    def read(cls, work: Path) -> "Passed":
        """Read it; DatasetError: it is damaged."""
        file = work / PASSED
        return as_record(read_json(file), cls, file, _ADVICE) if file.exists() else cls()

    def gone(self, unit: int) -> bool:
        """Return whether the shard of a unit is deleted, or about to be."""
        return unit < self.trained and unit not in self.kept


def shard_file(out: Path, unit: int) -> Path:
    """Return the path of the shard of a unit."""
    return out / "shards" / f"{unit_name(unit)}.arrow"


class Consumer:
    """The run that may delete the shards of a dataset."""

    def __init__(
        self, out: Path, work: Path, run: Path, kept: list[int], trained: int, needed: int
    ) -> None:
        """Take the shards of `out` for `run`, whose checkpoint contains the units before `trained`.

        The units `kept` stay; shards of `needed` bytes are needed at a time.

        Raises:
            ConfigError: another run has them, or shards that this one needs are deleted.
        """
        mine = Passed(run=str(run.resolve()), kept=kept, needed=needed)
        write_once(work / PASSED, dump_json(plain(mine)))
        self._out, self._work, self._passed = out, work, Passed.read(work)
        where, other = f"{out} passes its shards on to one run (--pass-on)", self._passed.run
        if other != mine.run:
            gone = "" if self._passed.trained else f"; if it is gone, delete {work / PASSED}"
            raise ConfigError(
                f"{where}, and {other} has begun with them: resume that one, or generate into "
                f"another --out{gone}"
            )
        if self._passed.trained > trained:
            raise ConfigError(
                f"{where}: units {trained} to {self._passed.trained - 1} were deleted after a "
                f"later checkpoint of {run} than the one that is there now. Restore that one, or "
                "generate into another --out"
            )
        if self._passed.kept != kept and self._passed.trained:
            raise ConfigError(
                f"{where}: {run} was begun with other documents of validation, and some of these "
                "are deleted. Give the options that it was begun with, or generate into another "
                "--out"
            )
        self.kept = kept
        self._note(kept=kept, needed=needed)
        self.free(trained)

    def free(self, trained: int) -> None:
        """Delete the shards of the units before `trained`; a durable checkpoint contains them."""
        first = self._passed.freed
        self._note(trained=trained)
        for unit in range(first, trained):
            if unit not in self.kept:
                shard_file(self._out, unit).unlink(missing_ok=True)
        self._note(freed=trained)

    def _note(self, **changes: int | list[int]) -> None:
        passed = replace(self._passed, **changes)
        if passed != self._passed:
            write_atomically(self._work / PASSED, dump_json(plain(passed)))
            self._passed = passed
