"""The data of the viewer of tokens (`viewer.js`), and the documents of a dataset or plan as such.

The data are `note` (a sentence above), `noun` and `item` (what a document, and a part of it that
can be selected, are called), `modes` (what can be shown: [class, title, keys], each key of the
legend [class, text]) and `documents`. A document has a `head` (a line of figures), an `id`, and
`segments`: {"title", "learned", "items"}; an item has `words`, each [text, class], and `about`,
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
_SHADES = ["below 0.25 nats", "0.25 to 1", "1 to 2", "2 to 3", "3 or more"]
_MODES = [
    ["supervised", "supervised tokens", [["sup", "supervised: learned by drafts"], _SPECIAL]],
    [
        *("choice", "the target's first choice"),
        [["right", "the target's first choice"], ["wrong", "not its first choice"], _SPECIAL],
    ],
    ["entropy", "the target's entropy", [[f"e{i}", text] for i, text in enumerate(_SHADES)]],
]


@dataclass(frozen=True, kw_only=True)
class ViewedDocument:
    """One document, and what the target predicts for its tokens.

    Attributes:
        number: its number in the dataset or corpus; name: its id; source: where it is from.
        ids: int [T]; mask: 1 at supervised tokens, [T].
        turns: (role, start, end) of the turns that may be supervised.
        known: tokens for which a prediction is stored, bool [T]; never the first; None: no target.
        choice: the target's first choice at the known tokens, int64 [K].
        entropy, nll: of the prediction, and of the token under it, in nats, float64 [K]; None: not
            computed.
    """

    number: int
    name: str
    source: str
    ids: np.ndarray
    mask: np.ndarray
    turns: Sequence[tuple[str, int, int]]
    known: np.ndarray | None = None
    choice: np.ndarray | None = None
    entropy: np.ndarray | None = None
    nll: np.ndarray | None = None


def token_viewer(
    tokenizer: PreTrainedTokenizerBase, documents: Sequence[ViewedDocument], note: str
) -> Viewer:
    """Return the viewer of documents, at least one; `note` is a sentence above it."""
    single = TokenTexts(tokenizer)
    choices = [d.choice for d in documents if d.choice is not None]
    used = np.concatenate([d.ids for d in documents] + choices).astype(np.int64)
    tokens = np.unique(used)
    texts = single.table(tokens.tolist())
    modes = 1 if not choices else 2 if all(d.entropy is None for d in documents) else 3
    data = {
        "note": note,
        "noun": "document",
        "item": "token",
        "modes": _MODES[:modes],
        "texts": texts,
        "tokens": tokens.tolist(),
        "special": [i for i, token in enumerate(tokens.tolist()) if token in single.special],
        "documents": [_compact(d, tokens, texts) for d in documents],
    }
    return Viewer(data=data)


def _compact(document: ViewedDocument, tokens: np.ndarray, texts: list[str]) -> dict[str, Any]:
    ids, known, choice = document.ids, document.known, document.choice
    head = [f"Document {document.number:,}", document.source]
    head.append(f"{len(ids):,} tokens, {np.count_nonzero(document.mask):,} supervised")
    data: dict[str, Any] = {
        "id": document.name,
        "t": np.searchsorted(tokens, ids).tolist(),
        "m": spans_of(document.mask != 0),
        "turns": [list(turn) for turn in document.turns],
    }
    if joined := Joiner().later(texts[row] for row in data["t"]):
        data["join"] = joined
    if known is not None and choice is not None:
        wrong = choice != ids[known]
        pairs = np.flatnonzero(known)[wrong], np.searchsorted(tokens, choice[wrong])
        data |= {"known": spans_of(known), "wrong": np.stack(pairs, 1).ravel().tolist()}
        if len(choice):
            head.append(f"{shown(1 - float(wrong.mean()), 'share')} the target's first choice")
        if document.entropy is not None and document.nll is not None:
            data["entropy"] = np.round(document.entropy, 3).tolist()
            data["nll"] = np.round(document.nll, 3).tolist()
            head += [f"NLL {document.nll.mean():.2f} nats"] * bool(len(choice))
    return data | {"head": " · ".join(head)}


def spans_of(marked: np.ndarray) -> list[int]:
    """Return where runs of marked tokens, bool [T], start and end: [a, b, a, b, ...], ascending."""
    steps = np.diff(np.concatenate([[0], marked.astype(np.int8), [0]]))
    return np.flatnonzero(steps).tolist()


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


def sample_text(count: int, total: int) -> str:
    """Say how many documents a page shows of how many."""
    if count == total:
        return f"All {total:,} documents are in this page."
    return (
        f"This page holds {count:,} of {total:,} documents, evenly spaced. "
        "--documents N takes another number."
    )
