"""A row as it is read, and what becomes of it: both can be sent to another process."""

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from spec_data.corpus.bad_rows import BadRow, UnforeseenRow
from spec_data.corpus.file_rows import JsonText
from spec_data.corpus.records import Record


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
