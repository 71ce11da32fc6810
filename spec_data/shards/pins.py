"""A dataset that the user names with its fingerprint: `DIR@FINGERPRINT`.

The fingerprint is the hash of the manifest, which has the SHA-256 of every other file. So a pin
tells the dataset that one trusts from another one under its name, also one that somebody has
changed and sealed again.
"""

import os
import re
from pathlib import Path

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.storage import scheme_of

LEAST_DIGITS, DIGITS = 16, 64
"""Digits of a fingerprint that a pin has at least, as commands print them, and at most."""
_PINNED = re.compile(r"(.+)@([0-9A-Fa-f]+)/?", re.DOTALL)


def split_pin(text: str | Path) -> tuple[str, str]:
    """Return the path or URL of a dataset, and the digits of its fingerprint; without: "".

    A path that exists as it is has no pin, whatever its name. hf:// has revisions behind an @, so
    there all digits of a fingerprint are one, and fewer are none.

    Raises:
        ConfigError: a pin of too few digits to mean one dataset, or too many.
    """
    text = str(text)
    match, scheme = _PINNED.fullmatch(text), scheme_of(text)
    if match is None or (scheme is None and os.path.lexists(Path(text).expanduser())):
        return text, ""
    where, digits = match[1], match[2].lower()
    if scheme is None and not Path(where).expanduser().is_dir():
        return text, ""  # who opens it says that it does not exist
    if scheme == "hf" and len(digits) != DIGITS:
        return text, ""
    check_digits(text, digits)
    return where, digits


def check_digits(text: str, digits: str) -> None:
    """Check the digits of a fingerprint, as they were given in `text`.

    Raises:
        ConfigError: there are too few or too many, or they are none.
    """
    if not re.fullmatch(rf"[0-9a-f]{{{LEAST_DIGITS},{DIGITS}}}", digits):
        raise ConfigError(
            f"{text}: expected {LEAST_DIGITS} to {DIGITS} hexadecimal digits of the fingerprint, "
            "as `spec-data inspect` prints it"
        )


def check_pin(where: str, fingerprint: str, digits: str) -> None:
    """Compare the fingerprint of the dataset at `where` with the digits of a pin.

    Raises:
        DatasetError: it is another dataset.
    """
    if not fingerprint.startswith(digits):
        raise DatasetError(
            f"{where}: its fingerprint is {fingerprint[: len(digits)]}, expected {digits}: another "
            "dataset, or one that was changed and sealed again. Get the expected one, or name this "
            "one's fingerprint if you trust it"
        )
