"""What the commands print: sizes, counts and documents as plain aligned text."""

import textwrap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

from msgspec import structs

from spec_data.corpus.documents import count_warnings
from spec_data.pages.page import Format, Table
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.layer_ids import AUTO_DRAFTS
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.records import plain
from spec_data.shards.schema import (
    SUPERVISED,
    Column,
    Manifest,
    PositionsRecord,
)
from spec_data.shards.serving import FACTS, prompt_lines
from spec_data.shards.storage import scheme_of
from spec_data.terminal import WIDTH
from spec_data.terminal.progress import size
from spec_data.terminal.text_table import text_table


def as_text(table: Table) -> str:
    """Return a table of a page as aligned lines."""
    names, formats = zip(*table.columns, strict=True)
    heads = [names] if any(names) else []
    align = "".join("<" if form == "text" else ">" for form in formats)
    rows = text_table([*heads, *table.texts()], align)
    return "\n".join(filter(None, (rows, *textwrap.wrap(table.note, WIDTH))))


def columns_table(columns: Sequence[Column], tokens: int, sparse_tokens: int) -> Table:
    """Return codec and payload of each column; where some are lossy, what they lose.

    The errors are those of the held-out part of the calibration sample. `sparse_tokens` of the
    `tokens` have a row in columns that hold supervised tokens only.
    """
    names: list[tuple[str, Format]] = [("column", "text"), ("codec", "text")]
    names += [("B/token", "number"), ("payload", "bytes")]
    figures: tuple[str, ...] = ()
    note = ""
    if any(column.error for column in columns):
        names += [("error", "number"), ("worst", "number")]
        names += [("KL", "number"), ("escaped", "share")]
        figures = ("total", "mse_max", "kl", "escaped")
        note = (
            "Error: squared error of all channels over their variance; worst: of one channel; both "
            "on held-out documents. KL: of the teacher's distribution, in nats."
        )
    rows: list[list[Any]] = []
    for column in columns:
        count = int(column.bytes_per_token * (sparse_tokens if column.sparse else tokens))
        errors = [getattr(column.error, name, None) for name in figures]
        rows.append([column.name, column.codec, count / max(tokens, 1), count, *errors])
    return Table(title="Columns", columns=names, rows=rows, note=note)


def captured_tokens(manifest: Manifest) -> int | None:
    """Return the tokens that the counts of a manifest belong to; None: a view has some of them."""
    return None if manifest.provenance else manifest.totals.tokens


def counts_text(counts: dict[str, Any], tokens: int | None) -> str:
    """Where every corpus row and document went, as text; `tokens` as for `count_warnings`."""
    examples = counts.get("unrendered_examples", {}).items()
    texts = [f"not rendered ({reason}): {texts[0]}" for reason, texts in examples]
    texts += [f"warning: {warning}" for warning in count_warnings(counts, tokens)]
    return "\n".join([as_text(counts_table(counts)), *texts])


def counts_table(counts: Mapping[str, Any]) -> Table:
    """Where every corpus row and document went, from the counts of a plan or a manifest."""
    less = f" ({counts['tokens_cut']:,} tokens less)" if counts["tokens_cut"] else ""
    rows: list[Sequence[Any]] = [
        ("corpus rows read", counts["read"]),
        ("  bad rows", counts["bad_rows"]),
        *((f"  not rendered: {name}", n) for name, n in counts["unrendered"].items()),
        *((f"  {name}", n) for name, n in counts["rendering"].items()),
        ("documents rendered", counts["rendered"]),
        *((f"  dropped: {name}", n) for name, n in counts["dropped"].items()),
        (f"  cut at the maximal length{less}", counts["cut"]),
        ("  tail tokens trimmed", counts["tail_tokens_trimmed"]),
        ("documents kept", counts["rendered"] - sum(counts["dropped"].values())),
    ]
    columns: list[tuple[str, Format]] = [("", "text"), ("", "count")]
    return Table(title="From rows to documents", columns=columns, rows=rows)


def dataset_lines(manifest: Manifest) -> list[tuple[str, str]]:
    """Return names and values that describe a sealed dataset as a whole."""
    totals, target, made = manifest.totals, manifest.target, manifest.provenance
    lines = [
        ("target", f"{target.name}, {target.num_layers} blocks, {target.dtype}"),
        ("layers (block outputs, from 0)", ", ".join(map(str, manifest.layers)) or "none"),
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
    lines += prompt_lines(manifest.identity)
    if made:
        parts = ", ".join(part.fingerprint[:16] for part in made.of)
        lines.append(("made by", f"{made.command} of {parts}"))
        for file in made.options.get("decontaminate") or []:
            if "documents" in file:  # datasets of older releases do not say
                about = f"{file['found']:,} of {file['prompts']:,} prompts"
                documents = f"{file['documents']:,} documents left out, with {about}"
                lines.append((f"overlap with {file['source']}", documents))
    return [*lines, ("fingerprint", manifest.fingerprint[:16])]


def dataset_text(manifest: Manifest) -> str:
    """What is inside a sealed dataset."""
    totals = manifest.totals
    parts = [text_table(dataset_lines(manifest), "<")]
    # A document whose very first token is supervised has one row fewer: not worth an index scan.
    parts.append(as_text(columns_table(manifest.columns, totals.tokens, totals.supervised)))
    if manifest.documents.rendered:
        counts = structs.asdict(manifest.documents)
        parts.append(counts_text(counts, captured_tokens(manifest)))
    return "\n\n".join([*parts, agreement_text(manifest)])


def dataset_summary(manifest: Manifest) -> str:
    """What is inside a sealed dataset, in a dozen lines, and what is suspicious."""
    lines, counts = dataset_lines(manifest), structs.asdict(manifest.documents)
    names = [column.name for column in manifest.columns]
    columns = ("columns", f"{len(names)}: {', '.join(names)}")
    left_out = {"positions", "supervision", "captured", "shards", "fingerprint"}
    rows = [line for line in lines if line[0] not in left_out and line[0][0] != " "]
    table = text_table([*rows, columns, ("more", "--verbose, or `spec-data report`")], "<")
    found = count_warnings(counts, captured_tokens(manifest)) if counts["rendered"] else []
    warnings = [*found, *manifest.suspicions]
    return "\n".join([table, *(textwrap.fill(f"warning: {text}") for text in warnings)])


def _captured_text(manifest: Manifest) -> str:
    """Say how the states were captured: packed, or read from what another tool stored."""
    converted, packing = manifest.target.converted, manifest.packing
    if converted:
        most = max(converted.differences.values(), default=None)
        worst = "an unknown part" if most is None else f"{most:.1e} at most"
        return f"by {converted.tool}; differs from the target's own blocks by {worst}"
    form = packing.form
    if packing.utilisation is None:
        return form
    if form in ("rows", "single"):
        tried = [name for name in packing.differences if name != form]
        return "one document per row" + (f"; not isolated: {', '.join(tried)}" if tried else "")
    found = packing.differences.get(form)
    proof = "by how much it differs from unpacked is not recorded"
    if isinstance(found, (int, float)):
        proof = f"differs from unpacked by {found:.1e} (allowed {packing.tolerance:.1e})"
    return f"{form}, {packing.utilisation:.1%} full, {proof}"


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
    temperature = manifest.sampling_temperature
    notes = [
        "top-1: supervised tokens that are the target's arg max; NLL: mean, in nats; own: "
        f"those of samples at temperature {1.0 if temperature is None else temperature:g}",
        *(f"warning: {message}" for message in manifest.suspicions),
    ]
    return "\n".join([text_table(manifest.agreement.rows()), *map(textwrap.fill, notes)])


def refused_label(manifest: Manifest) -> str:
    """Say why the label --on-policy of a sealed dataset was not accepted; empty if it was."""
    if manifest.agreement is None or not manifest.on_policy:
        return ""
    if not (wrong := manifest.agreement.contradictions(manifest.sampling_temperature)):
        return ""
    return (
        f"--on-policy was not accepted: this target did not write these answers. The dataset is "
        f"complete, and it is recorded as {manifest.policy}:\n  " + "\n  ".join(wrong)
    )


def _where(manifest: Manifest) -> str:
    """At which tokens the final states and the teacher's columns are stored."""
    final = manifest.final if manifest.supervision == "final-hidden" else manifest.teacher
    some = "tokens whose next token is supervised"
    if final == manifest.teacher:
        return some if final == SUPERVISED else "all tokens"
    sparse = "hidden.final" if final == SUPERVISED else "argmax and logsumexp"
    return f"all tokens; {sparse} only at {some}"


def dataset_facts(dataset: HiddenStatesDataset) -> dict[str, Any]:
    """Return what is inside a sealed dataset as plain values (--json)."""
    manifest = dataset.manifest
    names = ["target", "layers", "draft_layers", "supervision", "final", "teacher", "policy"]
    names += ["agreement", "columns", "packing", "fingerprint"]
    return {
        "path": dataset.location,
        **{name: plain(getattr(manifest, name)) for name in names},
        "warnings": manifest.suspicions,
        "shards": len(manifest.shards),
        **plain(manifest.totals),
        "counts": plain(manifest.documents),
        "prompts": {name: manifest.identity[name] for name in FACTS if name in manifest.identity},
    }


def document_facts(dataset: HiddenStatesDataset, index: int) -> dict[str, Any]:
    """Return one document as plain values; `pieces` are its text, supervised and not, in order.

    Raises:
        DatasetError: no such document.
    """
    # a second of imports, as of the planner
    from spec_data.models.tokenizer import load_tokenizer

    if not 0 <= index < len(dataset):
        raise DatasetError(f"--doc {index}: the dataset has documents 0 to {len(dataset) - 1}")
    row = dataset[index]
    tokenizer = load_tokenizer(dataset.target_dir)
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    pieces = []
    for supervised, run in groupby(zip(ids, mask, strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append({"supervised": supervised, "text": text})
    return {
        "document": index,
        "doc_id": row["doc_id"],
        "source": row["source"],
        "tokens": len(ids),
        "supervised_tokens": int(sum(mask)),
        "turns": row["turns"],
        "pieces": pieces,
    }


def document_text(document: dict[str, Any]) -> str:
    """The text of `document_facts` with supervised tokens between « and »."""
    head = (
        f"document {document['document']}  {document['doc_id']}\n{document['source']}  "
        f"{document['tokens']} tokens, {document['supervised_tokens']} supervised"
    )
    turns = "  ".join(f"{t['role']} [{t['start']}:{t['end']}]" for t in document["turns"])
    pieces = document["pieces"]
    text = "".join(f"«{p['text']}»" if p["supervised"] else p["text"] for p in pieces)
    return f"{head}\n{turns}\n\n{text}"


def fit_words(data: str) -> tuple[str, ...]:
    """Return the command that trains on a dataset next, into a directory beside it.

    The draft is the first that the dataset was captured for (--for), else EAGLE-3.

    Raises:
        DatasetError: the manifest is damaged.
    """
    draft = next(iter(HiddenStatesDataset(data).manifest.draft_layers), AUTO_DRAFTS[0])
    run = Path(data).name if scheme_of(data) else data.rstrip("/")  # a run is a local directory
    return ("spec-train", "fit", draft, "--data", data, "--out", f"{run}-{draft}")


def kept_text(out: str | Path) -> str:
    """Say how much of an interrupted run is kept: units, tokens, bytes."""
    if scheme_of(out):
        return f"the units that were uploaded are kept in {out}"
    from spec_data.generation.status import read_status

    with suppress(SpecDataError):
        status = read_status(Path(out))
        if status.units:
            return (
                f"{status.units_done} of {status.units} units are done and kept "
                f"({status.tokens_done:,} tokens, {size(status.bytes)}) in {out}"
            )
    return "nothing was captured yet"
