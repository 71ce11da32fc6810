"""Acceptance on a dataset: all documents, by source, length and mode, and a few samples.

Each length has an interval, by resampling documents: the answers of one are not independent.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spec_train.simulation.intervals import FEWER, FEWEST, RESAMPLES, middle, resampled
from spec_train.simulation.modes import ordered
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
ALL, SOURCES, POSITIONS, CONTEXTS, MODES = "all", "sources", "positions", "contexts", "modes"


class Breakdown:
    """The counts of an evaluation on a dataset, and its sampled documents."""

    def __init__(self, depth: int, sampled: Iterable[int] = ()) -> None:
        """Start with nothing; `depth` is S, `sampled` the numbers of documents to keep."""
        self._sampled = set(sampled)
        self._total = no_counts(depth)
        self._tables = {name: Strata() for name in (ALL, SOURCES, POSITIONS, CONTEXTS, MODES)}
        self._samples: dict[int, dict[str, Any]] = {}

    def add(
        self, document: int, source: str, arrays: Arrays, modes: Sequence[Sequence[str]] = ()
    ) -> None:
        """Simulate and count a document of this number and source; `arrays`: see `judge_chains`.

        `modes` are those of each of its answers, in order (`simulation.modes`).
        """
        simulated = SimulatedDocument(arrays)
        counts = simulated.counts()
        self._total += counts
        group = document % MOST_GROUPS
        self._tables[ALL].add("", group, counts)
        self._tables[SOURCES].add(source, group, counts)
        parts: dict[str, dict[Any, list[SpanSteps]]]
        parts = {name: defaultdict(list) for name in (POSITIONS, CONTEXTS, MODES)}
        for answer, (span, steps) in enumerate(simulated.spans):
            for step in steps:
                known = step[0] + 2  # tokens of the document before what the step emits
                parts[POSITIONS][range_of(known - span[0])].append((span, [step]))
                parts[CONTEXTS][range_of(known)].append((span, [step]))
            for mode in modes[answer] if modes and steps else ():
                parts[MODES][mode].append((span, steps))
        for name, some in parts.items():
            for stratum, steps_of in some.items():
                self._tables[name].add(stratum, group, simulated.counts_of(steps_of))
        if document in self._sampled:
            self._samples[document] = document_sample(f"document {document}", source, simulated)

    def add_all(self, other: Mapping[str, Any]) -> None:
        """Count the documents of another process: its `as_json`."""
        for kind, table in self._tables.items():
            for stratum, group, counts in other[kind]:
                table.add(stratum, group, np.array(counts))
                if kind == ALL:
                    self._total += counts
        self._samples |= dict(other["samples"])

    def as_json(self) -> dict[str, Any]:
        """Return everything that was counted, as plain JSON for `add_all`."""
        tables = {kind: list(table.lines()) for kind, table in self._tables.items()}
        return tables | {"samples": list(self._samples.items())}

    @property
    def acceptance_length(self) -> float | None:
        """Of all documents; None before the first verification step."""
        length: float | None = figures(self._total)["acceptance_length"]
        return length

    def figures(self) -> dict[str, Any]:
        """Return what `eval --json` has of all documents.

        `documents`, `supervised_tokens`, `on_policy`, `simulated` (figures of simulated decoding,
        with the `interval` of the length), `by_source`, `by_position`, `by_context` (see
        `ranges.py`), `by_mode` (see `modes.py`) and `samples`.
        """
        positions, contexts = self._tables[POSITIONS], self._tables[CONTEXTS]
        return {
            **_documents(self._total),
            "simulated": figures(self._total) | {"interval": self._interval()},
            "by_source": self._by_source(),
            "by_position": [range_json(n, *positions.length(n)) for n in sorted(positions)],
            "by_context": [range_json(n, *contexts.length(n)) for n in sorted(contexts)],
            "by_mode": self._by_mode(),
            "samples": [self._samples[document] for document in sorted(self._samples)],
        }

    def _interval(self) -> list[float] | None:
        """Return the interval of the length over documents; None for too few of them."""
        return interval_of(self._tables[ALL].groups(""), RESAMPLES)

    def _by_source(self) -> list[dict[str, Any]]:
        table = self._tables[SOURCES]
        ranked = sorted(table, key=lambda name: (-table.sum(name)[TOKENS], name))
        lines = [(name, table.groups(name)) for name in ranked[:MOST_SOURCES]]
        if others := ranked[MOST_SOURCES:]:
            lines.append((OTHERS, np.concatenate([table.groups(name) for name in others])))
        return [_source_json(name, groups) for name, groups in lines]

    def _by_mode(self) -> list[dict[str, Any]]:
        table = self._tables[MODES]
        return [mode_json(mode, *table.length(mode)) for mode in ordered(list(table))]


class Strata(dict[Any, dict[int, np.ndarray]]):
    """Counts by part of what was measured, such as a source, and by group of documents."""

    def add(self, stratum: Any, group: int, counts: np.ndarray) -> None:
        """Add counts, int64 [5 + 6 S]."""
        groups = self.setdefault(stratum, {})
        groups[group] = groups.get(group, 0) + counts

    def lines(self, *strata: Any) -> Iterator[tuple[Any, int, list[int]]]:
        """Yield every entry, of all strata or of these, as plain JSON."""
        for stratum in strata or self:
            for group, counts in self[stratum].items():
                yield stratum, group, counts.tolist()

    def sum(self, stratum: Any) -> np.ndarray:
        """Return the counts of a stratum."""
        return self.groups(stratum).sum(0)

    def groups(self, stratum: Any) -> np.ndarray:
        """Return the counts of each group of a stratum that has some, int64 [G, 5 + 6 S]."""
        return np.stack([counts for _, counts in sorted(self[stratum].items())])

    def length(self, stratum: Any) -> tuple[int, float | None, list[float] | None]:
        """Return verifications, acceptance length and interval of a stratum."""
        one = figures(self.sum(stratum))
        return one["rounds"], one["acceptance_length"], interval_of(self.groups(stratum))


def interval_of(groups: np.ndarray, resamples: int = FEWER) -> list[float] | None:
    """Return the interval of the length of counts, int64 [G, 5 + 6 S], over the groups."""
    groups = groups[groups[:, STEPS] > 0]
    if len(groups) < FEWEST:
        return None
    return list(middle(acceptance_lengths(resampled(groups, resamples=resamples))))


def _source_json(name: str, groups: np.ndarray) -> dict[str, Any]:
    counts, names = groups.sum(0), ("rounds", "acceptance_length", "accept_rate")
    measured = {n: figures(counts)[n] for n in names}
    return {"source": name, **_documents(counts), **measured, "interval": interval_of(groups)}


def mode_json(
    mode: str, rounds: int, length: float | None, interval: Sequence[float] | None
) -> dict[str, Any]:
    """Return the line of a mode."""
    figures_of = {"rounds": rounds, "acceptance_length": length, "interval": interval}
    return {"mode": mode, **figures_of}


def _documents(counts: np.ndarray) -> dict[str, Any]:
    documents, tokens, same = counts[[DOCUMENTS, TOKENS, ON_POLICY]].tolist()
    return {"documents": documents, "supervised_tokens": tokens, "on_policy": same / max(tokens, 1)}
