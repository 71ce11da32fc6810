"""Read records from JSONL, JSON, CSV, Parquet and text files, directories and HF datasets.

`CorpusReader` yields one `Record` per good row in a fixed order: sources as given, the files of a
directory sorted by path, rows as stored. It counts what it reads in one `SourceRecord` per file or
dataset, and rows == records + bad rows always holds. Files are streamed: memory holds one row
(JSONL) or one row group (Parquet), never a file. `results` is the same for work that is done
elsewhere (`in_order.py`); rows that it was ahead with when reading stops do not count.

The dataset stores the names of sources, and the examples of bad rows, without the directories of
this machine. Hashes cover the bytes on disk, in a pass of their own after the rows, also where
`limit` ends the rows.
"""

import functools
import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple

from spec_data.corpus.bad_rows import (
    AUTO,
    BadRow,
    BadRowLimit,
    BadRows,
    add_example,
    shortened,
    stored,
)
from spec_data.corpus.documents import RenderError
from spec_data.corpus.facts import COLUMNS, IGNORED, PLAIN, Layout, meaning_of
from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.records import Record, parse_json, parse_row
from spec_data.corpus.sources import MAX_ROW_BYTES, Source, resolve, with_distinct_names
from spec_data.shards.errors import ConfigError, CorpusError
from spec_data.shards.schema import SourceRecord
from spec_data.terminal.memory_rows import lines_of

logger = logging.getLogger(__name__)

_NAMES = 100  # unused or unread columns that are named, per source


class RawRow(NamedTuple):
    """One row of a corpus source, not recognised yet."""

    source: int  # its number in the reader
    name: str  # of the source, as the dataset stores it
    where: str  # names the row in messages
    value: Any  # see `file_rows.Row`


@dataclass(kw_only=True)
class RowResult:
    """What became of a row: why it is bad, or facts of the good row."""

    bad: str | None = None
    kind: str = ""  # its format
    unused: tuple[str, ...] = ()  # columns
    unread: tuple[str, ...] = ()  # columns and keys of messages
    notes: tuple[str, ...] = ()  # facts that are not used as given
    nulls: tuple[str, ...] = ()  # where nulls were left out
    absent: tuple[str, ...] = ()  # columns of --columns
    made: Any = None  # the record, or what was made of it


def parsed_row(row: RawRow, parse: Callable[..., Record]) -> RowResult:
    """Return the result of parsing a row; `parse` is as in `CorpusReader`."""
    value = row.value
    try:
        if isinstance(value, BadRow):
            raise value
        if isinstance(value, JsonText):
            value = parse_json(bytes(value))
        record = parse(value, source=row.name, where=row.where)
    except BadRow as reason:
        return RowResult(bad=str(reason))
    except MemoryError:  # says nothing about the row
        raise
    except Exception as error:  # that no check foresees
        return RowResult(bad=f"{type(error).__name__}: {error}")
    names = ("kind", "unused", "unread", "notes", "nulls", "absent")
    facts = {name: getattr(record, name) for name in names}
    return RowResult(made=record, **facts)


class CorpusReader:
    """Iterate over the records of several sources.

    Args:
        sources: as `resolve` takes them.
        limit: stop after this many records over all sources; later sources are not opened.
        split: the split to read, unless the source has an `@split`.
        max_bad_rows: how many rows of each of `sources` may be bad; 0 stops at the first.
        max_row_bytes: a row of more bytes is a bad row.
        parse: returns the record of a row, as `parse_row` does, also with its `layout`.
        layout: how rows are read: --columns, and what the chat template reads.
        find: returns the files and datasets behind one of `sources`, as `resolve` does.
        more_columns: of columnar sources, which `parse` reads beside `facts.COLUMNS`.

    Attributes:
        sources: the files and datasets; reports: the counts of each one that was opened.
        quiet: log nothing about rows.
        whole_rows: columns of a table that are not read are named.
        refused: records without a document, by reason; `refused_examples` has the first of each.

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
        parse: Callable[..., Record] = parse_row,
        find: Callable[..., list[Source]] = resolve,
        more_columns: Sequence[str] = (),
        layout: Layout = PLAIN,
    ) -> None:
        if not sources:
            raise ConfigError("no corpus: name a file, a directory or a dataset")
        self.limit = limit
        self.quiet, self.whole_rows = False, True
        self._max_bad_rows = max_bad_rows
        self.layout = layout
        self.parse = parse if layout is PLAIN else functools.partial(parse, layout=layout)
        of_template = (name for name in layout.variables if meaning_of(name) in IGNORED)
        self._columns = COLUMNS.union(more_columns, layout.given, of_template)
        self.sources: list[Source] = []
        self._given: list[tuple[int, str]] = []  # of each source: what the user wrote
        for given in enumerate(map(str, sources)):
            behind = find(given[1], split, max_row_bytes)
            self.sources += behind
            if lines_of(given[1]) is not None:
                given = given[0], "memory"
            self._given += [given] * len(behind)
        self.sources = with_distinct_names(self.sources)
        self._reset()

    def _reset(self) -> None:
        self.reports: list[SourceRecord] = []
        self.refused: Counter[str] = Counter()
        self.refused_examples: dict[str, list[str]] = {}
        self._bad = BadRows("")  # of the source, as given, that is being read
        self._turns = BadRows("", what="turns")  # of its good rows
        self._absent: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Record]:
        parse = functools.partial(parsed_row, parse=self.parse)
        for result in self.results(lambda rows: ((row, parse(row)) for row in rows)):
            yield result.made

    def results(
        self, work: Callable[[Iterator[RawRow]], Generator[tuple[RawRow, RowResult]]]
    ) -> Generator[RowResult]:
        """Yield what `work` makes of every good row, at most `limit` of them.

        `work` maps the rows of all sources to pairs (row, its result), in the same order. An
        exception that reading a row raises must be raised after the results before it.

        Raises:
            CorpusError: too many bad rows, a source that cannot be read, or no good row.
        """
        self._reset()
        good = 0
        with closing(self._rows()) as rows, closing(work(rows)) as results:
            for row, result in results:
                self._advance(row.source)
                self._count(row, result)
                if result.bad is None:
                    yield result
                    good += 1
                    if good == self.limit:
                        break
            else:
                self._advance(len(self.sources) - 1)
        self._end()
        self._check()
        if wrong := [name for name, count in self._absent.items() if good and count == good]:
            raise ConfigError(f"--columns: no row has the column {wrong[0]!r}; correct its name")
        if not good:
            raise CorpusError(f"no usable row in {', '.join(r.path for r in self.reports)}")

    def _rows(self) -> Generator[RawRow]:
        for number, source in enumerate(self.sources):
            with closing(source.rows(self._columns)) as stream:
                for where, row in stream:
                    yield RawRow(number, source.name, where, row)

    def _advance(self, number: int) -> None:
        """Complete the counts of the sources before source `number`, and begin its own."""
        while (current := len(self.reports)) <= number:
            if current:
                self._end()
            if current == 0 or self._given[current] != self._given[current - 1]:
                self._check()
                name = self._given[current][1]
                self._bad = BadRows(name, self._max_bad_rows)
                self._turns = BadRows(name, self._max_bad_rows, "turns")
            source = self.sources[current]
            facts = {name: getattr(source, name) for name in ("path", "kind", "licence")}
            self.reports.append(SourceRecord(source=source.name, **facts))

    def _end(self) -> None:
        """Complete the counts of the current source, and log what its documents do not have."""
        report, source = self.reports[-1], self.sources[len(self.reports) - 1]
        report.sha256 = source.digest()
        every = source.columns() if self.whole_rows else ()
        others = [c for c in every if c not in self._columns]
        _add_names(report.unused_columns, others)
        unread = [c for c in others if meaning_of(c) not in IGNORED and c not in report.unread]
        good = report.rows - report.bad
        for name in unread:
            count = source.filled(name)
            if count := good if count is None else min(count, good):
                _count_names(report.unread, [name], count)
        if self.quiet:
            return
        formats = ", ".join(f"{count} {name}" for name, count in report.formats.items()) or "none"
        bad = report.bad + report.unrendered
        counts = f"{report.kind}, {report.rows} rows ({formats}), {bad} bad"
        logger.info("%s: %s", report.path, counts)
        for level, example in zip(
            (logging.WARNING, *5 * [logging.INFO]), report.bad_examples, strict=False
        ):
            row = report.path + example.removeprefix(report.source)
            logger.log(level, "warning[bad-rows]: %d bad rows skipped: %s", bad, row)
        if report.unused_columns:
            names = shortened(", ".join(report.unused_columns))
            logger.info("%s: columns that are not used: %s", report.path, names)
        if report.nulls:
            counts = ", ".join(f"{name} in {n:,} rows" for name, n in report.nulls.items())
            logger.info(
                "%s: nulls left out, as those that `datasets` adds: %s", report.path, counts
            )
        if report.unread:
            logger.warning("warning[unread]: %s: %s", report.path, self._unread(report))
        for note, count in report.notes.items():
            logger.warning(
                "warning[flags]: %s: %s (%d of %d rows)", report.path, note, count, report.rows
            )

    def _unread(self, report: SourceRecord) -> str:
        """Say which columns and keys of messages nothing reads, and what to do."""
        counts = (
            f"{name} in {count:,} row{'s' * (count > 1)}" for name, count in report.unread.items()
        )
        text = (
            f"not read: {shortened(', '.join(counts))}; neither this program nor the chat template "
            "knows these columns or keys of messages. If they matter, write them under known names "
            "(docs/corpus.md), or name columns with --columns"
        )
        if inside := sorted(report.unread.keys() & self.layout.variables):
            text += f"; the template reads {', '.join(inside)} from chat_template_kwargs of a row"
        return text

    def _count(self, row: RawRow, result: RowResult) -> None:
        report = self.reports[-1]
        report.rows += 1
        self._bad.read += 1
        if result.bad is not None:
            report.bad += 1
            self._broken(f"{row.where}: {result.bad}")
            return
        report.formats[result.kind] = report.formats.get(result.kind, 0) + 1
        report.format = max(report.formats, key=lambda name: report.formats[name])
        _add_names(report.unused_columns, result.unused)
        _count_names(report.unread, result.unread)
        _count_names(report.notes, result.notes)
        _count_names(report.nulls, result.nulls)
        self._absent.update(result.absent)

    def refuse(self, error: RenderError) -> None:
        """Count the record that was yielded last as one without a document.

        A broken one is a bad row, and a CorpusError if with it too many rows are bad.
        """
        self.refused[error.reason] += 1
        if error.broken:
            self.reports[-1].unrendered += 1
            self._broken(str(error))
        examples = self.refused_examples.setdefault(error.reason, [])
        new = add_example(examples, self._stored(str(error)))
        if new and not (error.broken or self.quiet):
            logger.info("row left out (%s): %s", error.reason, shortened(str(error)))

    def drop(self, turns: int, reason: str, messages: Sequence[str]) -> None:
        """Count `turns` of the record that was yielded last, of which some have no document.

        `messages` say of each of these why. A CorpusError, if with them too many turns are lost.
        """
        self._turns.read += turns
        for message in messages:
            self._turns.add(message)
            add_example(self.refused_examples.setdefault(reason, []), self._stored(message))

    def _check(self) -> None:
        """Check the limits for a source as it was given, and name the turns that are left out."""
        self._bad.check()
        self._turns.check()
        if self._turns.bad and not self.quiet:
            counts = self._turns.bad, self._turns.read, self._turns.examples[0]
            logger.warning("warning[bad-rows]: %d of %d turns left out: %s", *counts)

    def _broken(self, message: str) -> None:
        """Count a bad row and store an example of it; raise if too many rows are bad."""
        self._bad.add(message)
        add_example(self.reports[-1].bad_examples, self._stored(message))

    def _stored(self, message: str) -> str:
        """Return a message about a row without the directories of this machine."""
        return self.reports[-1].source + message.removeprefix(self.reports[-1].path)


def _add_names(columns: list[str], names: Iterable[str]) -> None:
    """Add new names of columns, up to a bound: rows can have a new name each."""
    for name in map(stored, names):
        if len(columns) < _NAMES and name not in columns:
            columns.append(name)


def _count_names(counts: dict[str, int], names: Iterable[str], rows: int = 1) -> None:
    """Count rows by new or known names, up to a bound of names."""
    for name in map(stored, names):
        if name in counts or len(counts) < _NAMES:
            counts[name] = counts.get(name, 0) + rows
