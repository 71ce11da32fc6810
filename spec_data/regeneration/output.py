"""Write the conversations with their answers in corpus order, and the sampling record beside them.

The corpus is read once more, and each conversation takes its answers from the journal. Neither file
holds a time or a path of this machine, so equal answers make equal bytes.
"""

import hashlib
import json
import logging
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
from spec_data.regeneration.conversations import Answer, ConversationReader
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.progress import Failure
from spec_data.shards.errors import CorpusError, RunError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.resumable import atomic_write


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
    skipped: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    longest: int = 0
    finish_reasons: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def add(self, answers: Sequence[Answer]) -> None:
        """Count a conversation that is written."""
        self.written += 1
        self.answers += len(answers)
        for answer in answers:
            self.tokens += answer.tokens
            self.prompt_tokens += answer.prompt_tokens
            self.longest = max(self.longest, answer.tokens + answer.prompt_tokens)
            self.finish_reasons[answer.finish] += 1
            self.notes.update(answer.notes)

    def check(self, failures: Mapping[str, Failure]) -> None:
        """Check that every row is accounted for, and that something is written.

        Raises:
            RunError: rows were lost, or every conversation failed. CorpusError: none is written.
        """
        skipped = self.skipped.total()
        if self.written + self.failed + skipped != self.read:
            raise RunError(
                f"{self.read} rows were read, but {self.written} written, {self.failed} failed and "
                f"{skipped} skipped: rows were lost. The corpus changed while it was read, or this "
                "is an error of spec-data: please report it"
            )
        if not self.written:
            first = next(iter(failures.values()), None)
            why = f"; the first: {first.kind}: {first.reason}" if first else ""
            raise (RunError if self.failed else CorpusError)(
                f"no conversation has an answer: {self.read} rows read, {self.failed} failed, "
                f"skipped {dict(self.skipped) or 'none'}{why}"
            )

    def table(self) -> dict[str, Any]:
        """Return the counts as the sampling record has them, names sorted."""
        return {
            name: dict(sorted(value.items())) if isinstance(value, Counter) else value
            for name, value in vars(self).items()
        }


def write_output(
    out: Path,
    settings: Mapping[str, Any],
    reader: ConversationReader,
    journal: Journal,
    failures: Mapping[str, Failure],
) -> dict[str, Any]:
    """Write `out` and its record, and return the record.

    Args:
        out: the output file.
        settings: everything that decides the answers.
        reader: the corpus; it is read once more.
        journal: all answers.
        failures: the conversations that were given up, by id.

    Raises:
        CorpusError: nothing is left to write, or the corpus changed since it was answered.
        RunError: every conversation failed, or rows were lost. FileError: the disk is full.
    """
    sha256, counts = hashlib.sha256(), Counts()
    with atomic_write(out) as temporary:
        with temporary.open("wb") as file, _without_log_of_rows():
            for row in _rows(reader, journal, failures, counts):
                line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                sha256.update(line)
                file.write(line)
        counts.read = reader.rows
        counts.skipped += reader.skipped
        counts.check(failures)
    retried = [
        {"where": failure.where, "id": name, "reason": f"{failure.kind}: {failure.reason}"}
        for name, failure in failures.items()
        if failure.retry
    ]
    record = dump_json(
        {
            "format": FORMAT,
            "settings": settings,
            "sha256": sha256.hexdigest(),
            "corpus": reader.sources,
            "counts": counts.table(),
            "failed": retried[:FAILURES],
            "versions": {
                "spec_data": spec_data.__version__,
                "torch": torch.__version__.split("+")[0],
                "transformers": transformers.__version__,
                "machine": platform.machine(),
            },
        }
    )
    write_atomically(record_path(out), record)
    return dict(json.loads(record))


@contextmanager
def _without_log_of_rows() -> Iterator[None]:
    """Log nothing about rows: the first pass over the corpus did."""
    reader = logging.getLogger("spec_data.corpus.record_reader")
    level = reader.level
    reader.setLevel(logging.ERROR)
    try:
        yield
    finally:
        reader.setLevel(level)


def _rows(
    conversations: ConversationReader,
    journal: Journal,
    failures: Mapping[str, Failure],
    counts: Counts,
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the output in corpus order, and count all conversations.

    Raises:
        CorpusError: a conversation is new.
    """
    for conversation in conversations:
        failure = failures.get(conversation.id)
        if failure is not None:
            counts.failed += failure.retry
            counts.skipped.update([] if failure.retry else [failure.kind])
            continue
        answers = journal.read(conversation.id)
        if len(answers) < len(conversation.slots):
            raise CorpusError(
                f"{conversation.record.where}: this conversation was not there when the answers "
                "were generated. The corpus changed meanwhile; run the same command again to "
                "answer it"
            )
        counts.add(answers)
        yield conversation.row(answers)
