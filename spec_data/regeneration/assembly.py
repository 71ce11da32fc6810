"""Write the conversations with their answers in corpus order, and the sampling record beside them.

The corpus is read once more, and each conversation takes its answers from the journal. Neither file
holds a time or a path of this machine, so equal answers make equal bytes.
"""

import hashlib
import json
import logging
import os
import platform
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import spec_data
from spec_data.corpus.sampling_record import FAILURES, FORMAT, record_path
from spec_data.regeneration.conversations import TRUNCATED, Answer, Conversation, Reading
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.ledger import Ledger
from spec_data.shards.errors import CorpusError, RunError
from spec_data.shards.files import (
    dump_json,
    replace_durably,
    temporary_name,
    write_atomically,
    writing,
)


@dataclass
class Counts:
    """What became of every row of the corpus: written + failed + skipped == read.

    Attributes:
        read: rows read; written: conversations with all of their answers.
        failed: conversations that were given up; skipped: rows that were left out, by reason.
        answers, tokens, prompt_tokens: of the conversations that were written.
        longest: tokens of the longest prompt with its answer.
        finish_reasons: answers by the reason for which they ended.
        notes: answers about which something is to be said, by what it is.
    """

    read: int = 0
    written: int = 0
    failed: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    notes: dict[str, int] = field(default_factory=dict)

    def check(self) -> None:
        """Check that every row is accounted for.

        Raises:
            RunError: the counts do not add up, so rows were lost; nothing is deleted.
        """
        if self.written + self.failed + sum(self.skipped.values()) != self.read:
            raise RunError(
                f"{self.read} rows were read, but {self.written} written, {self.failed} failed and "
                f"{sum(self.skipped.values())} skipped: rows were lost. The corpus changed while "
                "it was read, or this is an error of spec-data: please report it"
            )

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a conversation that is written."""
        self.written += 1
        self.answers += len(answers)
        for answer in answers:
            self.tokens += answer.tokens
            self.prompt_tokens += answer.prompt_tokens
            self.longest = max(self.longest, answer.tokens + answer.prompt_tokens)
            self.finish_reasons[answer.finish] = self.finish_reasons.get(answer.finish, 0) + 1
            for note in answer.notes:
                self.notes[note] = self.notes.get(note, 0) + 1


def assemble(
    out: Path,
    reading: Reading,
    journal: Journal,
    ledger: Ledger,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """Write `out` and its record, and return the record.

    Args:
        out: the output file.
        reading: the corpus; it is read once more.
        journal: all answers.
        ledger: the conversations that were given up.
        settings: those of the run.

    Raises:
        CorpusError: nothing is left to write, or the corpus changed since it was answered.
        RunError: every conversation failed, the disk is full, or rows were lost.
    """
    sha256, temporary = hashlib.sha256(), temporary_name(out)
    drop = bool(settings["drop_truncated"])
    with writing(out, temporary):
        with temporary.open("wb") as file, _reading_quietly():
            counts, lost = Counts(), Counter[str]()
            for row in _rows(reading, journal, ledger, drop, counts, lost):
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                sha256.update(line)
                file.write(line)
            file.flush()
            os.fsync(file.fileno())
        _complete(counts, lost, reading, ledger)
        replace_durably(temporary, out)
    record = dump_json(
        {
            "format": FORMAT,
            "settings": settings,
            "sha256": sha256.hexdigest(),
            "corpus": reading.sources,
            "counts": vars(counts),
            "failed": ledger.failures()[:FAILURES],
            "versions": _versions(),
        }
    )
    write_atomically(record_path(out), record)
    return dict(json.loads(record))


def _versions() -> dict[str, str]:
    return {
        "spec_data": spec_data.__version__,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


@contextmanager
def _reading_quietly() -> Iterator[None]:
    """Log nothing about rows: the first pass over the corpus did."""
    reader = logging.getLogger("spec_data.corpus.record_reader")
    level = reader.level
    reader.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reader.setLevel(level)


def _rows(
    reading: Reading,
    journal: Journal,
    ledger: Ledger,
    drop_truncated: bool,
    counts: Counts,
    lost: Counter[str],
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the output in corpus order; count them, and those that are lost."""
    for conversation in reading:
        found = _answers_of(conversation, journal, ledger, drop_truncated)
        if isinstance(found, str):
            lost[found] += 1
        else:
            counts.add(found)
            yield conversation.row(found)


def _answers_of(
    conversation: Conversation, journal: Journal, ledger: Ledger, drop_truncated: bool
) -> list[Answer] | str:
    """Return the answers of a conversation, or the reason why it is not written."""
    loss = ledger.losses.get(conversation.id)
    if loss is not None:
        return _FAILED if loss.failed else loss.kind
    answers = journal.read(conversation.id)
    if len(answers) < len(conversation.slots):
        raise CorpusError(
            f"{conversation.record.where}: this conversation was not there when the answers were "
            "generated. The corpus changed meanwhile; run the same command again to answer it"
        )
    if drop_truncated and any(answer.finish == TRUNCATED for answer in answers):
        return "truncated"
    return answers


_FAILED = "failed"


def _complete(counts: Counts, lost: Counter[str], reading: Reading, ledger: Ledger) -> None:
    """Complete the counts after the last row, and check them."""
    counts.failed = lost.pop(_FAILED, 0)
    counts.read = reading.rows
    counts.skipped = dict(sorted((Counter(reading.skipped) + lost).items()))
    counts.finish_reasons = dict(sorted(counts.finish_reasons.items()))
    counts.notes = dict(sorted(counts.notes.items()))
    counts.check()
    if not counts.written:
        first = next(iter(ledger.losses.values()), None)
        why = f"; the first: {first.kind}: {first.reason}" if first else ""
        raise (RunError if counts.failed else CorpusError)(
            f"no conversation has an answer: {counts.read} rows read, {counts.failed} failed, "
            f"skipped {counts.skipped or 'none'}{why}"
        )
