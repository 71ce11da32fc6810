"""Progress bars: rate and ETA on a terminal, a line every ten seconds in a log."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm import tqdm


def progress(iterable: Iterable | None = None, **options: Any) -> tqdm:
    """A tqdm bar on stderr with scaled units."""
    every = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(iterable, unit_scale=True, mininterval=every, **options)
