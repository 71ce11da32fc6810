"""Which documents a `select` keeps, and why it drops the others.

Conditions are applied in a fixed order, and a document is counted under the first one that it does
not meet. Conditions on the index come first; those that read stored columns see only what is left.

Shapes: D documents of the dataset.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spec_data.shards.errors import ConfigError, DatasetError, MissingError
from spec_data.terminal.progress import progress
from spec_data.views.stored_documents import StoredDocuments

Wanted = Callable[[np.ndarray], np.ndarray]
"""Returns which of some documents, int64 [n], meet a condition, bool [n]."""


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What documents must meet: `reason` is the slug under which others are counted."""

    reason: str
    wanted: Wanted


def choose(count: int, conditions: Iterable[Condition]) -> tuple[np.ndarray, dict[str, int]]:
    """Return which of `count` documents meet all conditions, bool [D], and the others by reason."""
    keep = np.ones(count, bool)
    dropped: dict[str, int] = {}
    for condition in conditions:
        left = np.flatnonzero(keep)
        bad = left[~condition.wanted(left)] if len(left) else left
        keep[bad] = False
        if len(bad):
            dropped[condition.reason] = len(bad)
    return keep, dropped


def within(values: np.ndarray, least: int, most: int | None) -> Wanted:
    """Return a condition on numbers of documents, int64 [D]: at least `least`, at most `most`."""
    fine = values >= least
    if most is not None:
        fine &= values <= most
    return lambda documents: fine[documents]


def of_sources(stored: StoredDocuments, names: Sequence[str]) -> Wanted:
    """Return the condition that a document is of one of these sources.

    Raises:
        ConfigError: the dataset has no such source.
    """
    own = stored.sources.to_pylist()
    known = list(dict.fromkeys(own))
    unknown = [name for name in names if name not in known]
    if unknown:
        listed = ", ".join(known[:10]) + (", ..." if len(known) > 10 else "")
        raise ConfigError(
            f"--source {unknown[0]}: {stored.dataset.path} has no such source; it has {listed}"
        )
    fine = np.fromiter((name in names for name in own), bool, len(own))
    return lambda documents: fine[documents]


def with_ids(stored: StoredDocuments, ids: Iterable[str], inside: bool = True) -> Wanted:
    """Return the condition that the id of a document is among `ids`, or is not."""
    known = set(ids)
    own = stored.dataset.doc_ids
    return lambda documents: np.fromiter(
        ((own[d] in known) == inside for d in documents.tolist()), bool, len(documents)
    )


def read_ids(file: Path) -> list[str]:
    """Read document ids, one per line; empty lines are skipped.

    Raises:
        MissingError: no such file. ConfigError: it is no text, or has no id.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise MissingError(f"--ids {file}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--ids {file}: cannot be read as text ({error})") from None
    found = [line.strip() for line in lines if line.strip()]
    if not found:
        raise ConfigError(f"--ids {file}: no document id in it; write one per line")
    return found


def check_ids(stored: StoredDocuments, ids: Sequence[str], file: Path) -> None:
    """Check that a dataset has all documents of a list.

    Raises:
        DatasetError: it lacks some.
    """
    lacking = sorted(set(ids) - set(stored.dataset.doc_ids))
    if lacking:
        raise DatasetError(
            f"--ids {file}: {len(lacking)} of {len(set(ids))} ids are not in "
            f"{stored.dataset.path} (first: {lacking[0]}); is it the list of another dataset, or "
            "of another mask? An id changes with the loss mask"
        )


def sample(stored: StoredDocuments, amount: str, seed: int) -> Wanted:
    """Return the condition that a document is in a random sample.

    `amount` is a number of documents such as 500, or a share such as 10% or 0.1, of those that are
    left. The documents with the lowest hashes of (seed, id) are taken. So the order of a dataset
    does not matter, and a larger sample contains a smaller one of the same seed.
    """
    own = stored.dataset.doc_ids

    def wanted(documents: np.ndarray) -> np.ndarray:
        count = sample_size(amount, len(documents))
        keys = [hashlib.sha256(f"{seed} {own[d]}".encode()).digest() for d in documents.tolist()]
        order = sorted(range(len(keys)), key=lambda place: (keys[place], place))
        fine = np.zeros(len(documents), bool)
        fine[order[:count]] = True
        return fine

    return wanted


def sample_size(amount: str, count: int) -> int:
    """Return the documents of a sample of `count`: a number, or a share rounded to the nearest.

    Raises:
        ConfigError: `amount` is no number above 0, or a share above 1.
    """
    text = amount.strip()
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    share = value / 100 if text.endswith("%") else value
    if not text.endswith("%") and value >= 1 and value.is_integer() and "." not in text:
        return min(int(value), count)
    if not 0 < share <= 1:
        raise ConfigError(
            f"--sample {amount}: expected a number of documents such as 500, or a share such as "
            "10% or 0.1"
        )
    return round(share * count)


def supervised_tokens(stored: StoredDocuments, policy: str) -> np.ndarray:
    """Return the supervised tokens that a document has and that a token precedes, int64 [D].

    The masks are those of a mask policy. Documents with 0 have nothing to learn.
    """
    documents = progress(range(len(stored)), desc="masks", unit="docs", leave=False)
    return np.fromiter(
        (int(stored.find(d).mask(policy)[1:].sum()) for d in documents), np.int64, len(stored)
    )
