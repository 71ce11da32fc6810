"""Write the target's own answers to a corpus: answer every conversation, then write them in order.

    answers.jsonl           the conversations, written at the end in one step
    answers.jsonl.sampling  how they were sampled, and the counts
    answers.jsonl.journal   the answers so far; deleted at the end, unless conversations failed
    .answers.jsonl.lock     held by the process that writes them

A run that is killed anywhere resumes from the journal. The finished file has the same bytes as that
of a run without a kill, if the answers have: neither file holds a time or a path of this machine.
"""

import hashlib
import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.sampling_record import FAILURES, FORMAT, read_record, record_path
from spec_data.corpus.sources import corpus_directory, expected_rows
from spec_data.models.identify import versions
from spec_data.regeneration.conversations import RAN_ON, TRUNCATED, conversations
from spec_data.regeneration.journal import Journal, journal_path
from spec_data.regeneration.local import LocalBackend
from spec_data.regeneration.servers import ServerBackend
from spec_data.shards.errors import ConfigError, CorpusError, RunError
from spec_data.shards.files import (
    atomic_write,
    dump_json,
    remove_left_of,
    sha256_file,
    write_atomically,
)
from spec_data.shards.resumable import differing_settings, process_lock, refuse_changes
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.progress import progress

logger = logging.getLogger(__name__)

_SHOWN = 5  # failed conversations
_AS_TOKENS = "conversations written as token ids: their text would become other tokens"


@dataclass(kw_only=True)
class RegenerateResult(Result):
    """What became of every row of the corpus: written + failed + skipped == read.

    Attributes:
        settings: how the answers were sampled.
        failures: the row ("where"), id and reason of the failed conversations; the first 10,000.
        read: rows read; written: conversations with all of their answers.
        failed: conversations that were given up; the same command tries them again.
        skipped: rows that were left out, by reason.
        answers, tokens, prompt_tokens: of the conversations that were written.
        longest: tokens of the longest prompt with its answer.
        finish_reasons: answers by the reason for which they ended; "length" is the limit of tokens.
        notes: answers about which something is to be said, by what it is.
    """

    path: Path
    settings: Mapping[str, Any]
    failures: list[dict[str, str]]
    read: int
    written: int
    failed: int
    skipped: dict[str, int]
    answers: int
    tokens: int
    prompt_tokens: int
    longest: int
    finish_reasons: dict[str, int]
    notes: dict[str, int]
    next_command: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.failed:  # the same command tries them again
            self.again, self.exit_code = "retry", 1

    def __str__(self) -> str:
        def listed(numbers: Mapping[str, int]) -> str:
            return ", ".join(f"{number:,} {name}" for name, number in numbers.items()) or "none"

        tokens = f"{self.tokens:,} tokens" if self.tokens else "tokens not told by the server"
        by = self.settings.get("target_name") or self.settings.get("server_model")
        lines = [
            f"rows      {self.read:,} read = {self.written:,} written + {self.failed:,} failed + "
            f"{sum(self.skipped.values()):,} skipped",
            f"answers   {self.answers:,}, {tokens}; ended by {listed(self.finish_reasons)}",
            f"by        {by}",
        ]
        lines += [f"skipped   {listed(self.skipped)}"] if self.skipped else []
        lines += [f"note      {number:,} {note}" for note, number in self.notes.items()]
        truncated = self.finish_reasons.get(TRUNCATED, 0) - self.notes.get(RAN_ON, 0)
        if truncated > 0:
            lines.append(
                f"note      {truncated:,} answers were cut, at {self.settings['max_new_tokens']:,} "
                "tokens or where the target's context ends; `generate` does not supervise their "
                "end. Raise --max-new-tokens"
            )
        lines += [f"failed    {f['where']}: {f['reason']}" for f in self.failures[:_SHOWN]]
        return "\n".join(map(wrapped, lines))


def check_out(out: Path, corpus: Sequence[str]) -> None:
    """Refuse an output that cannot be written, that is no corpus, or that is part of this one.

    Raises:
        ConfigError: it is one of these.
    """
    check_file_to_write("--out", out)
    if out.suffix not in (".jsonl", ".ndjson"):
        raise ConfigError(f"--out {out}: JSON lines are written; choose a name that ends in .jsonl")
    for name in corpus:
        path = corpus_directory(name) or Path(name)
        if path.exists() and out.resolve().is_relative_to(path.resolve()):
            raise ConfigError(
                f"--out {out} is or lies in the corpus {path}, so it would be read as corpus; "
                "choose another --out"
            )


def regenerate(
    out: Path,
    reader: CorpusReader,
    backend: LocalBackend | ServerBackend,
    settings: Mapping[str, Any],
) -> RegenerateResult:
    """Answer the conversations of a corpus and write them, or resume a run.

    `out` is a file that `check_out` accepts, `reader` parses with `parse_question`, and `settings`
    decide the answers beside those of the backend.

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
        if out.exists() and not journal_path(out).exists():
            record = _complete_record(out, settings, reader)
        else:
            rows = expected_rows(reader.sources, reader.limit)
            bar = progress(total=rows, desc="regenerate", unit="rows")
            with bar, Journal(journal_path(out), settings, bar) as journal:
                backend.run(conversations(reader, settings["turns"]), journal)
                bar.update(max(0, sum(r.rows for r in reader.reports) - bar.n))  # no conversation
                record = _write(out, settings, reader, journal, backend)
            if not record["failed"]:
                journal.path.unlink(missing_ok=True)
    counts = record["counts"]
    return RegenerateResult(path=out, settings=settings, failures=record["failed"], **counts)


def _complete_record(
    out: Path, settings: Mapping[str, Any], reader: CorpusReader
) -> dict[str, Any]:
    """Return the record of an output that is complete already."""
    record = read_record(out)
    if record is None:
        raise ConfigError(
            f"--out {out} exists and has no {record_path(out).name}, so `regenerate` did not write "
            "it; choose another --out (nothing was changed)"
        )
    refuse_changes(differing_settings(record["settings"], settings), out)
    if sha256_file(out) != record["sha256"]:
        raise ConfigError(
            f"{out} has changed since it was written: it is damaged, or was edited. Delete it to "
            "answer the corpus again, or use another --out"
        )
    corpus = [source["sha256"] for source in record["corpus"]]
    # With a limit, the record has the sources that were read.
    sources = reader.sources[: len(corpus)] if reader.limit else reader.sources
    if corpus != [source.digest() for source in sources]:
        raise ConfigError(
            f"{out} has the answers to another corpus, or to an earlier state of it; use another "
            "--out, or delete the file"
        )
    logger.info("%s is complete already: nothing to do", out)
    return record


def _write(
    out: Path,
    settings: Mapping[str, Any],
    reader: CorpusReader,
    journal: Journal,
    backend: LocalBackend | ServerBackend,
) -> dict[str, Any]:
    """Write `out` in corpus order and its record, which is returned; read the corpus once more."""
    reader.quiet = True  # the first pass over the corpus has named its bad rows
    sha256, failed = hashlib.sha256(), list[dict[str, str]]()
    sums, skipped, finish_reasons, notes = (Counter[str]() for _ in range(4))
    longest = 0
    with atomic_write(out) as temporary:
        with temporary.open("wb") as file:
            for conversation in conversations(reader, settings["turns"]):
                error, where = journal.failures.get(conversation.id), conversation.record.where
                if error is not None:
                    reason = f"{error.kind}: {error}"
                    if error.retry:
                        failed.append({"where": where, "id": conversation.id, "reason": reason})
                    else:
                        skipped[error.kind] += 1
                    continue
                answers = journal.read(conversation.id)
                if len(answers) < len(conversation.slots):
                    raise CorpusError(
                        f"{where}: this conversation was not there when the answers were "
                        "generated. The corpus changed meanwhile; run the same command again to "
                        "answer it"
                    )
                sums.update(written=1)
                for answer in answers:
                    sums.update(answers=1, tokens=answer.tokens, prompt=answer.prompt_tokens)
                    longest = max(longest, answer.tokens + answer.prompt_tokens)
                    finish_reasons[answer.finish] += 1
                    notes.update([answer.note] if answer.note else [])
                    if not any(answer.message.values()):
                        notes["empty answers, which teach nothing"] += 1
                made = backend.rows(conversation, answers)
                notes[_AS_TOKENS] += "input_ids" in made[0]
                for row in made:
                    line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
                    sha256.update(line)
                    file.write(line)
        read = sum(report.rows for report in reader.reports)
        skipped += reader.refused + Counter(bad=sum(report.bad for report in reader.reports))
        if not sums["written"]:
            first = next(iter(journal.failures.values()), None)
            raise (RunError if failed else CorpusError)(
                f"no conversation has an answer: {read} rows read, {len(failed)} failed, "
                f"skipped {dict(skipped) or 'none'}"
                + (f"; the first: {first.kind}: {first}" if first else "")
            )
    record = {
        "format": FORMAT,
        "settings": settings,
        "sha256": sha256.hexdigest(),
        "corpus": [{"source": report.source, "sha256": report.sha256} for report in reader.reports],
        "counts": {
            "read": read,
            "written": sums["written"],
            "failed": len(failed),
            "skipped": dict(sorted(skipped.items())),
            "answers": sums["answers"],
            "tokens": sums["tokens"],
            "prompt_tokens": sums["prompt"],
            "longest": longest,
            "finish_reasons": dict(sorted(finish_reasons.items())),
            "notes": dict(sorted((+notes).items())),
        },
        "failed": failed[:FAILURES],
        "versions": versions(),
    }
    write_atomically(record_path(out), dump_json(record))
    return record
