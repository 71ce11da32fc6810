"""`spec-data merge` and `join`: documents of several datasets of one target, or their columns.

A dataset has one folder of target files, so everything that decides the meaning of a stored number
must be equal; what differs is refused by name. A column that is lossy in some of them is a bf16
column of the view: its values are decoded, and declared as not exact.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from msgspec import structs

from spec_data.shards.errors import ConfigError, DatasetError
from spec_data.shards.identity import compare, joined, of_some
from spec_data.shards.loss_masks import cut_lengths
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.resumable import differing_settings
from spec_data.shards.schema import (
    FINAL,
    SUPERVISED,
    TEACHERS,
    CodecError,
    Column,
    Manifest,
    layer_column,
)
from spec_data.shards.serving import TOKENS_OF
from spec_data.shards.source_names import renamed_sources
from spec_data.views.derive import derived, joined_counts
from spec_data.views.rows import Rows, stacked

_FILES = ("target/head.safetensors", "target/positions.safetensors")


def merge_rows(inputs: Sequence[HiddenStatesDataset]) -> tuple[Rows, Manifest]:
    """Return the rows of a `merge`, and the draft of its manifest.

    The documents of the first dataset come first. One that an earlier dataset has too, by its id,
    is left out and counted. The columns are those that all have.

    Raises:
        ConfigError: fewer than two datasets. DatasetError: they cannot be one.
    """
    _check_several("merge", inputs)
    columns = _common_columns(inputs)
    seen: set[str] = set()
    parts: list[Rows] = []
    for dataset in inputs:
        ids = dataset.doc_ids
        new = [n for n, name in enumerate(ids) if name not in seen or not parts]
        seen.update(ids)
        parts.append(Rows.of(dataset).take(np.array(new, np.int64)))
    manifests = [dataset.manifest for dataset in inputs]
    as_stored = list(manifests)
    for number, names in enumerate(renamed_sources(inputs)):
        if names:
            texts = [names.get(text, text) for text in parts[number].texts("source")]
            parts[number] = parts[number].with_values(source=pa.array(texts, pa.string()))
            manifests[number] = _with_sources(manifests[number], names)
    duplicates = sum(map(len, inputs)) - sum(map(len, parts))
    draft = _merged(derived("merge", {}, as_stored, columns, {}), manifests, duplicates)
    draft = draft.changed(documents=structs.replace(draft.documents, stored=sum(map(len, parts))))
    return stacked(parts, [column.name for column in columns]), draft


def _with_sources(manifest: Manifest, names: dict[str, str]) -> Manifest:
    corpus = [structs.replace(r, source=names.get(r.source, r.source)) for r in manifest.corpus]
    return manifest.changed(corpus=corpus)


def join_rows(inputs: Sequence[HiddenStatesDataset]) -> tuple[Rows, Manifest]:
    """Return the rows of a `join`, and the draft of its manifest.

    The first dataset has the documents, in its order, and all columns but the layers that the
    others add. Its documents that another dataset lacks are left out and counted. Equal ids prove
    equal tokens and masks; states of another target are refused.

    Raises:
        ConfigError: fewer than two datasets, or one adds no layer.
        DatasetError: of other targets, or they have no document in common.
    """
    _check_several("join", inputs)
    first = inputs[0]
    common = set(first.doc_ids).intersection(*(other.doc_ids for other in inputs[1:]))
    keep = np.flatnonzero(np.isin(first.doc_ids, list(common)))
    if not len(keep):
        raise DatasetError(
            f"{first.location} and the other datasets have no document in common: ids depend on "
            "tokens and loss masks, so capture the same corpus with the same --max-length and "
            "--mask; `spec-data merge` puts different documents together"
        )
    columns = {column.name: column for column in first.manifest.columns}
    rows = Rows.of(first).take(keep)
    layers = list(first.manifest.layers)
    for other in inputs[1:]:
        added = [k for k in other.manifest.layers if k not in layers]
        if not added:
            raise ConfigError(
                f"join: {other.location} adds no layer to {layers}; `spec-data merge` puts "
                "documents together"
            )
        number = {name: n for n, name in enumerate(other.doc_ids)}
        same = np.array([number[name] for name in rows.texts("doc_id")], np.int64)
        names = [layer_column(k) for k in added]
        rows = rows.beside(Rows.of(other).take(same), names)
        columns |= {name: other.declared[name] for name in names}
        layers += added
    named = [layer_column(k) for k in sorted(layers)]
    order = [n for n in first.declared if n not in named]
    at = order.index("loss_mask") + 1
    ordered = [columns[n] for n in [*order[:at], *named, *order[at:]]]
    dropped = {"join:missing": len(first) - len(keep)} if len(keep) < len(first) else {}
    return rows, derived("join", {}, [d.manifest for d in inputs], ordered, dropped)


def _check_several(command: str, inputs: Sequence[HiddenStatesDataset]) -> None:
    if len(inputs) < 2:
        raise ConfigError(f"{command}: name two datasets or more, as in `{command} A B --out C`")
    for other in inputs[1:]:
        check_same_target(inputs[0], other)


def check_same_target(first: HiddenStatesDataset, other: HiddenStatesDataset) -> None:
    """Check that two datasets have states, token ids and prompts of one and the same target.

    Raises:
        DatasetError: they do not; the message lists how they differ.
    """
    ours, theirs = first.manifest, other.manifest
    compared = compare(
        ours.identity,
        theirs.identity,
        of_recorded=f"{first.location} has",
        of_current=f"{other.location} has",
        states=True,
    )
    differing = [d.text for d in compared.differences if d.name not in TOKENS_OF]  # counted
    differing += differing_settings(structs.asdict(ours.head), structs.asdict(theirs.head))
    for name in _FILES:
        files = [m.files.get(name) for m in (ours, theirs)]
        if None not in files and files[0] != files[1]:
            differing.append(f"{name}: other bytes")
    meaning = [(m.target.dtype, m.target.quantised_as, m.supervision) for m in (ours, theirs)]
    names = ("dtype", "quantised_as", "supervision")
    differing += differing_settings(*(dict(zip(names, m, strict=True)) for m in meaning))
    if differing:
        raise DatasetError(
            f"{other.location} and {first.location} cannot be one dataset:\n  "
            + "\n  ".join(dict.fromkeys(differing))
            + "\n`spec-train fit --data A B` trains on several datasets, where only the target and "
            "its head must be the same"
        )


# -- columns ---------------------------------------------------------------------------------------


def _common_columns(inputs: Sequence[HiddenStatesDataset]) -> tuple[Column, ...]:
    """Return the columns that all datasets have, stored at the tokens at which all store them."""
    manifests = [dataset.manifest for dataset in inputs]
    first = manifests[0]
    layers = set.intersection(*(set(m.layers) for m in manifests))
    if not layers and first.layers:
        listed = "; ".join(f"{m.where} has {list(m.layers)}" for m in manifests)
        raise DatasetError(f"no layer is in all datasets: {listed}")
    sparse = {FINAL} if any(m.final == SUPERVISED for m in manifests) else set()
    if any(m.teacher == SUPERVISED for m in manifests):
        sparse |= set(TEACHERS)
    dropped = {layer_column(k) for k in first.layers if k not in layers}
    columns = []
    for column in first.columns:
        if column.name in dropped:
            continue
        if column.lossy and not all(d.declared[column.name].lossy for d in inputs):
            column = structs.replace(column, codec="bf16", quality=0.0)
        tokens = SUPERVISED if column.name in sparse else column.tokens
        columns.append(_declared(structs.replace(column, tokens=tokens), manifests))
    return tuple(columns)


def _declared(column: Column, inputs: Sequence[Manifest]) -> Column:
    """Return a column with the largest errors that the inputs declare of it, figure by figure."""
    entries = [c for m in inputs for c in m.columns if c.name == column.name]
    tables = [structs.asdict(c.error) for c in entries if c.error]
    figures = {n: [t[n] for t in tables if t[n] is not None] for n in CodecError.__struct_fields__}
    worst = {name: max(values) for name, values in figures.items() if values}
    error = CodecError(**worst) if worst else None
    return structs.replace(column, exact=all(c.exact for c in entries), error=error)


# -- manifest --------------------------------------------------------------------------------------


def _merged(draft: Manifest, inputs: Sequence[Manifest], duplicates: int) -> Manifest:
    """Return the draft of a union with what depends on all its inputs."""
    policies = {m.policy for m in inputs}
    settings = dict(draft.settings)
    for name, mixed in (("on_policy", False), ("sampling_temperature", None)):
        if any(m.settings.get(name) != draft.settings.get(name) for m in inputs):
            settings[name] = mixed
    if len(lengths := cut_lengths(inputs)) > 1:  # cut documents are told by their length
        settings["max_lengths"] = lengths
    recorded = [m.positions for m in inputs]
    positions = structs.replace(  # what is proven of all
        recorded[0],
        proven=all(p.proven for p in recorded),
        reason=next((p.reason for p in recorded if not p.proven), recorded[0].reason),
        proven_to=min(p.proven_to for p in recorded),
        difference=max(p.difference for p in recorded),
    )
    masks = dict.fromkeys(m.mask for m in inputs if m.mask)
    return draft.changed(
        documents=joined_counts([m.documents for m in inputs], duplicates),
        corpus=[source for m in inputs for source in m.corpus],
        mask=" | ".join(masks) or None,
        identity=of_some(joined([m.identity for m in inputs]), duplicates),
        policy=policies.pop() if len(policies) == 1 else "off-policy",
        settings=settings,
        agreement=None,
        positions=positions,
    )
