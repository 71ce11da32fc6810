"""The record beside a corpus that `regenerate` wrote: which model sampled its answers, and how.

`answers.jsonl` has its record in `answers.jsonl.sampling`, a JSON file: everything that decides the
answers (`settings`), the hashes of the corpus file and of the sources of its prompts, counts, and
the conversations without an answer. `regenerate` writes it, and `generate --on-policy` reads it.
The suffix is none of a corpus file, so that a directory of corpora may hold such files.

Every row has a digest of its messages too (`answers_digest`): rows may be filtered, shuffled and
joined with others, and an edited one is still noticed.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spec_data.shards.errors import CorpusError
from spec_data.shards.files import read_object

FORMAT = "spec-data sampling 1"
FAILURES = 10_000
DIGEST = "answers_digest"
"""The column of a row with its digest."""
_DIGESTED = ("messages", "tools", "chat_template_kwargs", "input_ids", "loss_mask")


def answers_digest(row: Mapping[str, Any]) -> str:
    """Return the digest of what decides the tokens of a row; other columns may be added to it.

    Nulls do not count, as columnar files add them, and nested columns may be JSON text.
    """
    facts = {name: _plain(row[name]) for name in _DIGESTED if row.get(name) not in (None, {}, [])}
    text = json.dumps(facts, sort_keys=True, ensure_ascii=False, default=str)
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:32]


def is_edited(row: Mapping[str, Any]) -> bool:
    """Return whether `regenerate` wrote a row that is another one now."""
    digest = row.get(DIGEST)
    return isinstance(digest, str) and digest != answers_digest(row)


def _plain(value: Any) -> Any:
    if isinstance(value, str) and value[:1] in ("[", "{"):
        try:
            return _plain(json.loads(value))
        except (RecursionError, ValueError):
            return value
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if part is not None}
    return list(map(_plain, value)) if isinstance(value, (list, tuple)) else value


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
