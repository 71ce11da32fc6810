"""`spec-data merge`: the documents of several datasets of one target as one dataset.

The documents of the first dataset come first. A document that an earlier one has too, by its id, is
left out and counted. Where the first dataset stays as it is, the manifest names it in `ancestors`,
and a run that was trained on it can go on with the result.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.options.view_options import MergeConfig
from spec_data.shards.errors import ConfigError
from spec_data.shards.identity import joined
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.schema import Column, Manifest
from spec_data.views.same_states import check_same_tables, check_same_target, common_columns
from spec_data.views.stored_documents import Change, StoredDocuments
from spec_data.views.view_manifest import derived_draft, joined_total, view_record
from spec_data.views.view_units import Part, view_units
from spec_data.views.write_view import View, check_out

DUPLICATE = "duplicate"  # the reason under which `generate` counts them
_OF_INPUT = ("captured_with", "packing", "settings")


def plan_merge(config: MergeConfig) -> View:
    """Return the view that a `merge` writes.

    Raises:
        ConfigError: fewer than two datasets, or --out cannot be written.
        DatasetError: the datasets cannot be one, or are damaged.
    """
    inputs = [StoredDocuments(HiddenStatesDataset(path)) for path in config.data]
    if len(inputs) < 2:
        raise ConfigError("merge: name two datasets or more, as in `merge A B --out C`")
    check_out(Path(config.out), inputs)
    parts = joined_parts(inputs)
    view = View(parts=parts, units=view_units(parts), draft=joined_draft("merge", parts))
    return view


def joined_parts(inputs: Sequence[StoredDocuments]) -> list[Part]:
    """Return what of each dataset is in their union: common columns, each document once.

    Raises:
        DatasetError: they cannot be one dataset.
    """
    for other in inputs[1:]:
        check_same_target(inputs[0], other)
    columns = common_columns([stored.manifest for stored in inputs])
    check_same_tables(inputs, columns)
    change = Change(columns=columns)
    seen: set[str] = set()
    parts: list[Part] = []
    for stored in inputs:
        ids = stored.dataset.doc_ids
        keep = np.ones(len(ids), bool)
        for number, name in enumerate(ids):
            keep[number] = name not in seen or not parts  # of the first dataset, all are kept
            seen.add(name)
        parts.append(Part(stored=stored, keep=keep, change=change))
    return parts


def joined_draft(command: str, parts: Sequence[Part]) -> dict[str, Any]:
    """Return the manifest of a union, without shards, totals, files and fingerprint."""
    manifests = [part.stored.manifest for part in parts]
    columns = parts[0].change.columns
    duplicates = sum(int((~part.keep).sum()) for part in parts)
    view = view_record(command, {}, manifests)
    for entry, manifest in zip(view["of"][1:], manifests[1:], strict=True):
        entry |= _differing(manifests[0], manifest)
    draft = derived_draft(manifests[0], columns, view, {})
    if parts[0].unchanged and not draft.get("left_out"):
        draft["ancestors"] = lineage(manifests[0])
    _join_columns(draft, manifests, columns)
    draft["documents"] = joined_counts([plain(m.documents) for m in manifests], duplicates)
    draft["documents"]["stored"] = sum(int(part.keep.sum()) for part in parts)
    draft["corpus"] = [plain(s) for m in manifests for s in m.corpus]
    draft["mask"] = " | ".join(dict.fromkeys(str(m.mask) for m in manifests))
    if "identity" in draft:
        draft["identity"] = joined([m.identity for m in manifests])
    _join_policy(draft, manifests, whole=not duplicates)
    _join_positions(draft, manifests)
    return draft


def lineage(manifest: Manifest) -> list[dict[str, Any]]:
    """Return `ancestors` of a dataset that begins with all documents of another, in order."""
    own = {"fingerprint": manifest.fingerprint, "documents": manifest.totals.documents}
    return [*plain(manifest.ancestors), own]


def joined_counts(counts: Sequence[Mapping[str, Any]], duplicates: int) -> dict[str, Any]:
    """Return `documents` of a union: sums, with its duplicates among the dropped documents."""
    found = _summed(counts)
    dropped = Counter(found.get("dropped", {})) + Counter({DUPLICATE: duplicates})
    return found | {"dropped": dict(sorted(dropped.items()))}


def _summed(tables: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add tables of numbers and of such tables, key by key; of lists, the first few stay."""
    found: dict[str, Any] = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = [table[name] for table in tables if name in table]
        if isinstance(values[0], Mapping):
            found[name] = _summed(values)
        elif isinstance(values[0], list):
            found[name] = [item for value in values for item in value][: max(map(len, values))]
        else:
            found[name] = sum(values)
    return found


def _differing(first: Manifest, other: Manifest) -> dict[str, Any]:
    """Return how another input was captured, where the first was captured in another way."""
    return {
        name: plain(getattr(other, name))
        for name in _OF_INPUT
        if getattr(other, name) != getattr(first, name)
    }


def _join_columns(
    draft: dict[str, Any], manifests: Sequence[Manifest], columns: Sequence[Column]
) -> None:
    """Set, of each column, whether it is exact and its largest measured error, in place."""
    known = [{column.name: plain(column) for column in m.columns} for m in manifests]
    for entry, column in zip(draft["columns"], columns, strict=True):
        own = [entries[column.name] for entries in known]
        if "exact" in entry:
            entry["exact"] = all(e.get("exact", False) for e in own)
        errors = [e["error"] for e in own if "error" in e]
        if errors:
            worst = {name: max(e.get(name, 0) for e in errors) for name in errors[0]}
            entry["error"] = worst | {"tokens": sum(e.get("tokens", 0) for e in errors)}
    drafts = draft.pop("draft_layers", {})
    same = {
        name: own
        for name, own in drafts.items()
        if all(list(m.draft_layers.get(name, ())) == own for m in manifests)
    }
    if same:
        draft["draft_layers"] = same


def _join_policy(draft: dict[str, Any], manifests: Sequence[Manifest], whole: bool) -> None:
    """Set the label and the agreement: of inputs that are all measured and `whole`, in place."""
    every = all(m.policy == "on-policy" for m in manifests)
    draft["policy"] = "on-policy" if every else "off-policy"
    for name in ("on_policy", "sampling_temperature"):
        values = [m.settings.get(name) for m in manifests]
        if any(value != values[0] for value in values):
            draft["settings"][name] = False if name == "on_policy" else None
    draft.pop("agreement", None)
    measured = [m.agreement and plain(m.agreement) for m in manifests]
    if not whole or not all(measured):
        return
    names = dict.fromkeys(name for m in measured if m for name in m["sources"])
    sources = {
        name: joined_total([m["sources"][name] for m in measured if m and name in m["sources"]])
        for name in names
    }
    draft["agreement"] = {"total": joined_total(list(sources.values())), "sources": sources}


def _join_positions(draft: dict[str, Any], manifests: Sequence[Manifest]) -> None:
    """Set what is proven of positions to what is proven for all inputs, in place."""
    own = [m.positions for m in manifests]
    unproven = next((p.reason for p in own if not p.proven), "")
    draft["positions"] = plain(own[0]) | {
        "proven": all(p.proven for p in own),
        "reason": own[0].reason or unproven,
        "proven_to": min(p.proven_to for p in own),
        "difference": max(p.difference for p in own),
    }
