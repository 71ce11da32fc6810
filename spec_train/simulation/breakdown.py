"""Acceptance by source, and by position in the response.

A *position* is the number of tokens that a response has before a verification step. It is counted
in ranges that double, because texts have very different lengths.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from spec_train.simulation.intervals import middle, resampled
from spec_train.simulation.samples import document_sample
from spec_train.simulation.simulated_decoding import (
    DOCUMENTS,
    ON_POLICY,
    STEPS,
    TOKENS,
    Arrays,
    SimulatedDocument,
    Step,
    acceptance_lengths,
    figures,
    no_counts,
)

EDGES = (0, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""First position of every range; the last range has no end."""
MOST_SOURCES = 40
"""Sources beyond this number, by tokens, are reported together."""
OTHERS = "other sources"
FEWEST_DOCUMENTS = 8
"""Resamples of fewer differ too little: two documents of one length would have no spread at all."""
MOST_GROUPS = 1000
"""Documents are resampled by themselves up to so many, and in so many groups beyond."""


def position_range(position: int) -> int:
    """Return the number of the range that holds a position of at least 0."""
    return bisect_right(EDGES, position) - 1


def range_json(number: int, rounds: int, length: float | None) -> dict[str, Any]:
    """Return the line of a range: `start`, `end` (None: no end), `rounds`, `acceptance_length`."""
    end = EDGES[number + 1] if number + 1 < len(EDGES) else None
    return {"start": EDGES[number], "end": end, "rounds": rounds, "acceptance_length": length}


class Breakdown:
    """The counts of an evaluation on a dataset, taken apart, and its sampled documents."""

    def __init__(self, depth: int, sampled: Iterable[int] = ()) -> None:
        """Start with nothing; `depth` is S, `sampled` the numbers of documents to keep."""
        self._sampled = set(sampled)
        self._total = no_counts(depth)
        self._counts: dict[tuple[str, str | int], np.ndarray] = {}
        """By ("source", name), ("range", number) and ("group", number)."""
        self._samples: dict[int, dict[str, Any]] = {}

    def add(self, document: int, source: str, arrays: Arrays) -> None:
        """Simulate and count a document of this number and source; `arrays`: see `judge_chains`."""
        simulated = SimulatedDocument(arrays)
        counts = simulated.counts()
        self._add("source", source, counts)
        self._add("group", document % MOST_GROUPS, counts)
        for number, steps in _steps_by_range(simulated).items():
            self._add("range", number, simulated.counts_of(steps))
        if document in self._sampled:
            self._samples[document] = document_sample(f"document {document}", source, simulated)

    def _add(self, kind: str, name: str | int, counts: np.ndarray) -> None:
        self._counts[kind, name] = self._counts.get((kind, name), 0) + counts
        if kind == "source":
            self._total += counts

    def add_all(self, other: Mapping[str, Any]) -> None:
        """Count the documents of another process: its `as_json`."""
        for kind, name, counts in other["counts"]:
            self._add(kind, name, np.array(counts))
        self._samples |= {number: sample for number, sample in other["samples"]}

    def as_json(self) -> dict[str, Any]:
        """Return everything that was counted, as plain JSON for `add_all`."""
        return {
            "counts": [[*key, counts.tolist()] for key, counts in self._counts.items()],
            "samples": [[number, sample] for number, sample in self._samples.items()],
        }

    @property
    def acceptance_length(self) -> float | None:
        """Of all documents; None before the first verification step."""
        length: float | None = figures(self._total)["acceptance_length"]
        return length

    def figures(self) -> dict[str, Any]:
        """Return what `eval --json` has of all documents.

        `documents`, `supervised_tokens`, `on_policy`, `simulated` (figures of simulated decoding,
        with the `interval` of the length), `by_source`, `by_position` and `samples`.
        """
        ranges = ((n, figures(counts)) for n, counts in sorted(self._of("range").items()))
        return {
            **_documents(self._total),
            "simulated": figures(self._total) | {"interval": self._interval()},
            "by_source": self._by_source(),
            "by_position": [range_json(n, f["rounds"], f["acceptance_length"]) for n, f in ranges],
            "samples": [self._samples[document] for document in sorted(self._samples)],
        }

    def _of(self, wanted: str) -> dict[Any, np.ndarray]:
        return {name: counts for (kind, name), counts in self._counts.items() if kind == wanted}

    def _interval(self) -> list[float] | None:
        """Return the interval of the length over documents; None for too few of them."""
        groups = [counts for _, counts in sorted(self._of("group").items()) if counts[STEPS]]
        if len(groups) < FEWEST_DOCUMENTS:
            return None
        return list(middle(acceptance_lengths(resampled(np.stack(groups)))))

    def _by_source(self) -> list[dict[str, Any]]:
        ranked = sorted(self._of("source").items(), key=lambda item: (-item[1][TOKENS], item[0]))
        lines, others = ranked[:MOST_SOURCES], ranked[MOST_SOURCES:]
        if others:
            lines.append((OTHERS, np.sum([counts for _, counts in others], axis=0)))
        names = ("rounds", "acceptance_length", "accept_rate")
        return [
            {"source": name, **_documents(counts)} | {n: figures(counts)[n] for n in names}
            for name, counts in lines
        ]


def _documents(counts: np.ndarray) -> dict[str, Any]:
    documents, tokens, own = counts[[DOCUMENTS, TOKENS, ON_POLICY]].tolist()
    return {"documents": documents, "supervised_tokens": tokens, "on_policy": own / max(tokens, 1)}


def _steps_by_range(document: SimulatedDocument) -> dict[int, list[Step]]:
    """Return the steps of a document by the range of their position."""
    found: dict[int, list[Step]] = {}
    for (start, _), steps in document.spans:
        for slot, tokens in steps:
            found.setdefault(position_range(slot + 2 - start), []).append((slot, tokens))
    return found
