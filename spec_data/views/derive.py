"""The manifest of a dataset that is made of others: what it takes over from them.

`provenance` records the command, its options and the fingerprints of the inputs. Counts stay true:
rendered = stored + dropped, and what the command leaves out is dropped, by reason. The agreement
with the target is kept where every source of text has all its documents and masks; figures of a
part of it cannot be computed without the target, so they are left out.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import structs

from spec_data.shards.likelihood import Agreement, AgreementTable
from spec_data.shards.records import plain
from spec_data.shards.schema import (
    FINAL,
    TEACHERS,
    CodecError,
    Column,
    CountsRecord,
    LeftOut,
    Manifest,
    Provenance,
    ProvenanceInput,
    Totals,
    layer_column,
)

DUPLICATE = "duplicate"  # the reason under which `generate` counts them
_OF_INPUT = ("captured_with", "packing", "settings")


def derived(
    command: str,
    options: Mapping[str, Any],
    inputs: Sequence[Manifest],
    columns: Sequence[Column],
    dropped: Mapping[str, int],
) -> Manifest:
    """Return the draft of a dataset that has `columns`, and is the first input in all else.

    `options` are those that decide the result. `dropped` has the documents that it leaves out, by
    reason.
    """
    first, named = inputs[0], {column.name: column for column in columns}
    layers = sorted({k for m in inputs for k in m.layers if layer_column(k) in named})
    given = {name: value for name, value in options.items() if value not in (None, (), [], "")}
    provenance = Provenance(
        command=command,
        options=json.loads(json.dumps(given)),  # as the file has it
        of=[_input(first, manifest) for manifest in inputs],
    )
    left = Counter(first.documents.dropped) + Counter(dropped)
    counts = structs.replace(
        first.documents,
        dropped=dict(sorted(left.items())),
        stored=first.totals.documents - sum(dropped.values()),
    )
    return first.changed(
        provenance=provenance,
        columns=tuple(_declared(column, inputs) for column in columns),
        layers=tuple(layers),
        draft_layers=_recorded_layers(inputs, layers),
        final=named[FINAL].tokens if FINAL in named else first.final,
        teacher=next(c.tokens for c in columns if c.name in TEACHERS),
        documents=counts,
        view=None,
        shards=(),
        totals=Totals(),
        files={},
        codec=None,
        card=None,
        left_out=LeftOut(),
        ancestors=[],
    )


def _input(first: Manifest, manifest: Manifest) -> ProvenanceInput:
    """Return what is recorded of an input: how it was captured, if not as the first."""
    other = {
        name: getattr(manifest, name)
        for name in _OF_INPUT
        if getattr(manifest, name) != getattr(first, name)
    }
    return ProvenanceInput(
        fingerprint=manifest.fingerprint,
        documents=manifest.totals.documents,
        provenance=manifest.provenance,
        **other,
    )


def _declared(column: Column, inputs: Sequence[Manifest]) -> Column:
    """Return a column with the largest errors that the inputs declare of it."""
    entries = [c for m in inputs for c in m.columns if c.name == column.name]
    errors = [c.error for c in entries if c.error]
    error = None
    if errors:
        tables = [structs.asdict(e) for e in errors]
        figures = {n: [t[n] for t in tables if t[n] is not None] for n in tables[0]}
        worst = {name: max(values) for name, values in figures.items() if values}
        error = CodecError(**worst | {"tokens": sum(e.tokens for e in errors)})
    return structs.replace(column, exact=all(c.exact for c in entries), error=error)


def _recorded_layers(
    inputs: Sequence[Manifest], layers: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    """Return the layers recorded for drafts that are all there, where the inputs agree on them."""
    recorded: dict[str, set[tuple[int, ...]]] = {}
    for draft, ids in (item for m in inputs for item in m.draft_layers.items()):
        recorded.setdefault(draft, set()).add(ids)
    agreed = {draft: next(iter(ids)) for draft, ids in recorded.items() if len(ids) == 1}
    return {draft: ids for draft, ids in agreed.items() if set(ids) <= set(layers)}


def with_sources(draft: Manifest, before: Sequence[str], after: Sequence[str]) -> Manifest:
    """Return a draft with the corpus and the agreement of the sources of text that are left.

    `before` and `after` have the source of each document of the input and of the result.
    """
    every, left = Counter(before), Counter(after)
    corpus = [s for s in draft.corpus if s.source not in every or s.source in left]
    agreement = draft.agreement
    if agreement and any(count != every[name] for name, count in left.items()):
        agreement = None
    elif agreement and left != every:
        agreement = joined_table([{n: a for n, a in agreement.sources.items() if n in left}])
    return draft.changed(corpus=corpus, agreement=agreement)


def joined_counts(counts: Sequence[CountsRecord], duplicates: int) -> CountsRecord:
    """Return `documents` of a union: sums, with its duplicates among the dropped documents."""
    sums = _summed([plain(record) for record in counts])
    dropped = Counter(sums["dropped"]) + Counter({DUPLICATE: duplicates})
    return msgspec.convert(sums | {"dropped": dict(sorted(dropped.items()))}, CountsRecord)


def _summed(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add tables of numbers and of such tables, key by key; of lists, the first few stay."""
    sums: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table[name] for table in tables if name in table]
        if isinstance(values[0], Mapping):
            sums[name] = _summed(values)
        elif isinstance(values[0], list):
            sums[name] = [item for value in values for item in value][: max(map(len, values))]
        else:
            sums[name] = sum(values)
    return sums


def joined_table(parts: Sequence[Mapping[str, Agreement]]) -> AgreementTable:
    """Return the agreement of several datasets, given by source of text, as one."""
    names = dict.fromkeys(name for part in parts for name in part)
    sources = {name: joined_total([p[name] for p in parts if name in p]) for name in names}
    return AgreementTable(total=joined_total(list(sources.values())), sources=sources)


def joined_total(sources: Sequence[Agreement]) -> Agreement:
    """Return the figures of several sources together: means weighted by tokens.

    The standard errors are those of independent sources; -1 where one is not known.
    """
    tokens = max(sum(s.tokens for s in sources), 1)

    def mean(name: str) -> float:
        return _rounded(math.fsum(getattr(s, name) * s.tokens for s in sources) / tokens)

    def error(name: str) -> float:
        if any(getattr(s, name) < 0 for s in sources if s.tokens):
            return -1.0
        squares = ((getattr(s, name) * s.tokens) ** 2 for s in sources)
        return _rounded(math.sqrt(math.fsum(squares)) / tokens)

    return Agreement(
        documents=sum(s.documents for s in sources),
        tokens=sum(s.tokens for s in sources),
        first_choice=sum(s.first_choice for s in sources),
        nll=mean("nll"),
        nll_error=error("nll_error"),
        own_nll=mean("own_nll"),
        excess_error=error("excess_error"),
        own_share=mean("own_share"),
    )


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # as `generate` rounds its figures
