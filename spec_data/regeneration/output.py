"""Write the conversations with their answers in corpus order, and the sampling record beside them.

The corpus is read once more, and each conversation takes its answers from the journal. Neither file
holds a time or a path of this machine, so equal answers make equal bytes.
"""

import hashlib
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

import spec_data
from spec_data.corpus.sampling_record import FAILURES, FORMAT, record_path
from spec_data.regeneration.conversations import ConversationReader
from spec_data.regeneration.journal import Journal
from spec_data.regeneration.progress import Failure
from spec_data.regeneration.result import Counts
from spec_data.shards.errors import CorpusError
from spec_data.shards.files import dump_json, write_atomically
from spec_data.shards.resumable import atomic_write


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
