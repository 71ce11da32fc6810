"""Which documents were added already, by digests of 16 bytes, in 16 bytes each.

A Python set needs 90 to 150 bytes per digest. Here digests stand in sorted runs of numpy, and runs
of similar length are merged, so there are few of them. A merge takes twice its bytes for a moment.
"""

from collections.abc import Sequence

import numpy as np

_DIGEST = np.dtype("S16")  # compared with all 16 bytes; zeros at the end do not matter


class Seen:
    """A growing set of digests of 16 bytes."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []  # each sorted, without repetitions, longest first

    def add(self, digests: Sequence[bytes]) -> list[bool]:
        """Add digests; return for each whether it is new, in order."""
        found = np.frombuffer(b"".join(digests), _DIGEST)
        known = np.zeros(len(found), bool)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, found), len(run) - 1)
            known |= run[at] == found
        first = np.zeros(len(found), bool)
        run, places = np.unique(found, return_index=True)
        first[places] = True
        new = first & ~known
        self._insert(run[new[places]])
        return new.tolist()

    def _insert(self, run: np.ndarray) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = np.sort(np.concatenate([self._runs.pop(), run]))
        self._runs.append(run)
