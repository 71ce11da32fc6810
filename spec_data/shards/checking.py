"""Which chunks of a shard are compared with their checksums when they are read, and what was.

Every process starts with nothing checked, so a resumed run and every worker check again what they
read. No torch or numpy here: the command line reads the names of the policies.
"""

import random

from spec_data.shards.errors import ConfigError

FIRST, ALWAYS, SAMPLE, NEVER = "first", "always", "sample", "never"
CHECKS = (FIRST, ALWAYS, SAMPLE, NEVER)
CHECK_HELP = (
    "when data are compared with their checksums. first: before their first use in this process, "
    "and 1 read in 64 afterwards; always: at every read; sample: 1 read in 16; never: no read"
)
_AGAIN = {FIRST: 1 / 64, ALWAYS: 1.0, SAMPLE: 1 / 16, NEVER: 0.0}
"""Share of the reads that are checked although they need not be, by policy. These reads are drawn
at random, so that two processes do not leave out the same ones."""

_draw = random.Random().random  # not the global generator, whose state belongs to the caller


def known_policy(check: str) -> str:
    """Return `check` if it is one of CHECKS.

    Raises:
        ConfigError: it is not.
    """
    if check not in CHECKS:
        raise ConfigError(f"check = {check!r}: expected one of {', '.join(CHECKS)}")
    return check


class ChunkChecks:
    """Decides which reads of a shard's chunks are checked, and remembers what was: a byte each."""

    def __init__(self, policy: str, rows: int, fields: int) -> None:
        """Start with nothing checked."""
        self._first, self._again = policy == FIRST, _AGAIN[policy]
        self._fields = fields
        self._done = bytearray(rows * fields if self._first else 0)

    def due(self, row: int, field: int) -> bool:
        """Return whether this read of field number `field` of a row must be checked."""
        if self._first and not self._done[row * self._fields + field]:
            return True
        return _draw() < self._again

    def done(self, row: int, field: int) -> None:
        """Remember that a field of a row was checked and is whole."""
        if self._first:
            self._done[row * self._fields + field] = 1
