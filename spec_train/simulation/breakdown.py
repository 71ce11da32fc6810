"""Acceptance on a dataset: all documents, by source and length, an interval, and a few samples."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spec_train.simulation.intervals import FEWEST, middle, resampled
from spec_train.simulation.ranges import range_json, range_of
from spec_train.simulation.samples import document_sample
from spec_train.simulation.simulated_decoding import (
    DOCUMENTS,
    ON_POLICY,
    STEPS,
    TOKENS,
    Arrays,
    SimulatedDocument,
    SpanSteps,
    acceptance_lengths,
    figures,
    no_counts,
)

MOST_SOURCES = 40
"""Sources beyond this number, by tokens, are reported together."""
OTHERS = "other sources"
MOST_GROUPS = 1000
"""Documents are resampled by themselves up to so many, and in so many groups beyond."""


class Breakdown:
    """The counts of an evaluation on a dataset, and its sampled documents."""

    def __init__(self, depth: int, sampled: Iterable[int] = ()) -> None:
        """Start with nothing; `depth` is S, `sampled` the numbers of documents to keep."""
        self._sampled = set(sampled)
        self._total = no_counts(depth)
        self._sources: dict[str, np.ndarray] = {}
        self._groups: dict[int, np.ndarray] = {}
        self._positions: dict[int, np.ndarray] = {}
        self._contexts: dict[int, np.ndarray] = {}
        self._samples: dict[int, dict[str, Any]] = {}

    def add(self, document: int, source: str, arrays: Arrays) -> None:
        """Simulate and count a document of this number and source; `arrays`: see `judge_chains`."""
        simulated = SimulatedDocument(arrays)
        counts = simulated.counts()
        self._add(self._sources, source, counts)
        self._add(self._groups, document % MOST_GROUPS, counts)
        positions: dict[int, list[SpanSteps]] = {}
        contexts: dict[int, list[SpanSteps]] = {}
        for span, steps in simulated.spans:
            for step in steps:
                known = step[0] + 2  # tokens of the document before what the step emits
                positions.setdefault(range_of(known - span[0]), []).append((span, [step]))
                contexts.setdefault(range_of(known), []).append((span, [step]))
        for table, ranges in ((self._positions, positions), (self._contexts, contexts)):
            for number, some in ranges.items():
                self._add(table, number, simulated.counts_of(some))
        if document in self._sampled:
            self._samples[document] = document_sample(f"document {document}", source, simulated)

    def _add(self, table: dict[Any, np.ndarray], name: str | int, counts: np.ndarray) -> None:
        table[name] = table.get(name, 0) + counts
        if table is self._sources:
            self._total += counts

    def add_all(self, other: Mapping[str, Any]) -> None:
        """Count the documents of another process: its `as_json`."""
        for kind, table in self._tables().items():
            for name, counts in other[kind]:
                self._add(table, name, np.array(counts))
        self._samples |= dict(other["samples"])

    def as_json(self) -> dict[str, Any]:
        """Return everything that was counted, as plain JSON for `add_all`."""
        tables = {
            kind: [[name, counts.tolist()] for name, counts in table.items()]
            for kind, table in self._tables().items()
        }
        return tables | {"samples": list(self._samples.items())}

    def _tables(self) -> dict[str, dict[Any, np.ndarray]]:
        return {
            "sources": self._sources,
            "groups": self._groups,
            "positions": self._positions,
            "contexts": self._contexts,
        }

    @property
    def acceptance_length(self) -> float | None:
        """Of all documents; None before the first verification step."""
        length: float | None = figures(self._total)["acceptance_length"]
        return length

    def figures(self) -> dict[str, Any]:
        """Return what `eval --json` has of all documents.

        `documents`, `supervised_tokens`, `on_policy`, `simulated` (figures of simulated decoding,
        with the `interval` of the length), `by_source`, `by_position`, `by_context` (see
        `ranges.py`) and `samples`.
        """
        return {
            **_documents(self._total),
            "simulated": figures(self._total) | {"interval": self._interval()},
            "by_source": self._by_source(),
            "by_position": _by_range(self._positions),
            "by_context": _by_range(self._contexts),
            "samples": [self._samples[document] for document in sorted(self._samples)],
        }

    def _interval(self) -> list[float] | None:
        """Return the interval of the length over documents; None for too few of them."""
        groups = [counts for _, counts in sorted(self._groups.items()) if counts[STEPS]]
        if len(groups) < FEWEST:
            return None
        return list(middle(acceptance_lengths(resampled(np.stack(groups)))))

    def _by_source(self) -> list[dict[str, Any]]:
        ranked = sorted(self._sources.items(), key=lambda item: (-item[1][TOKENS], item[0]))
        lines, others = ranked[:MOST_SOURCES], ranked[MOST_SOURCES:]
        if others:
            lines.append((OTHERS, np.sum([counts for _, counts in others], axis=0)))
        names = ("rounds", "acceptance_length", "accept_rate")
        return [
            {"source": name, **_documents(counts)} | {n: figures(counts)[n] for n in names}
            for name, counts in lines
        ]


def _by_range(table: Mapping[int, np.ndarray]) -> list[dict[str, Any]]:
    found = ((number, figures(counts)) for number, counts in sorted(table.items()))
    return [range_json(n, one["rounds"], one["acceptance_length"]) for n, one in found]


def _documents(counts: np.ndarray) -> dict[str, Any]:
    documents, tokens, same = counts[[DOCUMENTS, TOKENS, ON_POLICY]].tolist()
    return {"documents": documents, "supervised_tokens": tokens, "on_policy": same / max(tokens, 1)}
