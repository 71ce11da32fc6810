"""The record beside a corpus that `regenerate` wrote: which model sampled its answers, and how.

`answers.jsonl` has its record in `answers.jsonl.sampling`, a JSON file: everything that decides the
answers (`settings`), the hashes of the corpus file and of the sources of its prompts, counts, and
the conversations without an answer. `regenerate` writes it, and `generate --on-policy` reads it.
The suffix is none of a corpus file, so that a directory of corpora may hold such files.
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
