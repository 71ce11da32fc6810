"""How many rows a corpus has, before it is read: exact where stored, estimated for JSON lines.

Only progress bars use it, so an estimate is enough, and anything unexpected is "not known".
"""

import gzip
from collections.abc import Sequence
from pathlib import Path

from spec_data.corpus.sources import Source

_SAMPLE = 8 << 20


def expected_rows(sources: Sequence[Source], limit: int | None = None) -> int | None:
    """Return about how many rows the sources have, at most `limit`; None where it is not known.

    A JSON-lines file is counted in its first 8 MiB and extrapolated by its size on disk.
    """
    counts = [_rows(source) for source in sources]
    known = [count for count in counts if count is not None]
    if limit is not None and sum(known) >= limit:
        return limit
    return sum(known) if len(known) == len(counts) else None


def _rows(source: Source) -> int | None:
    try:
        if source.count is not None:
            return source.count()
        return _lines(Path(source.path)) if source.kind == "jsonl" else None
    except Exception:  # of any library: reading the rows says what is wrong
        return None


def _lines(path: Path) -> int | None:
    """Lines of a file, plain or gzip, by the share of its bytes that a sample takes."""
    with path.open("rb") as raw:
        if path.suffix == ".gz":
            sample = gzip.GzipFile(fileobj=raw).read(_SAMPLE)
        else:
            sample = raw.read(_SAMPLE)
        read = raw.tell()
    lines = sum(1 for line in sample.splitlines() if line.strip())
    if len(sample) < _SAMPLE:
        return lines
    return round(lines * path.stat().st_size / read)
