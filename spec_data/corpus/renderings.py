"""What rendering a record results in, and the sums over many records."""

from collections import Counter
from dataclasses import dataclass, field

from spec_data.corpus.documents import Document

WITH_SYSTEM = "conversations with a system message"
WITHOUT_SYSTEM = "conversations without a system message"
CUT_ANSWERS = "answers cut at a limit of tokens, their end not supervised"
UNENDED = "turns without an end-of-turn token"
EMPTY_THOUGHTS = "empty think blocks, not supervised"
"""Names of counts that are read again."""


@dataclass
class Rendering:
    """The documents of one record, and what is to be counted for it.

    Attributes:
        method: how the record was rendered.
        documents: one, or one per assistant turn.
        counts: messages and turns that were left out, cut or completed, by what happened to them.
        dropped: turns without a document, by reason; a record without any document is an error.
        left_out: what the template left out, by kind ("developer messages").
        system: how a conversation is counted by its system message; "" for other records.
        kwargs: the template kwargs of a conversation, its own included, as JSON text.
    """

    method: str
    documents: list[Document] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    system: str = ""
    kwargs: str | None = None


class RenderCounts:
    """Sums over records, in the order in which each kind first occurred.

    Attributes:
        method: how the last record was rendered; `methods` counts records by method.
        left_out: what the template left out of the last record, by kind.
        counts, dropped: sums of those of `Rendering`; systems: records by their `system`.
        kwargs_used: documents by the template kwargs that rendered them.
    """

    def __init__(self) -> None:
        self.method: str | None = None
        self.methods: Counter[str] = Counter()
        self.left_out: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.dropped: Counter[str] = Counter()
        self.systems: Counter[str] = Counter()
        self.kwargs_used: Counter[str] = Counter()

    def count(self, result: Rendering, documents: int | None = None) -> None:
        """Add one record; `documents` is their number where the result does not hold them."""
        self.left_out = result.left_out
        self.method = result.method
        self.methods[result.method] += 1
        self.counts.update(result.counts)
        if result.system:
            self.systems[result.system] += 1
        self.dropped.update(result.dropped)
        if result.kwargs is not None:
            self.kwargs_used[result.kwargs] += (
                len(result.documents) if documents is None else documents
            )
