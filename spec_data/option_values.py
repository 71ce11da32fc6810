"""Values that several options share: sizes, bounds, and the headings of --help."""

import re

from spec_data.shards.errors import ConfigError

_SIZES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_size(text: str) -> int:
    """Bytes of a size such as 500MB, 2GB or 1000000.

    Raises:
        ConfigError: not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError(f"size {text!r}: expected something like 500MB or 2GB")
    return int(float(found[1]) * _SIZES[found[2].upper()])


def at_least(least: int, **values: int) -> None:
    """Refuse options below `least`, by name."""
    for name, value in values.items():
        if value < least:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {value}: expected {least} or more")


REQUIRED = "required"
CAPTURE = "what is captured"
DOCUMENTS = "documents"
RUNNING = "how the target runs"
SHARDS = "shards and workers"
CHECKS = "what is checked"
