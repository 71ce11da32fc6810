"""Documents as the viewer of tokens reads them: compact, one table of texts for all of them.

Ids are numbers of rows of that table, two or four bytes each, as base64. The script builds the
elements of one document at a time, so a page of 10,000 documents opens at once.

Shapes: T tokens of a document, K of them have a known first choice of the target.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from spec_data.pages.page_parts import Viewer
from spec_data.pages.token_texts import Joiner, TokenTexts
from spec_data.shards.even_sample import even_sample

MOST_TOKENS = 4_000_000
"""Tokens that a page embeds at most, about 3 bytes each."""


@dataclass(frozen=True, kw_only=True)
class TeacherView:
    """What the target predicts for the tokens of a document.

    Attributes:
        known: tokens for which a prediction is stored, bool [T]; never the first one.
        choice: the target's first choice at the known tokens, int64 [K].
        entropy, nll: of the prediction, and of the token under it, in nats, float64 [K]; None: not
            computed.
    """

    known: np.ndarray
    choice: np.ndarray
    entropy: np.ndarray | None = None
    nll: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class ViewedDocument:
    """One document.

    Attributes:
        number: its number in the dataset or corpus; name: its id; source: where it is from.
        ids: int [T]; mask: 1 at supervised tokens, [T].
        turns: (role, start, end) of the turns that may be supervised.
        teacher: what the target predicts; None without a target.
    """

    number: int
    name: str
    source: str
    ids: np.ndarray
    mask: np.ndarray
    turns: Sequence[tuple[str, int, int]]
    teacher: TeacherView | None = None


def affordable_sample(
    documents: Sequence[int], most: int, costs: np.ndarray, limit: float
) -> list[int]:
    """Return an even sample of at most `most` documents whose costs together are within a limit.

    `costs` are those of all documents of the dataset, [D]. One document may cost more.
    """
    sample = even_sample(documents, most)
    while len(sample) > 1 and (cost := float(costs[sample].sum())) > limit:
        sample = even_sample(documents, max(1, int(len(sample) * min(limit / cost, 1 - 1e-9))))
    return sample


def shown_documents(lengths: np.ndarray, most: int) -> list[int]:
    """Return the numbers of the documents of a page, at most `most` and MOST_TOKENS together.

    `lengths` are the tokens per document, int64 [D].
    """
    return affordable_sample(range(len(lengths)), most, lengths, MOST_TOKENS)


def sample_text(shown: int, total: int) -> str:
    """Say how many documents a page shows of how many."""
    if shown == total:
        return f"All {total:,} documents are in this page." if total != 1 else "One document."
    return (
        f"This page holds {shown:,} of {total:,} documents, evenly spaced. "
        "--documents N takes another number."
    )


def token_viewer(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[ViewedDocument], note: str
) -> Viewer:
    """Return the viewer of documents.

    Args:
        tokenizer: that of the ids. documents: at least one.
        note: a sentence above the viewer: which documents these are.

    Returns:
        A part of a page.
    """
    known = TokenTexts(tokenizer)
    used = [d.ids for d in documents]
    used += [d.teacher.choice for d in documents if d.teacher is not None]
    table = np.unique(np.concatenate(used).astype(np.int64))
    texts = known.table(table.tolist())
    wide = len(table) > 1 << 16
    coded = _Coding(table, texts, np.dtype("<u4" if wide else "<u2"))
    sources = list(dict.fromkeys(d.source for d in documents))
    places = {name: place for place, name in enumerate(sources)}
    data = {
        "note": note,
        "width": 4 if wide else 2,
        "pieces": texts,
        "tokens": table.tolist(),
        "special": [i for i, token in enumerate(table.tolist()) if token in known.special],
        "sources": sources,
        "documents": [_document(d, coded, places[d.source]) for d in documents],
    }
    return Viewer(
        name="tokens",
        data=data,
        script=_asset("token_viewer.js"),
        style=_asset("token_viewer.css"),
    )


@dataclass(frozen=True)
class _Coding:
    """How ids become texts and bytes."""

    table: np.ndarray
    texts: list[str]
    kind: np.dtype

    def rows(self, ids: np.ndarray) -> np.ndarray:
        """Return the rows of ids in the table, int64 [n]."""
        return np.searchsorted(self.table, np.asarray(ids, np.int64))

    def text(self, rows: np.ndarray) -> str:
        """Return rows as base64."""
        return _base64(rows.astype(self.kind).tobytes())


def _document(document: ViewedDocument, coded: _Coding, source: int) -> dict[str, Any]:
    rows = coded.rows(document.ids)
    texts = [coded.texts[row] for row in rows.tolist()]
    found: dict[str, Any] = {
        "n": document.number,
        "id": document.name,
        "s": source,
        "t": coded.text(rows),
        "m": spans_of(document.mask != 0),
        "turns": [list(turn) for turn in document.turns],
    }
    joined = Joiner().later(texts)
    if joined:
        found["join"] = joined
    teacher = document.teacher
    if teacher is not None:
        right = teacher.choice == document.ids[teacher.known]
        found["k"] = spans_of(teacher.known)
        found["a"] = _base64(np.packbits(right, bitorder="little").tobytes())
        found["c"] = coded.text(coded.rows(teacher.choice[~right]))
        if teacher.entropy is not None:
            found["e"] = np.round(teacher.entropy, 3).tolist()
        if teacher.nll is not None:
            found["l"] = np.round(teacher.nll, 3).tolist()
    return found


def spans_of(marked: np.ndarray) -> list[int]:
    """Return where runs of marked tokens start and end, one after another: [a, b, a, b, ...].

    Args:
        marked: bool [T].

    Returns:
        Ascending positions, an even number of them; tokens a to b - 1 of each pair are marked.
    """
    steps = np.diff(np.concatenate([[0], marked.astype(np.int8), [0]]))
    return np.flatnonzero(steps).tolist()


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@cache
def _asset(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")
