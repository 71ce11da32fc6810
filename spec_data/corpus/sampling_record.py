"""The record beside a corpus that `regenerate` wrote: which model sampled its answers, and how.

`answers.jsonl` has its record in `answers.jsonl.sampling`, a JSON file. `regenerate` writes it, and
`generate --on-policy` reads it. The suffix is none of a corpus file, so that a directory of corpora
may hold such files.

    format       FORMAT
    settings     everything that decides the answers: the target or the servers' model, temperature,
                 top_p, top_k, max_new_tokens, seed, turns, chat_template_kwargs, ...
    sha256       of the corpus file
    corpus       the sources that the prompts come from, with their hashes
    counts       rows read, written, failed and skipped; answers, tokens and finish reasons
    failed       the conversations without an answer: row, id and reason; the first FAILURES
    versions     of the programs
"""

from pathlib import Path
from typing import Any

from spec_data.shards.errors import CorpusError
from spec_data.shards.files import read_object

FORMAT = "spec-data sampling 1"
FAILURES = 10_000


def record_path(corpus: Path) -> Path:
    """Return the path of the record of a corpus file."""
    return corpus.with_name(f"{corpus.name}.sampling")


def read_record(corpus: Path) -> dict[str, Any] | None:
    """Return the record of a corpus file, or None if it has none.

    Raises:
        CorpusError: the record is damaged, or of a later release.
    """
    file = record_path(corpus)
    if not file.is_file():
        return None
    record = read_object(file, CorpusError)
    if record.get("format") != FORMAT or not isinstance(record.get("settings"), dict):
        raise CorpusError(
            f"{file}: not a record of {FORMAT!r}; delete it to use {corpus} without it, or run "
            "`spec-data regenerate` again"
        )
    return record
