"""Where cached files are. All of them can be deleted at any time."""

import os
from pathlib import Path

CACHE_VARIABLE = "SPEC_DATA_CACHE"
"""Environment variable that moves the cache directory."""


def cache_directory(kind: str) -> Path:
    """Return the directory of one kind of cached files; it may not exist.

    It lies in $SPEC_DATA_CACHE, else in spec-data below $HF_HOME, $XDG_CACHE_HOME or ~/.cache.
    """
    if own := os.environ.get(CACHE_VARIABLE):
        return Path(own).expanduser() / kind
    shared = os.environ.get("HF_HOME") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(shared).expanduser() / "spec-data" / kind
