"""`spec-data regenerate`: answer every conversation, then write them in corpus order.

    answers.jsonl           the conversations, written at the end in one step
    answers.jsonl.sampling  how they were sampled, and the counts
    answers.jsonl.journal   the answers so far; deleted at the end, unless conversations failed
    .answers.jsonl.lock     held by the process that writes them

A run that is killed anywhere resumes from the journal. The finished file has the same bytes as that
of a run without a kill, if the answers have.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from spec_data.corpus.sampling_record import read_record, record_path
from spec_data.corpus.sources import expected_rows
from spec_data.options.option_values import parse_size
from spec_data.options.regenerate_options import RegenerateConfig
from spec_data.regeneration.assembly import assemble
from spec_data.regeneration.conversations import Reading
from spec_data.regeneration.journal import Journal, journal_path, refuse_other_settings
from spec_data.regeneration.ledger import Ledger
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.files import remove_left_of
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)


class Answers(Protocol):
    """A source of answers: the local target, or servers."""

    def settings(self) -> dict[str, Any]:
        """Return what decides the answers beside the options that every backend has."""
        ...

    def run(self, reading: Reading, journal: Journal, ledger: Ledger) -> None:
        """Answer every turn that the journal does not hold."""
        ...


def regenerate(config: RegenerateConfig) -> dict[str, Any]:
    """Write the target's own answers to a corpus, or resume a run that was interrupted.

    Returns:
        The sampling record, as it is written beside the output (`corpus/sampling_record.py`).

    Raises:
        ConfigError: the output file or its journal holds answers made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: the device is out of memory, the disk is full, no server answers, or another
            process writes the same file.
    """
    out = Path(config.out)
    check_file_to_write("--out", out)
    _check_name(out, config)
    reading = Reading(config)
    answers = _answers(config)
    settings = _settings(config) | answers.settings()
    with _locked(out):
        remove_left_of(out)
        remove_left_of(record_path(out))
        done = _finished(out, settings, config)
        if done is not None:
            return done
        bar = progress(
            total=expected_rows(reading.reader.sources, reading.reader.limit),
            desc="regenerate",
            unit="rows",
        )
        with Journal(journal_path(out), settings) as journal, bar:
            if journal.answers:
                logger.info("resuming: %s has %d answers", journal.path, journal.answers)
            ledger = Ledger(bar)
            answers.run(reading, journal, ledger)
            journal.flush()
            bar.update(max(0, reading.rows - bar.n))  # the rows without a conversation
            record = assemble(out, reading, journal, ledger, settings)
        if not record["counts"]["failed"]:
            journal.path.unlink(missing_ok=True)
        return record


def _answers(config: RegenerateConfig) -> Answers:
    if config.server:
        from spec_data.regeneration.server_answers import ServerAnswers  # needs openai

        return ServerAnswers(config)
    from spec_data.regeneration.local_answers import LocalAnswers

    return LocalAnswers(config)


def _settings(config: RegenerateConfig) -> dict[str, Any]:
    """Return the options that decide the answers, whatever the backend."""
    return {
        "turns": config.turns,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "max_new_tokens": config.max_new_tokens,
        "drop_truncated": config.drop_truncated,
        "seed": config.seed,
        "chat_template_kwargs": config.template_kwargs,
        "limit": config.limit,
        "max_row_bytes": parse_size(config.max_row_bytes),
    }


def _check_name(out: Path, config: RegenerateConfig) -> None:
    """Refuse an output that `generate` would not read, or that is part of the corpus.

    Raises:
        ConfigError: it is one of these.
    """
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--out {out}: JSON lines are written; choose a name that ends in .jsonl")
    for name in config.corpus:
        path = Path(name)
        inside = path.is_dir() and out.resolve().is_relative_to(path.resolve())
        if inside or (path.exists() and path.resolve() == out.resolve()):
            raise ConfigError(
                f"--out {out} is or lies in the corpus {name}, so it would be read as corpus; "
                "choose another --out"
            )


def _finished(
    out: Path, settings: Mapping[str, Any], config: RegenerateConfig
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
    refuse_other_settings(record["settings"], settings, out)
    reading = Reading(config)
    for _ in progress(reading, desc="compare the corpus", unit="rows", leave=False):
        pass
    hashes = [source["sha256"] for source in reading.sources]
    if hashes != [source["sha256"] for source in record["corpus"]]:
        raise ConfigError(
            f"{out} has the answers to another corpus, or to an earlier state of it; use another "
            "--out, or delete the file"
        )
    logger.info("%s is complete already: nothing to do", out)
    return record


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Hold the lock of an output file; it is released even if the process dies.

    Raises:
        RunError: another process holds it.
    """
    file = out.with_name(f".{out.name}.lock")
    lock = FileLock(file)
    try:
        held = lock.acquire(timeout=0.5)
    except Timeout:
        raise RunError(
            f"{out}: another process is writing this file; wait for it, or choose another --out"
        ) from None
    with held:
        yield
