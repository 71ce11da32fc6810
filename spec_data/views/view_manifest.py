"""The manifest of a view: what it takes over from the datasets that it is made of.

`view` records the command, its options, and the fingerprints of the inputs. Counts stay true:
rendered = stored + dropped, and what the view leaves out is dropped, by reason. The agreement with
the target is kept where every source of the view has all its documents and masks; figures of a part
of a source cannot be computed without the target, so they are left out.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import structs

from spec_data.shards.likelihood import Agreement
from spec_data.shards.records import plain
from spec_data.shards.schema import ALL, FINAL, TEACHERS, Column, Manifest

_OWN = (
    "shards",
    "totals",
    "fingerprint",
    "card",
    "files",
    "left_out",
    "ancestors",
    "view",
)
"""What describes one dataset alone."""


def view_record(
    command: str, options: Mapping[str, Any], inputs: Sequence[Manifest]
) -> dict[str, Any]:
    """Return the manifest's `view`: a command, the options that decide its result, its inputs."""
    given = {name: value for name, value in options.items() if value not in (None, (), [])}
    return {
        "command": command,
        "options": json.loads(json.dumps(given)),  # as the manifest has it
        "of": [
            {"fingerprint": m.fingerprint, "documents": m.totals.documents}
            | ({"view": plain(m.view)} if m.view else {})
            for m in inputs
        ],
    }


def derived_draft(
    manifest: Manifest,
    columns: Sequence[Column],
    view: dict[str, Any],
    dropped: Mapping[str, int],
) -> dict[str, Any]:
    """Return the draft of a view of one dataset: its manifest, with these columns and counts.

    `dropped` has the documents that the view leaves out, by reason.
    """
    raw = {k: v for k, v in manifest.to_json().items() if k not in _OWN}
    raw["columns"] = column_entries(manifest, columns)
    _set_kept(raw, columns)
    lossy = any(column.lossy for column in columns)
    if not lossy:
        raw.pop("codec", None)
    counts = raw["documents"]
    left = Counter(counts.get("dropped", {})) + Counter(dropped)
    counts["dropped"] = dict(sorted(left.items()))
    counts["stored"] = manifest.totals.documents - sum(dropped.values())
    return raw | {"view": view}


def column_entries(manifest: Manifest, columns: Sequence[Column]) -> list[dict[str, Any]]:
    """Return the manifest's entries of the columns of a view, from those of its input."""
    known = {column.name: column for column in manifest.columns}
    entries = []
    for column in columns:
        entry = plain(known[column.name])
        entries.append(entry | {"codec": column.codec, "tokens": column.tokens})
    return entries


def _set_kept(raw: dict[str, Any], columns: Sequence[Column]) -> None:
    """Set what depends on the columns: layers, and the tokens that sparse columns store."""
    named = {column.name: column for column in columns}
    raw["layers"] = [k for k in raw["layers"] if f"hidden.L{k}" in named]
    drafts = raw.pop("draft_layers", {})
    left = {d: own for d, own in drafts.items() if set(own) <= set(raw["layers"])}
    if left:
        raw["draft_layers"] = left
    raw["final"] = named[FINAL].tokens if FINAL in named else raw.get("final", ALL)
    teacher = next(c.tokens for c in columns if c.name in TEACHERS)
    raw.pop("teacher", None)
    if teacher != ALL:
        raw["teacher"] = teacher


def keep_sources(raw: dict[str, Any], before: Sequence[str], after: Sequence[str]) -> None:
    """Set `corpus` and `agreement` of a draft to the sources that are left, in place.

    `before` and `after` have the source of each document of the input and of the view.
    """
    whole, left = Counter(before), Counter(after)
    raw["corpus"] = [s for s in raw["corpus"] if s["source"] not in whole or s["source"] in left]
    measured = raw.get("agreement")
    if not measured or left == whole:
        return
    if any(count != whole[name] for name, count in left.items()):
        del raw["agreement"]
        return
    sources = {name: figures for name, figures in measured["sources"].items() if name in left}
    raw["agreement"] = {"total": joined_total(list(sources.values())), "sources": sources}


def joined_total(sources: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of several sources together: means weighted by tokens.

    The standard errors are those of independent sources.
    """
    total: dict[str, Any] = {
        name: sum(s[name] for s in sources) for name in ("documents", "tokens", "first_choice")
    }
    tokens = max(total["tokens"], 1)
    for name in ("nll", "own_nll", "own_share"):
        total[name] = _rounded(math.fsum(s[name] * s["tokens"] for s in sources) / tokens)
    for name in ("nll_error", "excess_error"):
        total[name] = _rounded(_joined_error(sources, name))
    return structs.asdict(Agreement(**total))


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")  # as `generate` rounds its figures


def _joined_error(sources: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the standard error of a mean over all sources; -1 if one is not known."""
    if any(s[name] < 0 for s in sources if s["tokens"]):
        return -1.0
    tokens = max(sum(s["tokens"] for s in sources), 1)
    return math.sqrt(math.fsum((s[name] * s["tokens"]) ** 2 for s in sources)) / tokens
