"""Acceptance on a dataset: all documents, by source, with an interval, and a few samples."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spec_train.simulation.intervals import FEWEST, middle, resampled
from spec_train.simulation.samples import document_sample
from spec_train.simulation.simulated_decoding import (
    DOCUMENTS,
    ON_POLICY,
    STEPS,
    TOKENS,
    Arrays,
    SimulatedDocument,
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
        self._samples: dict[int, dict[str, Any]] = {}

    def add(self, document: int, source: str, arrays: Arrays) -> None:
        """Simulate and count a document of this number and source; `arrays`: see `judge_chains`."""
        simulated = SimulatedDocument(arrays)
        counts = simulated.counts()
        self._add(self._sources, source, counts)
        self._add(self._groups, document % MOST_GROUPS, counts)
        if document in self._sampled:
            self._samples[document] = document_sample(f"document {document}", source, simulated)

    def _add(self, table: dict[Any, np.ndarray], name: str | int, counts: np.ndarray) -> None:
        table[name] = table.get(name, 0) + counts
        if table is self._sources:
            self._total += counts

    def add_all(self, other: Mapping[str, Any]) -> None:
        """Count the documents of another process: its `as_json`."""
        for table, lines in ((self._sources, other["sources"]), (self._groups, other["groups"])):
            for name, counts in lines:
                self._add(table, name, np.array(counts))
        self._samples |= dict(other["samples"])

    def as_json(self) -> dict[str, Any]:
        """Return everything that was counted, as plain JSON for `add_all`."""
        return {
            "sources": [[name, counts.tolist()] for name, counts in self._sources.items()],
            "groups": [[number, counts.tolist()] for number, counts in self._groups.items()],
            "samples": list(self._samples.items()),
        }

    @property
    def acceptance_length(self) -> float | None:
        """Of all documents; None before the first verification step."""
        length: float | None = figures(self._total)["acceptance_length"]
        return length

    def figures(self) -> dict[str, Any]:
        """Return what `eval --json` has of all documents.

        `documents`, `supervised_tokens`, `on_policy`, `simulated` (figures of simulated decoding,
        with the `interval` of the length), `by_source` and `samples`.
        """
        return {
            **_documents(self._total),
            "simulated": figures(self._total) | {"interval": self._interval()},
            "by_source": self._by_source(),
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


def _documents(counts: np.ndarray) -> dict[str, Any]:
    documents, tokens, same = counts[[DOCUMENTS, TOKENS, ON_POLICY]].tolist()
    return {"documents": documents, "supervised_tokens": tokens, "on_policy": same / max(tokens, 1)}
