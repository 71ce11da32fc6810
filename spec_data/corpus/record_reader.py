"""Read records from JSONL, JSON, CSV, Parquet and text files, directories and HF datasets.

`CorpusReader` yields one `Record` per good row in a fixed order: sources as given, the files of a
directory sorted by path, rows as stored. It keeps one `SourceReport` per file or dataset, and
rows == records + bad rows always holds. Files are streamed: memory holds one row (JSONL) or one row
group (Parquet), never a file but a JSON list, and no row of more than `max_row_bytes`. A paragraph
of a `.txt` file is one row. Formats are recognised row by row (`records.py`); the report names the
most frequent format and counts the others.

`results` is the same for work that is done elsewhere (`in_order.py`): it reads rows, passes them to
the work, and counts what comes back, in the order of the rows. Rows that the work was ahead with
when reading stops are not counted, so the result does not depend on how far ahead it was.

Bad rows. Each is logged and counted, and reading stops when a source as the user named it (a file,
or a directory as a whole) has more of them than `max_bad_rows` allows; `bad_rows.py` has the rule.
A warning names a file without any good row.

Some records turn out to be broken only when they are rendered. `refuse` counts them: a broken
record counts as a bad row, a record with nothing to learn from does not.

Columns that no row uses are named once per source, and so is what the chat template leaves out
(`count_left_out`).

The dataset stores the names of sources, and the examples of bad rows, without the directories of
this machine. Messages name files as the user wrote them.

Hashes cover the bytes on disk (the compressed ones for .gz), in a pass of their own after the rows.
`limit` ends the records but not the hash, so a report identifies the whole file and not only the
part that was used.
"""

import functools
import logging
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spec_data.corpus.bad_rows import (
    AUTO,
    EXAMPLES,
    BadRow,
    BadRowLimit,
    BadRows,
    UnforeseenRow,
    printable,
    reason_of,
)
from spec_data.corpus.documents import RenderError
from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.records import COLUMNS, Record, parse_row
from spec_data.corpus.sources import MAX_ROW_BYTES, Source, resolve
from spec_data.shards.errors import ConfigError, CorpusError

__all__ = ["CorpusReader", "Record", "SourceReport"]

logger = logging.getLogger(__name__)

_NAMES = 100  # unused columns that are named, per source


class RawRow(NamedTuple):
    """One row of a corpus source, not recognised yet.

    Attributes:
        source: the number of its source in the reader; name: the name that the dataset stores.
        where: names the row in messages.
        value: the row, see `file_rows.Row`.
        arrow: it comes from an Arrow table.
        end: this is no row, but the end of the source.
    """

    source: int
    name: str
    where: str
    value: Any
    arrow: bool = False
    end: bool = False


@dataclass(kw_only=True)
class RowResult:
    """What became of a row: a record of a known format, or the reason why the row is bad.

    Attributes:
        bad: the reason; None for a good row.
        unforeseen: the class of the exception, if no check foresees it; trace: its traceback.
        kind: the format of a good row; unused: the columns that were not used.
        made: what was made of the record; None if only the row was parsed.
    """

    bad: str | None = None
    unforeseen: str | None = None
    trace: str = ""
    kind: str = ""
    unused: tuple[str, ...] = ()
    made: Any = None
    _record: Record | None = None

    @property
    def record(self) -> Record:
        """The record of a good row, in the process that parsed it."""
        assert self._record is not None
        return self._record


def parsed_row(row: RawRow, parse: Callable[..., tuple[str, Record]]) -> RowResult:
    """Return the result of parsing a row; `parse` is as in `CorpusReader`."""
    value = row.value.value() if isinstance(row.value, JsonText) else row.value
    try:
        if row.end:
            return RowResult()
        if isinstance(value, BadRow):
            raise value
        kind, record = parse(value, source=row.name, where=row.where, arrow=row.arrow)
    except UnforeseenRow as reason:
        trace = "".join(traceback.format_exception(reason))
        cause = type(reason.__cause__).__name__
        return RowResult(bad=str(reason), unforeseen=cause, trace=trace)
    except BadRow as reason:
        return RowResult(bad=str(reason))
    return RowResult(kind=kind, unused=record.unused, _record=record)


@dataclass(kw_only=True)
class SourceReport:
    """The counts of one file or dataset; complete once the reader has read all of it."""

    source: str  # the name that the dataset stores
    path: str  # as the user wrote it
    kind: str  # "jsonl", "json", "csv", "parquet", "text", "hf dataset directory", "hf dataset"
    format: str = "none"  # the format of most good rows
    formats: dict[str, int] = field(default_factory=dict)  # good rows by format
    rows: int = 0  # rows read, good and bad
    bad: int = 0
    unrendered: int = 0  # good rows that turned out to be broken when they were rendered
    bad_examples: list[str] = field(default_factory=list)  # "file:line: reason" of the first few
    sha256: str | None = None  # of the bytes on disk; of a Hub dataset: its fingerprint
    licence: str | None = None
    unused_columns: list[str] = field(
        default_factory=list
    )  # the first 100 that no format of a row uses
    template_left_out: dict[str, int] = field(default_factory=dict)  # parts of messages, by kind

    def __str__(self) -> str:
        mixed = ", ".join(f"{n} {name}" for name, n in self.formats.items() if name != self.format)
        found = f"{self.format} (and {mixed})" if mixed else self.format
        return f"{self.path}: {self.kind}, {found}, {self.rows} rows, {self.bad} bad"


class CorpusReader:
    """Iterate over the records of several sources.

    Args:
        sources: files, directories, or Hub dataset names (`name`, `name:config`, `name@split`).
        limit: stop after this many records over all sources; later sources are not opened.
        split: the split to read, unless the source has an `@split`. In a plain directory, files
            whose path names another split (`test-00000.parquet`) are left out with a warning.
        max_bad_rows: how many rows of each of `sources` may be bad; 0 stops at the first.
        max_row_bytes: a row of more bytes is a bad row, and is never held in memory.
        parse: returns (format name, record) of a row, as `parse_row` does.
        find: returns the files and datasets behind one of `sources`, as `resolve` does.
        more_columns: of columnar sources, which `parse` reads beside those of `records.COLUMNS`.

    Attributes:
        notes: the files of directories that were left out, and why.
        reports: one per source that was opened.
        refused: records without a document, by reason; `refused_examples` has the first of each.
        unforeseen: bad rows that raised an exception which no check foresees, by its class.

    Raises:
        MissingError, CorpusError, ConfigError: at once for sources that cannot be opened; during
            iteration for bad rows and broken files.
    """

    def __init__(
        self,
        sources: Sequence[str],
        limit: int | None = None,
        split: str = "train",
        max_bad_rows: BadRowLimit = AUTO,
        max_row_bytes: int = MAX_ROW_BYTES,
        parse: Callable[..., tuple[str, Record]] = parse_row,
        find: Callable[..., list[Source]] = resolve,
        more_columns: Sequence[str] = (),
    ) -> None:
        if not sources:
            raise ConfigError("no corpus: name a file, a directory or a dataset")
        if limit is not None and limit < 1:
            raise ConfigError(f"limit = {limit}: expected at least 1")
        self.limit = limit
        self.notes: list[str] = []
        self.reports: list[SourceReport] = []
        self.refused: Counter[str] = Counter()
        self.refused_examples: dict[str, list[str]] = {}
        self.unforeseen: Counter[str] = Counter()
        self._max_bad_rows = max_bad_rows
        self._parse, self._columns = parse, frozenset((*COLUMNS, *more_columns))
        self.sources: list[Source] = []
        self._given: list[tuple[int, str]] = []  # per source: which of `sources` it belongs to
        for given in enumerate(map(str, sources)):
            found = find(given[1], split, self.notes, max_row_bytes)
            self.sources += found
            self._given += [given] * len(found)
        self._bad = BadRows("")  # of the source that is being read
        for note in self.notes:
            logger.warning("%s", note)
        self._warn_of_equal_names()

    def _warn_of_equal_names(self) -> None:
        """Warn if sources that were given one by one have one name, which is all that is stored."""
        places: dict[str, list[str]] = {}
        for source, given in zip(self.sources, self._given, strict=True):
            if given[1] not in places.setdefault(source.name, []):
                places[source.name].append(given[1])
        for name, given_names in places.items():
            if len(given_names) > 1:
                logger.warning(
                    "warning: %s have one name, %s: their figures are counted together, and "
                    "--source cannot tell them apart. Rename the files, or give the directory "
                    "above them",
                    *(" and ".join(map(printable, given_names)), name),
                )

    def __iter__(self) -> Iterator[Record]:
        parse = functools.partial(parsed_row, parse=self._parse)
        for found in self.results(lambda rows: ((row, parse(row)) for row in rows)):
            yield found.record

    def results(
        self, work: Callable[[Iterator[RawRow]], Iterator[tuple[RawRow, RowResult]]]
    ) -> Generator[RowResult]:
        """Yield what `work` makes of every good row, at most `limit` of them.

        `work` maps the rows of all sources to pairs (row, its result), in the same order. An
        exception that reading a row raises must be raised after the results before it.

        Raises:
            CorpusError: too many bad rows, a source that cannot be read, or no good row.
        """
        self.reports, self.refused, self.refused_examples = [], Counter(), {}
        self.unforeseen = Counter()
        number, left = -1, self.limit
        with closing(self._rows()) as rows, closing(_generator(work(rows))) as results:
            for row, result in results:
                while number < row.source:
                    self._end(number)
                    number += 1
                    self._begin(number)
                if row.end:
                    continue
                self._count(row, result)
                if result.bad is None:
                    yield result
                    left = None if left is None else left - 1
                    if left == 0:
                        break
            self._end(number)
        self._bad.check()
        if not any(report.formats for report in self.reports):
            raise CorpusError(f"no usable row in {', '.join(r.path for r in self.reports)}")

    def _rows(self) -> Generator[RawRow]:
        """Yield the rows of all sources, and after those of each a RawRow that marks its end."""
        for number, source in enumerate(self.sources):
            with closing(source.rows(self._columns)) as stream:
                for where, row in stream:
                    yield RawRow(number, source.name, where, row, source.arrow)
            yield RawRow(number, source.name, source.path, None, end=True)

    def _begin(self, number: int) -> None:
        """Begin the report of a source."""
        given = self._given[number]
        if given not in self._given[max(0, number - 1) : number]:
            self._bad = BadRows(given[1], self._max_bad_rows)
        source = self.sources[number]
        report = SourceReport(
            source=source.name, path=source.path, kind=source.kind, licence=source.licence
        )
        self.reports.append(report)

    def _end(self, number: int) -> None:
        """Complete the report of a source.

        Raises:
            CorpusError: it was the last file of a source as the user named it, with too many bad
                rows.
        """
        if number < 0:
            return
        report, source = self.reports[-1], self.sources[number]
        report.sha256 = source.digest()
        _add_names(report.unused_columns, [c for c in source.columns() if c not in self._columns])
        logger.info("%s", report)
        if self._given[number] not in self._given[number + 1 : number + 2]:
            self._bad.check()
        if report.bad and not report.formats:
            logger.warning("warning: %s: every row of this file is bad", report.path)
        for example in report.bad_examples:
            shown = printable(report.path) + example.removeprefix(report.source)
            logger.warning("bad row skipped: %s", shown)
        _name_what_is_not_used(report)

    def _count(self, row: RawRow, result: RowResult) -> None:
        """Count one row."""
        report = self.reports[-1]
        report.rows += 1
        self._bad.read += 1
        if result.bad is not None:
            report.bad += 1
            if result.unforeseen:
                self.unforeseen[result.unforeseen] += 1
                logger.debug("%s\n%s", printable(row.where), result.trace)
            self._broken(report, f"{row.where}: {result.bad}")
            return
        report.formats[result.kind] = report.formats.get(result.kind, 0) + 1
        report.format = max(report.formats, key=lambda name: report.formats[name])
        _add_names(report.unused_columns, result.unused)

    def refuse(self, error: RenderError) -> None:
        """Count the record that was yielded last as one without a document.

        Raises:
            CorpusError: the record is broken, and with it too many rows are bad.
        """
        report = self.reports[-1]
        self.refused[error.reason] += 1
        if error.broken:
            report.unrendered += 1
            self._broken(report, str(error))
        examples = self.refused_examples.setdefault(error.reason, [])
        if _add_example(examples, _portable(report, str(error))) and not error.broken:
            logger.info("row left out (%s): %s", error.reason, printable(str(error)))

    def count_left_out(self, parts: Mapping[str, int]) -> None:
        """Count what the template left out of the record that was yielded last, by kind."""
        found = self.reports[-1].template_left_out
        for kind, count in parts.items():
            found[kind] = found.get(kind, 0) + count

    def _broken(self, report: SourceReport, message: str) -> None:
        """Count a bad row and store an example of it; raise if too many rows are bad."""
        self._bad.add(message)
        _add_example(report.bad_examples, _portable(report, message))


def _generator(results: Iterator[tuple[RawRow, RowResult]]) -> Generator:
    """Return an iterator as a generator, which can be closed."""
    yield from results


def _add_example(examples: list[str], message: str) -> bool:
    """Add a message of a new reason to a few of them; return whether it was added."""
    new = all(reason_of(message) != reason_of(other) for other in examples)
    if new := new and len(examples) < EXAMPLES:
        examples.append(message)
    return new


def _add_names(known: list[str], names: Sequence[str]) -> None:
    """Add new names of columns, up to a bound: rows can have a new name each."""
    for name in map(printable, names):
        if len(known) < _NAMES and name not in known:
            known.append(name)


def _name_what_is_not_used(report: SourceReport) -> None:
    """Log the columns and the parts of conversations that documents do not have."""
    if report.unused_columns:
        names = printable(", ".join(report.unused_columns))
        logger.info("%s: columns that are not used: %s", report.path, names)
    if report.template_left_out:
        parts = ", ".join(
            f"{count:,} {kind}" for kind, count in sorted(report.template_left_out.items())
        )
        logger.warning("%s: the chat template leaves out %s", report.path, parts)


def _portable(report: SourceReport, message: str) -> str:
    """Return a message about a row without the directories of this machine."""
    return printable(report.source + message.removeprefix(report.path))
