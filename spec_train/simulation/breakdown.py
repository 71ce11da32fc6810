"""Acceptance by source, by position in the response, and by the length of the context.

A *position* is the number of tokens that a response has before a round; the context has those of
the prompt as well. Both are counted in ranges that double, because texts have very different
lengths.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from spec_train.simulation.intervals import middle, resampled
from spec_train.simulation.samples import document_sample
from spec_train.simulation.simulated_decoding import (
    Arrays,
    ServingSums,
    Walk,
    round_sums,
    walk_document,
    walk_lengths,
    walk_sums,
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


def by_position(counts: Mapping[int, Sequence[int]]) -> list[dict[str, Any]]:
    """Return the lines of real decoding.

    Args:
        counts: verifications, and tokens that they emitted, by the number of the range.
    """
    return [
        range_json(number, rounds, emitted / rounds)
        for number, (rounds, emitted) in sorted(counts.items())
        if rounds
    ]


def positions_of(emitted: Iterable[int]) -> list[int]:
    """Return the position of every round of a response, given the tokens that each emits.

    The first token of a response belongs to no round, so the first position is 1.
    """
    found, position = [], 1
    for count in emitted:
        found.append(position)
        position += count
    return found


class Breakdown:
    """The sums of an evaluation on a dataset, taken apart, and its sampled documents."""

    def __init__(self, depth: int, sampled: Iterable[int] = ()) -> None:
        """Start with nothing; `depth` is S, `sampled` the numbers of documents to keep."""
        self._depth, self._sampled = depth, set(sampled)
        self._sources: dict[str, tuple[int, ServingSums]] = {}
        self._ranges: dict[int, ServingSums] = {}
        self._groups: dict[int, ServingSums] = {}
        self._samples: dict[int, dict[str, Any]] = {}

    def add(self, document: int, source: str, arrays: Arrays) -> ServingSums:
        """Walk a document and count it; return its sums.

        Args:
            document, source: its number and its source.
            arrays: drafted, input_ids, target_argmax, loss_mask, as for `judge_chains`.
        """
        walk = walk_document(*arrays)
        sums = walk_sums(walk, *arrays[1:])
        count, total = self._sources.get(source, (0, ServingSums.zero(self._depth)))
        total += sums
        self._sources[source] = count + 1, total
        group = self._groups.setdefault(document % MOST_GROUPS, ServingSums.zero(self._depth))
        group += sums
        mask = arrays[3]
        for number, rounds in _rounds_by_range(walk).items():
            own = self._ranges.setdefault(number, ServingSums.zero(self._depth))
            own += round_sums(walk.outcomes, rounds, mask)
        if document in self._sampled:
            name = f"document {document}"
            self._samples[document] = document_sample(name, source, walk, *arrays[:3])
        return sums

    def add_all(self, other: Mapping[str, Any]) -> None:
        """Count the documents of another process: its `as_json`."""
        for source, documents, counts in other["sources"]:
            count, total = self._sources.get(source, (0, ServingSums.zero(self._depth)))
            total += ServingSums.from_array(np.array(counts))
            self._sources[source] = count + documents, total
        for name, known in (("ranges", self._ranges), ("groups", self._groups)):
            for number, counts in other[name]:
                own = known.setdefault(number, ServingSums.zero(self._depth))
                own += ServingSums.from_array(np.array(counts))
        self._samples |= {number: sample for number, sample in other["samples"]}

    def as_json(self) -> dict[str, Any]:
        """Return everything that was counted, as plain JSON for `add_all`."""
        return {
            "sources": [
                [name, count, sums.as_array().tolist()]
                for name, (count, sums) in self._sources.items()
            ],
            "ranges": [[n, sums.as_array().tolist()] for n, sums in self._ranges.items()],
            "groups": [[n, sums.as_array().tolist()] for n, sums in self._groups.items()],
            "samples": [[number, sample] for number, sample in self._samples.items()],
        }

    def figures(self) -> dict[str, Any]:
        """Return what `eval --json` has of all documents.

        `documents`, `supervised_tokens`, `on_policy`, `slots` and `walk` (each a `walk.Figures`;
        `walk` with the `interval` of its length), `by_source`, `by_position` and `samples`.
        """
        total = ServingSums.zero(self._depth)
        for _, sums in self._sources.values():
            total += sums
        return {
            "documents": sum(count for count, _ in self._sources.values()),
            "supervised_tokens": total.tokens,
            "on_policy": total.on_policy / max(total.tokens, 1),
            "slots": asdict(total.slot_figures()),
            "walk": asdict(total.walk_figures()) | {"interval": self._interval()},
            **self._parts(),
        }

    def _interval(self) -> list[float] | None:
        """Return the interval of the walk's length over documents; None for too few of them."""
        groups = [g.as_array() for _, g in sorted(self._groups.items()) if g.rounds]
        if len(groups) < FEWEST_DOCUMENTS:
            return None
        return list(middle(walk_lengths(resampled(np.stack(groups)))))

    def _parts(self) -> dict[str, Any]:
        ranked = sorted(self._sources.items(), key=lambda item: (-item[1][1].tokens, item[0]))
        lines = [_source_json(name, *found) for name, found in ranked[:MOST_SOURCES]]
        if len(ranked) > MOST_SOURCES:
            count, total = 0, ServingSums.zero(self._depth)
            for _, (documents, sums) in ranked[MOST_SOURCES:]:
                count += documents
                total += sums
            lines.append(_source_json(OTHERS, count, total))
        ranges = [
            range_json(number, sums.rounds, sums.walk_figures().acceptance_length)
            for number, sums in sorted(self._ranges.items())
        ]
        samples = [self._samples[document] for document in sorted(self._samples)]
        return {"by_source": lines, "by_position": ranges, "samples": samples}


def _rounds_by_range(walk: Walk) -> dict[int, list[tuple[int, int]]]:
    """Return the rounds of a document by the range of their position."""
    found: dict[int, list[tuple[int, int]]] = {}
    spans = iter(walk.spans)
    start, end = next(spans, (0, 0))
    for slot, tokens in walk.rounds:
        while slot >= end - 1:  # a round's slot is before the last token of its span
            start, end = next(spans)
        found.setdefault(position_range(slot + 2 - start), []).append((slot, tokens))
    return found


def _source_json(name: str, documents: int, sums: ServingSums) -> dict[str, Any]:
    figures = sums.walk_figures()
    return {
        "source": name,
        "documents": documents,
        "supervised_tokens": sums.tokens,
        "on_policy": sums.on_policy / max(sums.tokens, 1),
        "rounds": figures.rounds,
        "acceptance_length": figures.acceptance_length,
        "accept_rate": figures.accept_rate,
    }
