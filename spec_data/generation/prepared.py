"""From a rendered document to the one that a plan stores: cut, trimmed, packed into bytes.

It is done where the document was rendered, in any process, because it costs as much as writing.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from spec_data.corpus.documents import Document

StoredTurn = tuple[str, int, int]


class Prepared(NamedTuple):
    """A document as a plan stores it, or the reason why it stores none.

    Attributes:
        source: the name of its source.
        dropped: the reason; None for a document that is stored.
        cut: tokens lost by the maximum length; tail: tokens removed after the last supervised one.
        digest: 16 bytes, the beginning of a SHA-256 over ids and mask; its doc_id in hex.
        ids, mask: int32 and uint8 per token, as bytes.
        turns: (role, start, end) of each.
    """

    source: str
    dropped: str | None = None
    cut: int = 0
    tail: int = 0
    digest: bytes = b""
    ids: bytes = b""
    mask: bytes = b""
    turns: tuple[StoredTurn, ...] = ()


@dataclass(frozen=True)
class Preparing:
    """How documents are prepared.

    No draft learns from the tokens after the last supervised one: the target is causal, nothing is
    drafted there, and the teacher of the last supervised token is the state before that token.

    Attributes:
        max_length: documents are cut at this many tokens; serving sees such beginnings, too.
        keep_tails: keep the tokens after the last supervised token.
    """

    max_length: int
    keep_tails: bool = False

    def __call__(self, document: Document) -> Prepared:
        """Return the prepared document."""
        mask = np.asarray(document.loss_mask, np.uint8)
        if not mask[1:].any():
            return Prepared(document.source, "nothing-supervised")
        length = self._trimmed(mask)
        tail, cut = len(mask) - length, max(0, length - self.max_length)
        if cut:
            mask = mask[: self.max_length]
            if not mask[1:].any():
                reason = "nothing-supervised-within-max-length"
                return Prepared(document.source, reason, cut, tail)
            length = self._trimmed(mask)
            tail += len(mask) - length
        mask = mask[:length]
        ids = np.asarray(document.input_ids[:length], np.int32)
        turns = ((t.role, t.start, min(t.end, length)) for t in document.turns if t.start < length)
        parts = ids.tobytes(), mask.tobytes()
        digest = hashlib.sha256(parts[0] + parts[1]).digest()[:16]
        return Prepared(document.source, None, cut, tail, digest, *parts, tuple(turns))

    def _trimmed(self, mask: np.ndarray) -> int:
        """Return how many tokens are left without the tail."""
        return len(mask) if self.keep_tails else int(np.flatnonzero(mask)[-1]) + 1
