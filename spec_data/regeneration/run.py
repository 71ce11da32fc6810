"""Write the target's own answers to a corpus: answer every conversation, then write them in order.

    answers.jsonl           the conversations, written at the end in one step
    answers.jsonl.sampling  how they were sampled, and the counts
    answers.jsonl.journal   the answers so far; deleted at the end, unless conversations failed
    .answers.jsonl.lock     held by the process that writes them

A run that is killed anywhere resumes from the journal. The finished file has the same bytes as that
of a run without a kill, if the answers have.
"""

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from spec_data.corpus.sampling_record import read_record, record_path
from spec_data.corpus.sources import expected_rows
from spec_data.regeneration.conversations import Conversation, ConversationReader
from spec_data.regeneration.journal import ADVICE, Journal, journal_path
from spec_data.regeneration.output import write_output
from spec_data.regeneration.progress import Progress
from spec_data.regeneration.result import RegenerateResult
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import remove_left_of
from spec_data.shards.resumable import process_lock, refuse_other_settings
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)


class Backend(Protocol):
    """A source of answers: the local target, or servers."""

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        ...

    def run(
        self, conversations: Iterable[Conversation], journal: Journal, progress: Progress
    ) -> None:
        """Answer every turn that the journal does not hold."""
        ...


def check_out(out: Path, corpus: Sequence[str]) -> None:
    """Refuse an output that cannot be written, that is no corpus, or that is part of this one.

    Raises:
        ConfigError: it is one of these.
    """
    check_file_to_write("--out", out)
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--out {out}: JSON lines are written; choose a name that ends in .jsonl")
    for path in map(Path, corpus):
        inside = path.is_dir() and out.resolve().is_relative_to(path.resolve())
        if inside or (path.exists() and path.resolve() == out.resolve()):
            raise ConfigError(
                f"--out {out} is or lies in the corpus {path}, so it would be read as corpus; "
                "choose another --out"
            )


def regenerate(
    out: Path, reader: ConversationReader, backend: Backend, settings: Mapping[str, Any]
) -> RegenerateResult:
    """Answer the conversations of a corpus and write them, or resume a run.

    Args:
        out: the JSON-lines file; `check_out` has accepted it.
        reader: the corpus.
        backend: writes the answers.
        settings: what decides the answers beside those of the backend.

    Raises:
        ConfigError: the output file or its journal holds answers made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: the device is out of memory, no server answers, or another process writes the
            same file. FileError: the disk is full.
    """
    settings = json.loads(json.dumps({**settings, **backend.settings()}))  # as they are read back
    busy = f"{out}: another process is writing this file; wait for it, or choose another --out"
    with process_lock(out.with_name(f".{out.name}.lock"), busy):
        remove_left_of(out)
        remove_left_of(record_path(out))
        record = _complete_record(out, settings, reader)
        if record is None:
            record = _answered(out, settings, reader, backend)
    return RegenerateResult(
        **record["counts"], path=out, failures=record["failed"], settings=record["settings"]
    )


def _answered(
    out: Path, settings: Mapping[str, Any], reader: ConversationReader, backend: Backend
) -> dict[str, Any]:
    """Answer, write the output, and return its record."""
    rows = expected_rows(reader.reader.sources, reader.reader.limit)
    bar = progress(total=rows, desc="regenerate", unit="rows")
    with Journal(journal_path(out), settings) as journal, bar:
        if len(journal):
            logger.info("resuming: %s has %d answers", journal.path, len(journal))
        state = Progress(bar)
        backend.run(reader, journal, state)
        bar.update(max(0, reader.rows - bar.n))  # the rows without a conversation
        record = write_output(out, settings, reader, journal, state.failures)
    if not record["counts"]["failed"]:
        journal.path.unlink(missing_ok=True)
    return record


def _complete_record(
    out: Path, settings: Mapping[str, Any], reader: ConversationReader
) -> dict[str, Any] | None:
    """Return the record of an output that is complete already, or None.

    Raises:
        ConfigError: the output holds something else.
    """
    if journal_path(out).exists() or not out.exists():
        return None
    record = read_record(out)
    if record is None:
        raise ConfigError(
            f"--out {out} exists and has no {record_path(out).name}, so `regenerate` did not write "
            "it; choose another --out (nothing was changed)"
        )
    refuse_other_settings(record["settings"], settings, out, ADVICE)
    corpus = [source["sha256"] for source in record["corpus"]]
    sources = reader.reader.sources
    if reader.reader.limit:
        sources = sources[: len(corpus)]  # those that were read
    if corpus != [source.digest() for source in sources]:
        raise ConfigError(
            f"{out} has the answers to another corpus, or to an earlier state of it; use another "
            "--out, or delete the file"
        )
    logger.info("%s is complete already: nothing to do", out)
    return record
