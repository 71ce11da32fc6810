"""Every answer, on disk as soon as it is there: what a killed run resumes from.

The journal is a SQLite file beside the output. It has a log of its own (WAL): what was added
survives a kill of the process; a power cut can take the last seconds. The file is locked for one
process, without shared memory, so it may lie on a network file system. The settings decide the
answers, so a journal made with other settings is refused.
"""

import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from spec_data.regeneration.conversations import Answer, Conversation, Unanswerable
from spec_data.shards.errors import DatasetError, FileError
from spec_data.shards.resumable import differing_settings, refuse_changes
from spec_data.terminal.progress import Bar

_OPENING = (
    "pragma locking_mode = exclusive",
    "pragma journal_mode = wal",
    "pragma synchronous = normal",
    "create table if not exists settings (value text)",
    "create table if not exists answers (conversation text, turn integer, answer text, "
    "primary key (conversation, turn)) without rowid",
)
_NO_LOCKS = {
    sqlite3.SQLITE_BUSY,
    *(sqlite3.SQLITE_IOERR_LOCK, sqlite3.SQLITE_IOERR_RDLOCK, sqlite3.SQLITE_IOERR_UNLOCK),
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
}
"""What SQLite reports where the file system has no locks."""
_Kind = TypeVar("_Kind")


def journal_path(out: Path) -> Path:
    """Return the path of the journal of an output file."""
    return out.with_name(f"{out.name}.journal")


class Journal:
    """The answers of a run by conversation and turn; use it as a context manager.

    `settings` are everything that decides the answers, as JSON has it; `bar` shows how many
    conversations are done; `failures` has why conversations were given up in this run, by id.

    Raises:
        ConfigError: the file holds answers made with other settings.
        DatasetError: the file is damaged, or no journal.
        FileError: the disk is full, or refuses; the answers before are kept.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], bar: Bar) -> None:
        self.path, self._bar = path, bar
        self.failures: dict[str, Unanswerable] = {}
        self._tokens, self._began = 0, time.monotonic()
        with self._explained():
            self._database = self._opened()
        try:
            if stored := self._decoded(dict[str, Any], "select value from settings"):
                refuse_changes(differing_settings(stored[0], settings), path)
            else:
                self._insert("settings values (?)", [(json.dumps(settings),)])
        except BaseException:
            self._database.close()
            raise

    def _opened(self) -> sqlite3.Connection:
        """Open the file, without SQLite's locks where the file system has none.

        `regenerate` holds a lock of its own, so no other process writes here.
        """
        memory = str(self.path) == ":memory:"  # SQLite's name for no file at all
        place = ":memory:" if memory else quote(str(self.path.absolute()))
        for options in ("", "?vfs=unix-none"):
            database = sqlite3.connect(f"file:{place}{options}", uri=True, check_same_thread=False)
            database.text_factory = bytes  # which need not be UTF-8 in a damaged file
            try:
                for command in _OPENING:
                    database.execute(command).fetchall()
                return database
            except sqlite3.DatabaseError as error:
                database.close()
                if options or error.sqlite_errorcode not in _NO_LOCKS:
                    raise
        raise AssertionError("unreachable")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def read(self, conversation: str) -> list[Answer]:
        """Return the answers of a conversation so far, in the order of its turns."""
        query = "select answer from answers where conversation = ? order by turn"
        return self._decoded(Answer, query, conversation)

    def add(self, answers: Iterable[tuple[str, int, Answer]]) -> None:
        """Add answers, each with its conversation and turn: all of them, or none."""
        answers = list(answers)
        rows = [(name, turn, msgspec.json.encode(a).decode()) for name, turn, a in answers]
        self._insert("answers values (?, ?, ?)", rows)
        self._tokens += sum(answer.tokens for _, _, answer in answers)
        rate = self._tokens / max(time.monotonic() - self._began, 1e-9)
        failed = f", {len(self.failures):,} without an answer" if self.failures else ""
        self._bar.set_postfix_str(f"{rate:,.0f} tok/s{failed}")

    def fail(self, conversation: Conversation, error: Unanswerable) -> None:
        """Give a conversation up."""
        self.failures[conversation.id] = error
        self._bar.update(1)

    def complete(self, count: int = 1, resumed: bool = False) -> None:
        """Count conversations with all of their answers; `resumed`: they are of earlier runs."""
        if resumed:
            self._bar.initial += count  # so that rate and ETA are those of this run
        self._bar.update(count)

    def _decoded(self, kind: type[_Kind], query: str, *values: str) -> list[_Kind]:
        rows = self._rows(query, *values)
        try:
            return [msgspec.json.decode(text, type=kind) for (text,) in rows]
        except (TypeError, ValueError) as error:  # TypeError: of another type than text
            raise self._damaged(error) from None

    def _rows(self, query: str, *values: str) -> list[tuple[Any, ...]]:
        with self._explained():
            return self._database.execute(query, values).fetchall()

    def _insert(self, query: str, rows: Iterable[tuple[Any, ...]]) -> None:
        with self._explained(), self._database as transaction:
            transaction.executemany(f"insert into {query}", rows)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say in words what SQLite reports."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise FileError(
                f"{self.path}: cannot be written ({error}): the disk is full, or refuses. Every "
                "answer before is intact; correct that, and run the same command again"
            ) from None
        except sqlite3.DatabaseError as error:
            raise self._damaged(error) from None

    def _damaged(self, reason: Exception) -> DatasetError:
        return DatasetError(
            f"{self.path}: damaged, or no journal ({reason}); copy it again, or delete it (and "
            f"{self.path.name}-wal) to answer everything again"
        )
