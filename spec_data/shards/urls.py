"""Which URLs name a dataset on remote storage. No library is imported here: `--help` is instant.

`Path("s3://bucket/data")` is the path `s3:/bucket/data`, so one slash is accepted as well, unless
there is such a directory.
"""

import re
from pathlib import Path

from spec_data.shards.errors import ConfigError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")  # two letters at least: C:/ is a drive


SCHEMES = {"s3": "s3fs", "gs": "gcsfs", "hf": "huggingface_hub", "memory": "fsspec"}
"""Kinds of storage that are read, and what fsspec imports for each."""
_WRITABLE = ("s3", "memory")  # that gs creates objects once was not tried
_ADVICE = {"file": "write the local path without it", "gcs": "write gs://"}


def scheme_of(text: str | Path) -> str | None:
    """Return the scheme of a URL in lower case; None: the text is a local path."""
    found = _SCHEME.match(str(text))
    if not found or not (found[2] or not Path(f"{found[1]}:").is_dir()):
        return None
    return found[1].lower()


def check_dataset_url(flag: str, url: str | Path, write: bool = False) -> None:
    """Check that a URL names storage that this package can read (or write, with `write`).

    Raises:
        ConfigError: it does not; the message names the option `flag`.
    """
    scheme = scheme_of(url) or ""
    if scheme not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES if name != "memory")
        advice = _ADVICE.get(scheme, f"use one of {known}, or the local path of a mount")
        raise ConfigError(f"{flag} {url}: {scheme}:// is not supported; {advice}")
    if write and scheme not in _WRITABLE:
        raise ConfigError(
            f"{flag} {url}: {scheme}:// is read-only here; write to s3://, or to a local "
            "directory, and upload that"
        )
    rest = normal_url(url).partition("://")[2]
    checked = rest.partition("/")[0] if scheme == "hf" else rest  # the Hub has NAME@REVISION
    if any(mark in rest for mark in "?#") or "@" in checked or not rest.strip("/"):
        raise ConfigError(
            f"{flag} {url}: expected {scheme}://NAME/FOLDER, without user, password, query or "
            "fragment; credentials come from the library's own places (docs/remote.md)"
        )
    if any(part in (".", "..") for part in rest.split("/")):
        raise ConfigError(f"{flag} {url}: write it without . and ..")


def normal_url(url: str | Path) -> str:
    """Return a URL in one form: lower-case scheme, two slashes, none at the end."""
    scheme, _, rest = str(url).partition(":")
    return f"{scheme.lower()}://{rest.strip('/')}"
