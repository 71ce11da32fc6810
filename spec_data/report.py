"""What the commands print: sizes, counts and documents as plain aligned text."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.corpus.documents import WITH_SYSTEM, WITHOUT_SYSTEM
from spec_data.generation.plan import count_warnings
from spec_data.generation.status import read_status
from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.likelihood_text import agreement_rows, contradictions, suspicions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.schema import (
    SUPERVISED,
    Column,
    Manifest,
    PositionsRecord,
    layer_column,
)
from spec_data.shards.storage import scheme_of
from spec_data.terminal.progress import size
from spec_data.terminal.text_table import text_table

_SUPERVISED, _PLAIN, _RESET = "\033[1;32m", "\033[2m", "\033[0m"


def column_figures(
    columns: Sequence[Column], tokens: int, sparse_tokens: int
) -> list[tuple[str, str, float, int, float | None, float | None, float | None, float | None]]:
    """Return name, codec, bytes per token, payload bytes and four errors of each column.

    The errors, None where it is exact, are those of the held-out part of the calibration sample:
    squared error over variance, that of the worst channel, the teacher's KL, and the share escaped.
    `sparse_tokens` of the `tokens` have a row in columns that hold supervised tokens only.
    """
    names = ("total", "mse_max", "kl", "escaped")
    rows = []
    for column, total in zip(columns, column_payload(columns, tokens, sparse_tokens), strict=True):
        median, worst, kl, escaped = (getattr(column.error, name, None) for name in names)
        per_token = total / max(tokens, 1)
        rows.append((column.name, column.codec, per_token, total, median, worst, kl, escaped))
    return rows


def column_rows(columns: Sequence[Column], tokens: int, sparse_tokens: int) -> str:
    """One line per column of `column_figures`; where it is lossy, what it loses."""
    lossy = any(column.error is not None for column in columns)
    rows: list[Sequence[str]] = [("column", "codec", "bytes/token", "payload")]
    if lossy:
        rows[0] = (*rows[0], "error", "worst channel", "teacher KL", "escaped")
    total = sum(column_payload(columns, tokens, sparse_tokens))
    lines = column_figures(columns, tokens, sparse_tokens)
    lines.append(("all token columns", "", total / max(tokens, 1), total, None, None, None, None))
    for name, codec, per_token, payload, median, worst, kl, escaped in lines:
        row = [name, codec, f"{per_token:,.1f}", size(payload)]
        if median is not None:
            text = "-" if kl is None else f"{kl:.1e}"
            row += [f"{median:.1e}", f"{worst:.1e}", text, f"{escaped:.2%}"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    note = "\nerror: squared error over variance; bytes of lossy columns are those of a sample"
    return text_table(rows) + note * lossy


def column_payload(columns: Sequence[Column], tokens: int, sparse_tokens: int) -> list[int]:
    """Return the payload bytes of each column; tokens are counted as in `column_figures`."""
    return [int(c.bytes_per_token * (sparse_tokens if c.sparse else tokens)) for c in columns]


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
    dataset for this draft alone would have them. Tokens are counted as in `column_figures`.
    """
    payload = dict(
        zip((c.name for c in columns), column_payload(columns, tokens, sparse_tokens), strict=True)
    )
    captured = {layer_column(k) for layers in draft_layers.values() for k in layers}
    facts = {}
    for draft, layers in draft_layers.items():
        others = captured.difference(map(layer_column, layers))
        total = sum(count for name, count in payload.items() if name not in others)
        per_token = total / max(tokens, 1)
        facts[draft] = {"layers": list(layers), "bytes_per_token": per_token, "bytes": total}
    return facts


def counts_text(counts: dict[str, Any], tokens: int) -> str:
    """Where every corpus row and document went, as text; `tokens` are those that are kept."""
    lines = [(name, f"{value:,}") for name, value in counts_rows(counts)]
    examples = counts.get("unrendered_examples", {})
    texts = [f"not rendered ({reason}): {found[0]}" for reason, found in examples.items()]
    texts += [f"warning: {warning}" for warning in count_warnings(counts, tokens)]
    return "\n".join([text_table(lines), *texts])


def counts_rows(counts: Mapping[str, Any]) -> list[tuple[str, int]]:
    """Where every corpus row and document went, from the counts of a plan or a manifest."""
    ways = counts["rendering"]
    with_system = ways.get(WITH_SYSTEM, 0)
    others = sum(n for name, n in ways.items() if name.startswith(WITHOUT_SYSTEM))
    share = {WITH_SYSTEM: f" ({with_system / max(with_system + others, 1):.0%})"}
    less = f" ({counts['tokens_cut']:,} tokens less)" if counts["tokens_cut"] else ""
    return [
        ("corpus rows read", counts["read"]),
        ("  bad rows", counts["bad_rows"]),
        *((f"  not rendered: {name}", n) for name, n in counts["unrendered"].items()),
        *((f"  {name}{share.get(name, '')}", n) for name, n in ways.items()),
        ("documents rendered", counts["rendered"]),
        *((f"  dropped: {name}", n) for name, n in counts["dropped"].items()),
        (f"  cut at the maximal length{less}", counts["cut"]),
        ("  tail tokens trimmed", counts["tail_tokens_trimmed"]),
        ("documents kept", counts["rendered"] - sum(counts["dropped"].values())),
    ]


def dataset_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Return names and values that describe a sealed dataset as a whole."""
    totals, target, made = manifest.totals, manifest.target, manifest.provenance
    lines = [
        ("target", f"{target.name}, {target.num_layers} blocks, {target.dtype}"),
        ("layers (output of block k, from 0)", ", ".join(map(str, manifest.layers)) or "none"),
    ]
    for draft, layers in manifest.draft_layers.items():
        lines.append((f"  of {draft}", ", ".join(map(str, layers)) or "none (hidden.final)"))
    lines += [
        ("positions", _positions_text(manifest.positions)),
        ("supervision", f"{manifest.supervision}, at {_where(manifest)}"),
        ("documents", f"{totals.documents:,}"),
        ("tokens", f"{totals.tokens:,}"),
        ("supervised tokens", f"{totals.supervised:,}"),
    ]
    if manifest.view is not None:
        for source in manifest.view.sources:
            lines.append(("view of", f"{source.path} ({source.fingerprint[:16]})"))
    else:
        lines += [
            ("shards", f"{len(manifest.shards):,}"),
            ("bytes of all shards", f"{totals.bytes:,} ({size(totals.bytes)})"),
            ("bytes per token", f"{totals.bytes / max(totals.tokens, 1):,.1f}"),
        ]
    lines += [("captured", _captured_text(manifest)), ("responses", manifest.policy)]
    if made:
        parts = ", ".join(part.fingerprint[:16] for part in made.of)
        lines.append(("made by", f"{made.command} of {parts}"))
    return [*lines, ("fingerprint", manifest.fingerprint[:16])]


def dataset_text(manifest: Manifest) -> str:
    """What is inside a sealed dataset."""
    totals = manifest.totals
    parts = [text_table(dataset_lines(manifest), "<")]
    # A document whose very first token is supervised has one row fewer: not worth an index scan.
    parts.append(column_rows(manifest.columns, totals.tokens, totals.supervised))
    if manifest.documents.rendered:
        parts.append(counts_text(structs.asdict(manifest.documents), totals.tokens))
    return "\n\n".join([*parts, agreement_text(manifest)])


def _captured_text(manifest: Manifest) -> str:
    """Say how the states were captured: packed, or read from what another tool stored."""
    converted, packing = manifest.target.converted, manifest.packing
    if converted:
        worst = max(converted.differences.values())
        return f"by {converted.tool}; differs from the target's own blocks by {worst:.1e} at most"
    form = packing.form
    if packing.utilisation is None:
        return form
    if form in ("rows", "single"):
        tried = [name for name in packing.differences if name != form]
        return "one document per row" + (f"; not isolated: {', '.join(tried)}" if tried else "")
    proof = f"{packing.differences.get(form):.1e} (allowed {packing.tolerance:.1e})"
    return f"{form}, {packing.utilisation:.1%} full, differs from unpacked by {proof}"


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
        return "agreement with the target: not recorded (a merge, part of a source or other masks)"
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


_FACTS = (
    *("target", "layers", "draft_layers", "supervision", "final", "teacher", "policy"),
    *("agreement", "columns", "packing", "fingerprint"),
)


def dataset_facts(dataset: HiddenStatesDataset) -> dict[str, Any]:
    """Return what is inside a sealed dataset as plain values (--json)."""
    manifest = dataset.manifest
    return {
        "path": dataset.location,
        **{name: plain(getattr(manifest, name)) for name in _FACTS},
        "warnings": suspicions(manifest),
        "shards": len(manifest.shards),
        **plain(manifest.totals),
        "counts": plain(manifest.documents),
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


def fit_words(data: str) -> tuple[str, ...]:
    """Return the command that trains on a dataset next, into a directory beside it.

    The draft is the first that the dataset was captured for (--for), else EAGLE-3.

    Raises:
        DatasetError: the manifest is damaged.
    """
    draft = next(iter(HiddenStatesDataset(data).manifest.draft_layers), "eagle3")
    run = Path(data).name if scheme_of(data) else data.rstrip("/")  # a run is a local directory
    return ("spec-train", "fit", draft, "--data", data, "--out", f"{run}-{draft}")


def kept_text(place: str | Path) -> str:
    """Say how much of an interrupted run is kept: units, tokens, bytes."""
    if scheme_of(place):
        return f"the units that were uploaded are kept in {place}"
    with suppress(SpecDataError):
        status = read_status(Path(place))
        if status.units:
            return (
                f"{status.units_done} of {status.units} units are done and kept "
                f"({status.tokens_done:,} tokens, {size(status.bytes)}) in {place}"
            )
    return "nothing was captured yet"
