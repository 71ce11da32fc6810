"""The manifest of a dataset that is made of others: what it takes over from them.

`provenance` records the command, its options and the fingerprints of the inputs. Counts stay true:
rendered = stored + dropped, and what the command leaves out is dropped, by reason. The agreement
with the target is left out where documents are: its figures cannot be computed without the target.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from spec_data.shards.identity import of_some
from spec_data.shards.schema import (
    FINAL,
    TEACHERS,
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
        of=[
            ProvenanceInput(
                fingerprint=manifest.fingerprint,
                documents=manifest.totals.documents,
                provenance=manifest.provenance,
            )
            for manifest in inputs
        ],
    )
    left = Counter(first.documents.dropped) + Counter(dropped)
    counts = structs.replace(
        first.documents,
        dropped=dict(sorted(left.items())),
        stored=first.totals.documents - sum(dropped.values()),
    )
    recorded = {draft: ids for m in inputs for draft, ids in m.draft_layers.items()}
    draft_layers = {
        draft: ids
        for draft, ids in recorded.items()
        if set(ids) <= set(layers) and all(m.draft_layers.get(draft, ids) == ids for m in inputs)
    }
    return first.changed(
        provenance=provenance,
        columns=tuple(columns),
        layers=tuple(layers),
        draft_layers=draft_layers,
        final=named[FINAL].tokens if FINAL in named else first.final,
        teacher=next(c.tokens for c in columns if c.name in TEACHERS),
        documents=counts,
        identity=of_some(first.identity, sum(dropped.values())),
        agreement=None if dropped else first.agreement,
        view=None,
        shards=(),
        totals=Totals(),
        files={},
        codec=None,
        card=None,
        left_out=LeftOut(),
    )


def joined_counts(counts: Sequence[CountsRecord], duplicates: int) -> CountsRecord:
    """Return `documents` of a union: sums, with its duplicates among the dropped documents."""
    sums: dict[str, Any] = {}
    for name in CountsRecord.__struct_fields__:
        values = [getattr(record, name) for record in counts]
        if isinstance(values[0], int):
            sums[name] = sum(values)
        elif name == "unrendered_examples":
            sums[name] = {reason: rows for value in values for reason, rows in value.items()}
        else:
            sums[name] = dict(sum(map(Counter, values), Counter()))
    dropped = Counter(sums["dropped"]) + Counter({DUPLICATE: duplicates})
    return CountsRecord(**sums | {"dropped": dict(sorted(dropped.items()))})
