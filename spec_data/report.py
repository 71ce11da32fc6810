"""What the commands print: sizes, counts and documents as plain aligned text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.corpus.documents import WITH_SYSTEM, WITHOUT_SYSTEM
from spec_data.generation.plan import count_warnings
from spec_data.generation.status import read_status
from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.files import MANIFEST
from spec_data.shards.likelihood_text import agreement_rows, contradictions, suspicions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.remote import open_mirror
from spec_data.shards.schema import (
    SUPERVISED,
    Column,
    Manifest,
    PackingRecord,
    PositionsRecord,
    Provenance,
    layer_column,
)
from spec_data.shards.urls import scheme_of
from spec_data.terminal.progress import size
from spec_data.terminal.text_table import text_table

_SUPERVISED, _PLAIN, _RESET = "\033[1;32m", "\033[2m", "\033[0m"


def column_rows(columns: Sequence[Column], tokens: int, sparse_tokens: int) -> str:
    """One line per column and part: codec, bytes per token stored and on average, payload.

    `sparse_tokens` of the `tokens` have a row in columns that hold supervised tokens only.
    """
    rows: list[Sequence[Any]] = [("column", "codec", "bytes/row", "bytes/token", "payload")]
    total = 0.0
    for column in columns:
        share = (sparse_tokens if column.sparse else tokens) / max(tokens, 1)
        total += column.bytes_per_token * share
        parts = column.part_bytes
        for name, count in parts.items():
            codec = column.codec if name == column.name else "bf16"
            shown = name if name == column.name else "  " + name.removeprefix(column.name)
            average = count * share
            number = f"{average:,.1f}" if column.sparse else f"{count:,}"
            rows.append((shown, codec, f"{count:,}", number, size(average * tokens)))
    number = f"{total:,.1f}" if any(c.sparse for c in columns) else f"{total:,.0f}"
    rows.append(("all token columns", "", "", number, size(total * tokens)))
    return text_table(rows)


def column_payload(columns: Sequence[Column], tokens: int, sparse_tokens: int) -> dict[str, int]:
    """Return the payload bytes of each column by name; tokens are counted as in `column_rows`."""
    return {c.name: c.bytes_per_token * (sparse_tokens if c.sparse else tokens) for c in columns}


def draft_rows(facts: Mapping[str, Mapping[str, Any]]) -> str:
    """One line per draft of --for: its layers, and the payload bytes that it reads."""
    rows: list[Sequence[Any]] = [("draft", "layers", "bytes/token", "payload")]
    for draft, own in facts.items():
        layers = ", ".join(map(str, own["layers"])) or "none (hidden.final)"
        rows.append((draft, layers, f"{own['bytes_per_token']:,.1f}", size(own["bytes"])))
    note = "what each draft reads: columns that several drafts read are stored once"
    return f"{text_table(rows)}\n{note}"


def draft_facts(
    draft_layers: Mapping[str, Sequence[int]],
    columns: Sequence[Column],
    tokens: int,
    sparse_tokens: int,
) -> dict[str, dict[str, Any]]:
    """Return the layers and payload bytes of the columns that each draft of --for reads.

    These are the captured layers of its recipe and every column that is no captured layer, as a
    dataset for this draft alone would have them. Tokens are counted as in `column_rows`.
    """
    found = {}
    for draft, layers in draft_layers.items():
        others = {layer_column(k) for own in draft_layers.values() for k in own if k not in layers}
        total = sum(
            column.bytes_per_token * (sparse_tokens if column.sparse else tokens)
            for column in columns
            if column.name not in others
        )
        found[draft] = {
            "layers": list(layers),
            "bytes_per_token": total / max(tokens, 1),
            "bytes": total,
        }
    return found


def error_rows(manifest: Manifest) -> str:
    """What the lossy columns lose, as measured on the held-out part of the calibration sample."""
    rows: list[Sequence[Any]] = [
        ("lossy column", "codec", "bits/element", "error", "worst channel", "teacher KL", "escaped")
    ]
    for column in manifest.columns:
        error = column.error
        if error is not None:
            kl = f"{error.kl:.1e}" if error.kl is not None else "-"
            bits = 8 * column.bytes_per_token / (column.width or 1)
            figures = (f"{bits:.2f}", f"{error.mse_median:.1e}", f"{error.mse_max:.1e}")
            rows.append((column.name, column.codec, *figures, kl, f"{error.escaped:.2%}"))
    note = "error: mean squared error of a channel over its variance, median over channels"
    return f"{text_table(rows)}\n{note}" if len(rows) > 1 else ""


def counts_text(counts: dict[str, Any], tokens: int) -> str:
    """Where every corpus row and document went, as text; `tokens` are those that are kept."""
    lines = [(name, f"{value:,}") for name, value in counts_rows(counts)]
    examples = counts.get("unrendered_examples", {})
    shown = [f"not rendered ({reason}): {found[0]}" for reason, found in examples.items()]
    shown += [f"warning: {warning}" for warning in count_warnings(counts, tokens)]
    return "\n".join([text_table(lines), *shown])


def counts_rows(counts: dict[str, Any]) -> list[tuple[str, int]]:
    """Where every corpus row and document went, from the counts of a plan or a manifest."""
    read = counts.get("read", counts.get("rows", 0))
    return [
        ("corpus rows read", read),
        ("  bad rows", counts["bad_rows"]),
        *((f"  not rendered: {k}", v) for k, v in counts["unrendered"].items()),
        *((f"  {k}{_share(k, counts['rendering'])}", v) for k, v in counts["rendering"].items()),
        ("documents rendered", counts["rendered"]),
        *((f"  dropped: {k}", v) for k, v in counts["dropped"].items()),
        (f"  cut at the maximal length{_tokens_cut(counts)}", counts["cut"]),
        ("  tail tokens trimmed", counts.get("tail_tokens_trimmed", 0)),
        ("documents kept", counts["rendered"] - sum(counts["dropped"].values())),
    ]


def _share(name: str, rendering: Mapping[str, int]) -> str:
    """The share of conversations with a system message, behind their number."""
    others = sum(n for k, n in rendering.items() if k.startswith(WITHOUT_SYSTEM))
    return f" ({rendering[name] / (rendering[name] + others):.0%})" if name == WITH_SYSTEM else ""


def _tokens_cut(counts: dict[str, Any]) -> str:
    """How many tokens the cuts took, where there were any."""
    return f" ({counts['tokens_cut']:,} tokens less)" if counts["tokens_cut"] else ""


def dataset_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Return names and values that describe a sealed dataset as a whole."""
    totals, target = manifest.totals, manifest.target
    return [
        ("target", f"{target.name}, {target.num_layers} blocks, {target.dtype}"),
        ("layers (output of block k, from 0)", ", ".join(map(str, manifest.layers)) or "none"),
        *(
            (f"  of {draft}", ", ".join(map(str, own)) or "none (hidden.final)")
            for draft, own in manifest.draft_layers.items()
        ),
        ("positions", _positions_text(manifest.positions)),
        ("supervision", f"{manifest.supervision}, at {_where(manifest)}"),
        ("documents", f"{totals.documents:,}"),
        ("tokens", f"{totals.tokens:,}"),
        ("supervised tokens", f"{totals.supervised:,}"),
        *_storage_lines(manifest),
        ("captured", _captured_text(manifest)),
        ("responses", manifest.policy),
        *([("made by", _made_by(manifest.provenance))] if manifest.provenance else []),
        ("fingerprint", manifest.fingerprint[:16]),
    ]


def dataset_text(manifest: Manifest) -> str:
    """What is inside a sealed dataset."""
    totals = manifest.totals
    lines = dataset_lines(manifest)
    # A document whose very first token is supervised has one row fewer: not worth an index scan.
    columns = column_rows(manifest.columns, totals.tokens, totals.supervised)
    parts = [part for part in (text_table(lines, "<"), columns, error_rows(manifest)) if part]
    if manifest.documents.rendered:
        parts.append(counts_text(structs.asdict(manifest.documents), totals.tokens))
    parts.append(agreement_text(manifest))
    return "\n\n".join(parts)


def _captured_text(manifest: Manifest) -> str:
    """Say how the states were captured: packed, or read from what another tool stored."""
    found = manifest.target.converted
    if not found:
        return _packing_text(manifest.packing)
    worst = max(found.differences.values())
    return f"by {found.tool}; differs from the target's own blocks by {worst:.1e} at most"


def _storage_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Where the documents are stored: in how many bytes of shards, or in which datasets."""
    totals = manifest.totals
    if manifest.view is not None:
        return [("view of", f"{s.path} ({s.fingerprint[:16]})") for s in manifest.view.sources]
    return [
        ("shards", f"{len(manifest.shards):,}"),
        ("bytes of all shards", f"{totals.bytes:,} ({size(totals.bytes)})"),
        ("bytes per token", f"{totals.bytes / max(totals.tokens, 1):,.1f}"),
    ]


def _made_by(made: Provenance) -> str:
    """Which command made a dataset of others, and their fingerprints."""
    return f"{made.command} of {', '.join(part.fingerprint[:16] for part in made.of)}"


def _positions_text(positions: PositionsRecord) -> str:
    """How the target tells positions apart, and whether that is proven."""
    if not positions.proven:
        return f"{positions.kind}, not proven ({positions.reason})"
    if not positions.tables:
        return positions.kind
    parts = [f"{t.dimensions} dimensions ({name})" for name, t in positions.tables.items()]
    return f"rope, {', '.join(parts)}, proven below {positions.proven_to:,}"


def agreement_text(manifest: Manifest) -> str:
    """How often supervised tokens are the target's first choice, per source, and what is odd."""
    if manifest.agreement is None:
        return "agreement with the target: not recorded (a view of a part of a source)"
    stated = manifest.sampling_temperature
    temperature = 1.0 if stated is None else stated
    notes = [
        "first choice: supervised tokens that are the target's arg max; NLL: mean, in nats; own: "
        f"those of text that the target samples at temperature {temperature:g}",
        *(f"warning: {message}" for message in suspicions(manifest)),
    ]
    return "\n".join([text_table(agreement_rows(manifest.agreement)), *notes])


def refused_label(manifest: Manifest) -> str:
    """Say why the label --on-policy of a sealed dataset was not accepted; empty if it was."""
    found = contradictions(manifest)
    if not found:
        return ""
    return (
        f"--on-policy was not accepted: this target did not write these answers. The dataset is "
        f"complete, and it is recorded as {manifest.policy}:\n  " + "\n  ".join(found)
    )


def _where(manifest: Manifest) -> str:
    """At which tokens the final states and the teacher's columns are stored."""
    final = manifest.final if manifest.supervision == "final-hidden" else manifest.teacher
    some = "tokens whose next token is supervised"
    if final == manifest.teacher:
        return some if final == SUPERVISED else "all tokens"
    sparse = "hidden.final" if final == SUPERVISED else "argmax and logsumexp"
    return f"all tokens; {sparse} only at {some}"


def _packing_text(packing: PackingRecord) -> str:
    form = packing.form
    if packing.utilisation is None:
        return form
    proof = packing.differences.get(form)
    proven = f"differs from unpacked by {proof:.1e} (allowed {packing.tolerance:.1e})"
    if form in ("rows", "single"):
        tried = [name for name in packing.differences if name != form]
        return "one document per row" + (f"; not isolated: {', '.join(tried)}" if tried else "")
    return f"{form}, {packing.utilisation:.1%} full, {proven}"


def dataset_facts(dataset: HiddenStatesDataset) -> dict[str, Any]:
    """Return what is inside a sealed dataset as plain values (--json)."""
    manifest = dataset.manifest
    agreement = manifest.agreement
    return {
        "path": dataset.place,
        "target": plain(manifest.target),
        "layers": list(manifest.layers),
        "draft_layers": {d: list(own) for d, own in manifest.draft_layers.items()},
        "supervision": manifest.supervision,
        "final": manifest.final,
        "teacher": manifest.teacher,
        "policy": manifest.policy,
        "agreement": agreement and plain(agreement),
        "warnings": suspicions(manifest),
        "shards": len(manifest.shards),
        **plain(manifest.totals),
        "columns": plain(manifest.columns),
        "packing": plain(manifest.packing),
        "counts": plain(manifest.documents),
        "fingerprint": manifest.fingerprint,
    }


def document_facts(dataset: HiddenStatesDataset, index: int) -> dict[str, Any]:
    """Return one document as plain values; `pieces` are its text, supervised and not, in order.

    Raises:
        DatasetError: no such document.
    """
    if not 0 <= index < len(dataset):
        raise DatasetError(f"--doc {index}: the dataset has documents 0 to {len(dataset) - 1}")
    row = dataset[index]
    tokenizer = load_tokenizer(dataset.target_dir)
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    pieces, start = [], 0
    for stop in range(1, len(ids) + 1):
        if stop < len(ids) and mask[stop] == mask[start]:
            continue
        text = tokenizer.decode(ids[start:stop], skip_special_tokens=False)
        pieces.append({"supervised": bool(mask[start]), "text": text})
        start = stop
    return {
        "document": index,
        "doc_id": row["doc_id"],
        "source": row["source"],
        "tokens": len(ids),
        "supervised_tokens": int(sum(mask)),
        "turns": row["turns"],
        "pieces": pieces,
    }


def document_text(document: dict[str, Any], colour: bool) -> str:
    """The text of `document_facts` with supervised tokens marked (green, or between « and »)."""
    head = (
        f"document {document['document']}  {document['doc_id']}  {document['source']}  "
        f"{document['tokens']} tokens, {document['supervised_tokens']} supervised"
    )
    turns = "  ".join(f"{t['role']} [{t['start']}:{t['end']}]" for t in document["turns"])
    shown = []
    for piece in document["pieces"]:
        text, supervised = piece["text"], piece["supervised"]
        if colour:
            shown.append(f"{_SUPERVISED if supervised else _PLAIN}{text}{_RESET}")
        else:
            shown.append(f"«{text}»" if supervised else text)
    return f"{head}\n{turns}\n\n{''.join(shown)}"


def draft_to_fit(data: str) -> tuple[str, str]:
    """Return the draft that `fit` trains on a dataset next, and a run directory beside it.

    The draft is the first that the dataset was captured for (--for), else EAGLE-3.

    Raises:
        DatasetError: the manifest is damaged.
    """
    mirror = open_mirror(data)
    manifest = Manifest.read((mirror.directory if mirror else Path(data)) / MANIFEST)
    draft = next(iter(manifest.draft_layers), "eagle3")
    run = f"{Path(data).name if mirror else data.rstrip('/')}-{draft}"  # a run is a local directory
    return draft, run


def kept_text(place: str | Path) -> str:
    """Say how much of an interrupted run is kept: units, tokens, bytes."""
    if scheme_of(place):
        return f"the units that were uploaded are kept in {place}"
    try:
        status = read_status(Path(place))
    except SpecDataError:
        return "nothing was captured yet"
    if not status.units:
        return "nothing was captured yet"
    return (
        f"{status.units_done} of {status.units} units are done and kept ({status.tokens_done:,} "
        f"tokens, {size(status.bytes)}) in {place}"
    )
