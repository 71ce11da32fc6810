"""A document as a dict of its columns, which knows where it was read.

Whoever trains on it needs more than its columns: the target's head, and what the teacher is made
of. `Origin` is small enough to be sent with every document and every batch.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Origin:
    """Where documents were read: of one dataset, or of several datasets of one target."""

    location: str  # of the dataset, a path from the root or a URL
    fingerprint: str  # of its manifest
    supervision: str  # as in its manifest
    head: str  # checksum of the file with the target's embedding and head


class Document(dict[str, Any]):
    """A document of `dataset`: a dict of its columns.

    Copies, and other processes that receive it, know its `origin` and its `number` there; only the
    process that has read it has its `dataset`.
    """

    dataset: Any
    origin: Origin | None
    number: int | None

    def __init__(
        self,
        columns: Mapping[str, Any] | Iterable[Any] = (),
        origin: Origin | None = None,
        number: int | None = None,
    ) -> None:
        """Hold `columns`."""
        super().__init__(columns)
        self.origin, self.number = origin, number

    def __reduce__(self) -> Any:
        return Document, (dict(self), self.origin, self.number)

    def copy(self) -> "Document":
        """Return another dict of the same columns, which knows the same."""
        other = Document(self, self.origin, self.number)
        if "dataset" in vars(self):
            other.dataset = self.dataset
        return other

    __copy__ = copy
