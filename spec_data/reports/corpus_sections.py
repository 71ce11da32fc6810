"""What a page says of documents without their states: lengths, sources, and what was left out."""

from typing import Any

import numpy as np
import pyarrow as pa

from spec_data.generation.plan import count_warnings
from spec_data.pages.page_parts import Axis, Bars, Note, Part, Section, Table, histogram
from spec_data.report import counts_rows
from spec_data.shards.checksums import numbers

_MOST_SOURCES = 50


def documents_section(
    lengths: np.ndarray, supervised: np.ndarray, sources: pa.Array | pa.ChunkedArray
) -> Section:
    """Return the section on lengths and sources.

    Args:
        lengths, supervised: tokens and supervised tokens per document, int64 [D].
        sources: the source of each document, texts [D].

    Returns:
        Two histograms, and a table by source.
    """
    parts: list[Part] = [
        histogram(
            lengths,
            "Length of documents",
            "tokens per document",
            "documents",
            "documents",
            note=_spread(lengths, "tokens"),
        ),
        histogram(
            supervised,
            "Supervised tokens",
            "supervised tokens per document",
            "documents",
            "documents",
            note=_spread(supervised, "supervised tokens"),
        ),
        _source_table(lengths, supervised, sources),
    ]
    return Section(
        title="Documents",
        parts=parts,
        text="A document is one conversation or text, as token ids. Drafts learn its supervised "
        "tokens.",
    )


def _spread(values: np.ndarray, what: str) -> str:
    low, middle, high = (int(np.quantile(values, q, method="lower")) for q in (0.05, 0.5, 0.95))
    return (
        f"Median {middle:,} {what}; 5 % have at most {low:,}, 5 % have more than {high:,}; the "
        f"most is {int(values.max()):,}."
    )


def _source_table(
    lengths: np.ndarray, supervised: np.ndarray, sources: pa.Array | pa.ChunkedArray
) -> Table:
    whole = sources.combine_chunks() if isinstance(sources, pa.ChunkedArray) else sources
    coded = whole.dictionary_encode()
    own = numbers(coded.indices)
    names = coded.dictionary.to_pylist()
    counted = [
        np.bincount(own, weights, len(names)).astype(np.int64)
        for weights in (None, lengths.astype(np.float64), supervised.astype(np.float64))
    ]
    rows = [
        [name, *(int(c[i]) for c in counted), float(counted[2][i] / max(counted[1][i], 1))]
        for i, name in enumerate(names)
    ]
    rows.sort(key=lambda row: -row[2])
    note = f"The {_MOST_SOURCES} largest of {len(rows):,}." if len(rows) > _MOST_SOURCES else ""
    return Table(
        title="Sources",
        columns=[
            ("source", "text"),
            ("documents", "count"),
            ("tokens", "count"),
            ("supervised tokens", "count"),
            ("supervised", "share"),
        ],
        rows=rows[:_MOST_SOURCES],
        note=note,
    )


def counts_section(counts: dict[str, Any], tokens: int) -> Section:
    """Return the section on what became of every corpus row and document.

    Args:
        counts: of a plan or a manifest.
        tokens: those that are kept.

    Returns:
        A chart of what was left out by reason, if anything was, the table of all counts, and an
        example of each reason that has one.
    """
    reasons = {"bad row": counts["bad_rows"]}
    reasons |= {f"not rendered: {name}": n for name, n in counts["unrendered"].items()}
    reasons |= {f"dropped: {name}": n for name, n in counts["dropped"].items()}
    left = {name: n for name, n in reasons.items() if n}
    parts: list[Part] = [
        Note(text=f"{text[0].upper()}{text[1:]}.", warning=True)
        for text in count_warnings(counts, tokens)
    ]
    if left:
        parts.append(
            Bars(
                title="Rows and documents left out",
                x=Axis(title="reason", format="text"),
                y=Axis(title="rows or documents", format="count", least=0),
                labels=list(left),
                series={"left out": list(left.values())},
            )
        )
    parts.append(
        Table(
            title="From rows to documents",
            columns=[("", "text"), ("count", "count")],
            rows=[[name.strip(), value] for name, value in counts_rows(counts)],
            note="" if left or counts["cut"] else "Nothing was left out.",
        )
    )
    examples = {n: found[0] for n, found in counts.get("unrendered_examples", {}).items() if found}
    if examples:
        parts.append(
            Table(
                title="An example of each reason",
                columns=[("reason", "text"), ("message", "text")],
                rows=[list(item) for item in examples.items()],
            )
        )
    return Section(title="What was left out", parts=parts)
