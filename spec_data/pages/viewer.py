"""What the viewer of tokens reads, and the documents of a dataset or corpus in that form.

The data of `viewer.js` are `note` (a sentence above), `noun` and `item` (what a document and a part
of it that can be selected are called), `modes` (what can be shown: [class, title, keys], each key
of the legend [class, text]) and `documents`. A document has a `head` (a line of figures), an `id`,
and `segments`: {"title", "learned", "items"}; an item has `words`, each [text, class], and `about`,
the lines that are shown when it is selected.

A page may hold millions of tokens of a dataset. Their documents are compact instead, and the script
expands the one that is shown: tokens are rows (`t`) of one table of `texts`, `tokens` (ids) and
`special` rows. `m` and `known` are runs of supervised tokens and of tokens with a prediction of the
target; `wrong` has position and row of every first choice that is another token; `entropy` and
`nll` are those of the known tokens. `join` has the texts that differ from those of the table.

Shapes: T tokens of a document, K of them have a known first choice of the target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from spec_data.pages.page import Viewer, shown
from spec_data.pages.token_texts import Joiner, TokenTexts
from spec_data.shards.even_sample import even_sample

MOST_TOKENS = 4_000_000
"""Tokens that a page embeds at most, about 5 bytes each."""
_SPECIAL = ["special", "special token"]
_MODES = [
    ["supervised", "supervised tokens", [["sup", "supervised: learned by drafts"], _SPECIAL]],
    [
        *("choice", "the target's first choice"),
        [["right", "the target's first choice"], ["wrong", "not its first choice"], _SPECIAL],
    ],
    [
        *("entropy", "the target's entropy"),
        [
            ["e0", "below 0.25 nats"],
            *(["e1", "0.25 to 1"], ["e2", "1 to 2"], ["e3", "2 to 3"], ["e4", "3 or more"]),
        ],
    ],
]


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

    @property
    def head(self) -> str:
        """The line of figures."""
        words = [f"Document {self.number:,}", self.source]
        words.append(f"{len(self.ids):,} tokens, {np.count_nonzero(self.mask):,} supervised")
        if self.teacher is not None and len(self.teacher.choice):
            right = float((self.teacher.choice == self.ids[self.teacher.known]).mean())
            words.append(f"{shown(right, 'share')} the target's first choice")
            if self.teacher.nll is not None:
                words.append(f"NLL {self.teacher.nll.mean():.2f} nats")
        return " · ".join(words)


def token_viewer(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[ViewedDocument], note: str
) -> Viewer:
    """Return the viewer of documents, at least one; `note` is a sentence above it."""
    known = TokenTexts(tokenizer)
    teachers = [d.teacher for d in documents if d.teacher is not None]
    used = [d.ids for d in documents] + [teacher.choice for teacher in teachers]
    tokens = np.unique(np.concatenate(used).astype(np.int64))
    texts = known.table(tokens.tolist())
    modes = 1 if not teachers else 2 if all(t.entropy is None for t in teachers) else 3
    data = {
        "note": note,
        "noun": "document",
        "item": "token",
        "modes": _MODES[:modes],
        "texts": texts,
        "tokens": tokens.tolist(),
        "special": [i for i, token in enumerate(tokens.tolist()) if token in known.special],
        "documents": [_compact(d, tokens, texts) for d in documents],
    }
    return Viewer(data=data)


def _compact(document: ViewedDocument, tokens: np.ndarray, texts: list[str]) -> dict[str, Any]:
    rows = np.searchsorted(tokens, document.ids)
    data: dict[str, Any] = {
        "head": document.head,
        "id": document.name,
        "t": rows.tolist(),
        "m": spans_of(document.mask != 0),
        "turns": [list(turn) for turn in document.turns],
    }
    if joined := Joiner().later(texts[row] for row in data["t"]):
        data["join"] = joined
    if (teacher := document.teacher) is not None:
        wrong = teacher.choice != document.ids[teacher.known]
        pairs = np.flatnonzero(teacher.known)[wrong], np.searchsorted(tokens, teacher.choice[wrong])
        data |= {"known": spans_of(teacher.known), "wrong": np.stack(pairs, 1).ravel().tolist()}
        if teacher.entropy is not None and teacher.nll is not None:
            data |= {n: np.round(getattr(teacher, n), 3).tolist() for n in ("entropy", "nll")}
    return data


def spans_of(marked: np.ndarray) -> list[int]:
    """Return where runs of marked tokens, bool [T], start and end: [a, b, a, b, ...], ascending."""
    steps = np.diff(np.concatenate([[0], marked.astype(np.int8), [0]]))
    return np.flatnonzero(steps).tolist()


# -- which documents -------------------------------------------------------------------------------


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
