"""Where conversations come from: JSONL, JSON, Parquet and text files, directories, HF datasets.

`CorpusReader` yields one `Record` per good row, in a fixed order (sources as given, the files of a
directory sorted by path, rows as stored), and keeps one `SourceReport` per file or dataset, so that
rows == records + bad rows always holds. Files are streamed: memory holds one row (JSONL), one
element (a JSON list) or one row group (Parquet), never a file. Only a `.txt` file, which is one
document, is read whole. Formats are recognised row by row (`rows.py`); the report names the
majority and counts the others.

Bad rows. `on_bad_row="fail"` stops at the first. `"skip"` reports and counts each, and stops when
more than 1 % of a file's rows are bad: at the file's end, or as soon as more than 100 rows are bad.
The share alone counts: one bad row among fewer than 100 is more than 1 % and stops the run. A
tolerance of "one row in a small file" would let a corpus of many small files lose any part of
itself silently, and a small file is quickly mended.

What is wrong with a record may show only when it is rendered: `refuse` counts it, and where it is
broken (rather than without anything to learn) it is one of the 1 %.

A source is kept in the dataset under a name that tells nothing of this machine's directories, and
so are the examples of bad rows; messages name files as they were given.

Hashes are of the bytes on disk (compressed ones for .gz), taken in the same pass where the file is
read from end to end (JSONL, JSON, text); Parquet is read twice. `limit` stops the records, not
the hash, so a report identifies the file rather than the part that was used.
"""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal

from spec_data.corpus.documents import RenderError
from spec_data.corpus.records import BadRow, Record, parse_row
from spec_data.corpus.sources import Digest, Source, resolve
from spec_data.shards.errors import ConfigError, CorpusError

__all__ = ["CorpusReader", "Record", "SourceReport"]

logger = logging.getLogger(__name__)

_BAD_SHARE = 100  # one bad row in this many is tolerated
_BAD_EARLY = 100  # more bad rows than this are judged before the file's end
_EXAMPLES = 5


@dataclass(kw_only=True)
class SourceReport:
    """What was found in one file or dataset; complete once the reader has passed it."""

    source: str  # the name kept in the dataset
    path: str  # as it was given
    kind: str  # "jsonl", "json", "parquet", "text", "hf dataset directory", "hf dataset"
    format: str = "none"  # the format of most good rows
    formats: dict[str, int] = field(default_factory=dict)  # good rows by format
    rows: int = 0  # rows read, good and bad
    bad: int = 0
    unrendered: int = 0  # good rows that turned out broken when they were rendered
    bad_examples: list[str] = field(default_factory=list)  # "file:line: why" of the first few
    sha256: str | None = None  # of the bytes, or the fingerprint of a hub dataset
    licence: str | None = None

    def __str__(self) -> str:
        mixed = ", ".join(f"{n} {name}" for name, n in self.formats.items() if name != self.format)
        found = f"{self.format} (and {mixed})" if mixed else self.format
        return f"{self.path}: {self.kind}, {found}, {self.rows} rows, {self.bad} bad"


class CorpusReader:
    """Iterate over the records of several sources.

    Args:
        sources: files, directories, or hub dataset names (`name`, `name:config`, `name@split`).
        on_bad_row: "skip" (count, stop past 1 %) or "fail" (stop at the first).
        limit: stop after this many records over all sources; later sources are not opened.
        split: the split read from HF datasets, unless `@split` says otherwise. In a plain directory
            the files whose path names another split (`test-00000.parquet`) are left out, and said.

    Raises:
        MissingError, CorpusError, ConfigError: at once for sources that cannot be opened, while
            iterating for bad rows and broken files.
    """

    def __init__(
        self,
        sources: Sequence[str],
        on_bad_row: Literal["skip", "fail"] = "skip",
        limit: int | None = None,
        split: str = "train",
    ) -> None:
        if not sources:
            raise ConfigError("no corpus given: name a file, a directory or a dataset")
        if on_bad_row not in ("skip", "fail"):
            raise ConfigError(f"on_bad_row = {on_bad_row!r}: choose from skip, fail")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit = {limit}: expected at least 1")
        self.on_bad_row = on_bad_row
        self.limit = limit
        self.notes: list[str] = []  # files of directories that were left out, and why
        self.reports: list[SourceReport] = []
        self.refused: Counter[str] = Counter()  # records that gave no document, by reason
        self.refused_examples: dict[str, list[str]] = {}  # the first few of each reason
        self._sources = [s for name in sources for s in resolve(str(name), split, self.notes)]
        for note in self.notes:
            logger.warning("%s", note)

    def __iter__(self) -> Iterator[Record]:
        self.reports, self.refused, self.refused_examples = [], Counter(), {}
        left = self.limit
        for source in self._sources:
            report = SourceReport(
                source=source.name, path=source.path, kind=source.kind, licence=source.licence
            )
            self.reports.append(report)
            for record in self._read(source, report, left):
                yield record
                left = None if left is None else left - 1
            logger.info("%s", report)
            if left == 0:
                break
        if not any(report.formats for report in self.reports):
            raise CorpusError(f"no usable row in {', '.join(r.path for r in self.reports)}")

    def _read(self, source: Source, report: SourceReport, left: int | None) -> Iterator[Record]:
        digest = Digest()
        with closing(source.rows(digest)) as stream:  # open until the rest is hashed
            for where, row in stream:
                record = self._recognised(source, report, where, row)
                if record is None:
                    continue
                yield record
                if report.rows - report.bad == left:
                    break
            _judge(report)
            report.sha256 = digest.finish()

    def _recognised(
        self, source: Source, report: SourceReport, where: str, row: Any
    ) -> Record | None:
        """Count one row; its record, or None when it is bad."""
        report.rows += 1
        try:
            if isinstance(row, BadRow):
                raise row
            kind, record = parse_row(row, source=source.name, where=where, arrow=source.arrow)
        except BadRow as reason:
            report.bad += 1
            self._broken(report, f"{where}: {reason}")
            if report.bad <= _EXAMPLES:
                logger.warning("bad row skipped: %s: %s", where, reason)
            return None
        report.formats[kind] = report.formats.get(kind, 0) + 1
        report.format = max(report.formats, key=lambda name: report.formats[name])
        return record

    def refuse(self, error: RenderError) -> None:
        """Count the record yielded last as one that gives no document.

        Raises:
            CorpusError: the record is broken, and that is one too many.
        """
        report = self.reports[-1]
        self.refused[error.reason] += 1
        if error.broken:
            report.unrendered += 1
            self._broken(report, str(error))
        if self.refused[error.reason] <= _EXAMPLES:
            examples = self.refused_examples.setdefault(error.reason, [])
            examples.append(_portable(report, str(error)))
            level = logging.WARNING if error.broken else logging.INFO
            logger.log(level, "row left out (%s): %s", error.reason, error)

    def _broken(self, report: SourceReport, message: str) -> None:
        """Keep an example of a row that cannot be used; raise when it is one too many."""
        if self.on_bad_row == "fail":
            raise CorpusError(f"{message}\nfix the row, or skip bad rows with --on-bad-row skip")
        if len(report.bad_examples) < _EXAMPLES:
            report.bad_examples.append(_portable(report, message))
        if report.bad + report.unrendered > _BAD_EARLY:
            _judge(report)


def _portable(report: SourceReport, message: str) -> str:
    """A message that begins with where a row is, without the directories of this machine."""
    return report.source + message.removeprefix(report.path)


def _judge(report: SourceReport) -> None:
    """Raise when more than 1 % of the rows read so far are bad."""
    bad = report.bad + report.unrendered
    if bad * _BAD_SHARE <= report.rows:
        return
    examples = "\n  ".join(report.bad_examples)
    raise CorpusError(
        f"{report.path}: {bad} of {report.rows} rows are bad, more than 1 %:\n  {examples}"
        "\nfix or remove these rows, convert the file to a known format, or use a chat template "
        "that takes them"
    )
