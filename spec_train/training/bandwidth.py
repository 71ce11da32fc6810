"""Say how fast the data must come, where a run waited for them."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from spec_data.shards.schema import Manifest

log = logging.getLogger(__name__)

_TOLERATED = 0.02  # share of the time that a run may wait for data before anything is said
_FIRST = 1  # lines of metrics that are left out: the first steps wait for the first data


def bytes_per_token(manifest: Manifest, columns: Sequence[str]) -> int:
    """Return the stored bytes of a token in these columns, without escaped tokens."""
    return sum(c.bytes_per_token for c in manifest.columns if c.name in columns)


def log_bandwidth(
    lines: Sequence[Mapping[str, Any]], manifest: Manifest, columns: Sequence[str]
) -> None:
    """Log the bandwidth that training needs, if it waited for more than 2 % of the time.

    Args:
        lines: of metrics.jsonl about training; `data_wait` is a share of the time.
        columns: that the draft reads.
    """
    known = [line for line in lines[_FIRST:] if "data_wait" in line and "tokens_per_second" in line]
    if not known:
        return
    waited = sum(line["data_wait"] for line in known) / len(known)
    if waited <= _TOLERATED or waited >= 1:
        return
    speed = sum(line["tokens_per_second"] for line in known) / len(known) / (1 - waited)
    each = bytes_per_token(manifest, columns)
    log.info(
        "data       waited for %.1f %% of the time. Without waiting, this process would read %s: "
        "%s bytes per token at %s tokens/s",
        *(100 * waited, _rate(each * speed), f"{each:,}", f"{speed:,.0f}"),
    )


def _rate(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if value >= size:
            return f"{value / size:,.1f} {unit}/s"
    return f"{value / 1e3:,.1f} KB/s"
