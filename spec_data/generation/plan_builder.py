"""Collect the documents of a plan: de-duplicate, write and count them."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spec_data.corpus.documents import Document
from spec_data.corpus.renderings import CUT_ANSWERS, UNENDED
from spec_data.generation.plan_file import PlannedDocuments, PlanWriter, Scratch
from spec_data.generation.prepared import Prepared, Preparing
from spec_data.generation.seen import Seen
from spec_data.shards.errors import CorpusError
from spec_data.shards.identity import count_kwargs

_LITTLE = 0.01  # of the tokens: fewer that are cut off need no warning
_COMPARED = 1024  # documents that are compared with the earlier ones at once


@dataclass
class DocumentCounts:
    """What happened to every corpus row and every document.

    Attributes:
        rows: corpus rows read; bad_rows: those that could not be parsed.
        unrendered: rows without a document, by reason; unrendered_examples: the first of each.
        rendered: documents; dropped: documents that were dropped, by reason.
        cut: documents that were cut to the maximum length; tokens_cut: tokens lost by it.
        tail_tokens_trimmed: tokens after the last supervised token that were removed.
        rendering: rows by the method that proved their turns, and counts of what was left out.
        kwargs_used: chats by the template kwargs that rendered them (see shards.identity).
    """

    rows: int = 0
    bad_rows: int = 0
    unrendered: dict[str, int] = field(default_factory=dict)
    unrendered_examples: dict[str, list[str]] = field(default_factory=dict)
    rendered: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    cut: int = 0
    tokens_cut: int = 0
    tail_tokens_trimmed: int = 0
    rendering: dict[str, int] = field(default_factory=dict)
    kwargs_used: dict[str, int] | None = None  # of a plan of an older release


def count_warnings(counts: Mapping[str, Any], tokens: int) -> list[str]:
    """Return what in the counts of a corpus misleads a draft, in words.

    Args:
        counts: the fields of `DocumentCounts`, as a plan or a manifest has them.
        tokens: those that are kept.
    """
    found = []
    cut, rendering = counts.get("tokens_cut", 0), counts.get("rendering", {})
    if cut > _LITTLE * (cut + tokens):
        found.append(
            f"{cut / (cut + tokens):.0%} of all tokens ({cut:,}) were cut off at the maximal "
            f"length, of {counts['cut']:,} documents: raise --max-length, or split long documents"
        )
    if unended := rendering.get(UNENDED, 0) - rendering.get(CUT_ANSWERS, 0):
        found.append(
            f"{unended:,} turns have no end-of-turn token: the chat template writes none after "
            "them, and the target's generation_config.json names none that can be appended "
            "(eos_token_id). A draft never learns to stop there"
        )
    return found


class PlanBuilder:
    """Collect prepared documents into a plan file: de-duplicate, write and count them.

    Memory holds 24 bytes per document, and the documents of one record batch.
    """

    def __init__(
        self, max_length: int, keep_tails: bool = False, folder: Path | None = None
    ) -> None:
        """Prepare documents as `Preparing` does, and write them to a temporary file in `folder`,
        or where the system puts such files; it is removed with the plan."""
        self.prepare = Preparing(max_length, keep_tails)
        self.counts = DocumentCounts()
        self.tokens = 0
        self._dropped: Counter[str] = Counter()
        self._seen = Seen()
        self._waiting: list[Prepared] = []
        self._scratch = Scratch(folder)
        self._file = self._scratch.path / "plan.arrow"
        self._writer = PlanWriter(self._file)

    def add(self, document: Document) -> None:
        """Prepare and add one document, or count it as dropped."""
        self.add_prepared(self.prepare(document))

    def add_prepared(self, document: Prepared) -> None:
        """Add one document that was prepared as `prepare` does, or count it as dropped."""
        self.counts.rendered += 1
        self.counts.cut += document.cut > 0
        self.counts.tokens_cut += document.cut
        self.counts.tail_tokens_trimmed += document.tail
        if document.dropped is not None:
            self._dropped[document.dropped] += 1
            return
        self._waiting.append(document)
        if len(self._waiting) == _COMPARED:
            self._write()

    def _write(self) -> None:
        """Write the documents that are waiting, but those that were added before."""
        waiting, self._waiting = self._waiting, []
        for document, new in zip(waiting, self._seen.add([d.digest for d in waiting]), strict=True):
            if new:
                self.tokens += len(document.mask)
                self._writer.add(document)
            else:
                self._dropped["duplicate"] += 1

    def discard(self) -> None:
        """Remove what was written."""
        self._writer.discard()
        self._scratch.remove()

    def count_rows(
        self,
        *,
        rows: int,
        bad_rows: int,
        unrendered: Mapping[str, int],
        unrendered_examples: Mapping[str, list[str]],
        rendering: Mapping[str, int],
        kwargs_used: Mapping[str, int],
        dropped: Mapping[str, int],
    ) -> None:
        """Store the counts of reading and rendering; see `DocumentCounts`.

        `dropped` counts, by reason, the documents that rendering dropped; they were never passed to
        `add`.
        """
        self.counts.rows, self.counts.bad_rows = rows, bad_rows
        self.counts.unrendered = dict(sorted(unrendered.items()))
        self.counts.unrendered_examples = dict(sorted(unrendered_examples.items()))
        self.counts.rendering = dict(rendering)
        self.counts.kwargs_used = count_kwargs(kwargs_used)
        self.counts.rendered += sum(dropped.values())
        self._dropped.update(dropped)

    def finish(self) -> PlannedDocuments:
        """Complete the file and the counts, and return the documents.

        Raises:
            CorpusError: no document is left.
            OSError: the disk is full.
        """
        self._write()
        self.counts.dropped = dict(sorted(self._dropped.items()))
        if not self.tokens:
            self.discard()
            raise CorpusError(
                f"no document is left to capture: {self.counts.rows} rows read, "
                f"{self.counts.bad_rows} bad, not rendered {self.counts.unrendered or 'none'}, "
                f"dropped {self.counts.dropped or 'none'}"
            )
        record = self._writer.finish()
        return PlannedDocuments(self._file, record.sha256, self._scratch)
