"""Every answer, on disk as soon as it is there: what a killed run resumes from.

The journal is a file of JSON lines beside the output. The first line has the settings; each further
line has one answer, with the id of its conversation. Answers of a conversation are appended in the
order of its turns. A kill can tear the last line only; it is cut off when the journal is opened.
Memory holds the place of each answer, not its text.

The settings decide the answers, so a journal made with other settings is refused.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spec_data.regeneration.conversations import Answer
from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.files import sync_directory, writing
from spec_data.shards.resumable import differing_settings

_FORMAT = "spec-data answers 1"


def journal_path(out: Path) -> Path:
    """Return the path of the journal of an output file."""
    return out.with_name(f"{out.name}.journal")


class Journal:
    """The answers of a run, open for appending; use it as a context manager.

    Args:
        path: its file, made if it does not exist.
        settings: everything that decides the answers.

    Attributes:
        answers: how many it holds.

    Raises:
        ConfigError: the file holds answers made with other settings.
        DatasetError: the file is damaged before its last line, or not a journal.
        RunError: the disk is full.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.answers = 0
        self._places: dict[bytes, list[int]] = {}
        self._waiting: list[bytes] = []
        self._synced = True
        plain = json.loads(json.dumps(settings))  # as they are read back
        self._end = self._written = self._read(plain) if path.exists() else 0
        self._file = path.open("ab", buffering=0)
        self._reader = path.open("rb")
        try:
            self._begin(plain)
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.flush()
        finally:
            self._close()

    def _begin(self, settings: Mapping[str, Any]) -> None:
        """Cut off the torn last line of a killed run; write the first line of a new journal."""
        self._file.truncate(self._end)
        if not self._end:
            self._append({"format": _FORMAT, "settings": settings})
            self.flush()
            sync_directory(self.path.parent)

    def _close(self) -> None:
        self._file.close()
        self._reader.close()

    def read(self, identity: str) -> list[Answer]:
        """Return the answers of a conversation so far, in the order of its turns."""
        found = []
        self._write()
        for place in self._places.get(bytes.fromhex(identity), ()):
            self._reader.seek(place)
            found.append(_answer_of(json.loads(self._reader.readline())))
        return found

    def count(self, identity: str) -> int:
        """Return how many answers a conversation has."""
        return len(self._places.get(bytes.fromhex(identity), ()))

    def add(self, identity: str, turn: int, answer: Answer) -> None:
        """Append the answer of a turn; it is safe after the next `flush`.

        Raises:
            ValueError: the turn is not the next one of the conversation.
        """
        places = self._places.setdefault(bytes.fromhex(identity), [])
        if turn != len(places):
            raise ValueError(f"conversation {identity}: turn {turn} after {len(places)} answers")
        places.append(self._end)
        self.answers += 1
        self._append({"id": identity, "turn": turn, **asdict(answer)})

    def flush(self) -> None:
        """Make every answer durable.

        Raises:
            RunError: the disk is full; the answers before it are kept.
        """
        self._write()
        if not self._synced:
            with writing(self.path):
                os.fsync(self._file.fileno())
            self._synced = True

    def _write(self) -> None:
        """Hand what waits to the system; after an error the file ends with a whole line."""
        data, self._waiting = memoryview(b"".join(self._waiting)), []
        if not data:
            return
        self._synced = False
        with writing(self.path):
            try:
                left = data
                while left:
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(self._written)
                raise
        self._written += len(data)

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = json.dumps(entry, ensure_ascii=False).encode() + b"\n"
        self._waiting.append(line)
        self._end += len(line)

    def _read(self, settings: Mapping[str, Any]) -> int:
        """Read the places of all answers; return the length of the part that is whole."""
        end = number = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                entry = self._entry(line, number)
                if number == 1:
                    self._check_settings(entry, settings)
                else:
                    self._index(entry, end, number)
                end += len(line)
        return end

    def _entry(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            entry = json.loads(line)
            if isinstance(entry, dict):
                return entry
            reason = "no JSON object"
        except (ValueError, RecursionError) as error:
            reason = str(error)
        raise self._damaged(number, reason)

    def _damaged(self, number: int, reason: str) -> DatasetError:
        return DatasetError(
            f"{self.path}:{number}: damaged ({reason}); delete this line and all after it to keep "
            "the answers before it, or delete the file to start again"
        )

    def _check_settings(self, entry: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        if entry.get("format") != _FORMAT:
            raise DatasetError(
                f"{self.path}: no journal of this release of `spec-data regenerate`; choose "
                "another --out, or delete the file"
            )
        refuse_other_settings(entry["settings"], settings, self.path)

    def _index(self, entry: Mapping[str, Any], place: int, number: int) -> None:
        try:
            _answer_of(entry)
            places = self._places.setdefault(bytes.fromhex(entry["id"]), [])
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(number, f"{type(error).__name__}: {error}") from None
        if entry["turn"] != len(places):
            raise self._damaged(number, f"turn {entry['turn']} after {len(places)} answers")
        places.append(place)
        self.answers += 1


def _answer_of(entry: Mapping[str, Any]) -> Answer:
    return Answer(
        message=dict(entry["message"]),
        finish=entry["finish"],
        tokens=entry["tokens"],
        prompt_tokens=entry["prompt_tokens"],
        notes=tuple(entry["notes"]),
    )


def refuse_other_settings(old: Mapping[str, Any], new: Mapping[str, Any], where: Path) -> None:
    """Refuse to add to, or to replace, answers made with other settings.

    Raises:
        ConfigError: the settings differ; it names every field that does.
    """
    changed = differing_settings(dict(old), dict(new))
    if changed:
        raise ConfigError(
            f"{where} holds answers made with other settings, which must not be mixed:\n  "
            + "\n  ".join(changed)
            + "\nUse the old settings, another --out, or delete the file."
        )
