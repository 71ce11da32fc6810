"""Where cached files are. All of them can be deleted at any time."""

import os
from pathlib import Path

CACHE_VARIABLE = "SPEC_DATA_CACHE"
"""Environment variable that moves the cache directory."""


def cache_directory(kind: str) -> Path:
    """Return the directory of one kind of cached files; it may not exist.

    It lies in $SPEC_DATA_CACHE, else in spec-data below $XDG_CACHE_HOME or ~/.cache. All of it can
    be deleted at any time.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own) / kind
    shared = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(shared) / "spec-data" / kind
