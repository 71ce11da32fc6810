"""How an export is served, and its README.md: what the draft is, for which target, how to start.

The commands are rows of `spec_data/models/engines.toml`. A test runs the lines for transformers.
vLLM and llama.cpp have served exports on CPUs with these settings, but not through these very
lines. The flags of SGLang follow its documentation and sources. The card is Markdown with the front
matter of the Hugging Face Hub.
"""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from spec_data.models.engines import Start, engines
from spec_data.shards.dataset_card import code, code_block, front_matter, plain, table
from spec_data.shards.serving import prompt_lines
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import files_of
from spec_train.formats.preflight import (
    OF_TARGET,
    REFUSE,
    Finding,
    Subject,
    release,
    start_notes,
    unread_form,
)
from spec_train.formats.serving_conditions import (
    applied,
    common_system,
    kwargs_note,
    kwargs_words,
    loading,
    target_words,
)
from spec_train.losses.metrics import shown
from spec_train.simulation.ranges import range_text

CARD = "README.md"
TARGET = "TARGET"
"""Stands in a command for a target whose name is not known."""


@dataclass(frozen=True)
class Serving:
    """How one engine's release serves an export: lines of `language`, which is sh or python."""

    engine: str
    lines: tuple[str, ...]
    language: str = "sh"
    note: str = ""


def servings(
    subject: Subject,  # the draft, its target and the form that was written
    checked: dict[str, list[Finding]],  # the findings of the preflight
    folder: str,  # the directory of the export, as it is typed
    drafted: int,  # tokens that the draft is trained to propose per verification step
) -> list[Serving]:
    """Return how the engines that read an export and do not refuse its draft serve it.

    The engine that the form is named after is the first.
    """
    rows = {row.engine: row for row in engines().start if subject.served_kind in row.drafts.split()}
    result = []
    for engine in sorted(rows, key=lambda name: name != subject.form):  # the form's own first
        findings = checked.get(engine, [Finding(engine, REFUSE, "not checked")])
        refused = any(finding.level == REFUSE for finding in findings)
        if refused or subject.form not in engines().engine[engine].serves:
            continue
        if unread_form(engine, subject) is None:
            doubts = [f"Not certain: {f.text}." for f in findings if f.rule == OF_TARGET]
            notes = [*start_notes(engine, subject, shlex.quote(folder)), *doubts]
            note = " ".join(filter(None, [*notes, kwargs_note(engine, subject.origin)]))
            lines = _lines(rows[engine], subject, folder, drafted)
            result.append(Serving(release(engine), lines, rows[engine].language, note))
    return result


def _lines(row: Start, subject: Subject, folder: str, drafted: int) -> tuple[str, ...]:
    """Fill in the lines of a row of the table, every value as one word of its language."""
    kind = subject.served_kind
    values: dict[str, Any] = {
        "target": subject.target.name or TARGET,
        "draft": folder,
        "method": row.method.get(kind, kind),
        "tokens": drafted,
        "tokens_plus_one": drafted + 1,
    }
    filled = {
        name: values[value[1:]] if str(value).startswith("$") else value
        for name, value in row.json.items()
    }
    values["json"] = json.dumps(filled)
    word = repr if row.language == "python" else shlex.quote
    words = {name: word(str(value)) for name, value in values.items()}
    target = None if subject.form == "target" else subject.target.name  # it is in the draft's place
    arguments = loading(subject.origin, target).items()
    words["loading"] = "".join(f", {name}={value!r}" for name, value in arguments)
    *first, last = (Template(line).substitute(words) for line in row.lines)
    options = target_words(row.engine, subject.origin, target)
    return (*first, last + options + kwargs_words(row.engine, subject.origin))


def draft_card(
    subject: Subject,  # the draft, its target and the form that was written
    servings: Sequence[Serving],  # how engines serve it
    drafted: int,  # tokens that it is trained to propose at once
    # the figures of its last validation, `validation.json`; empty if there is none
    measured: Mapping[str, Any],
) -> str:
    """Return the card of an export."""
    kind, target = files_of(subject.kind).title, subject.target.name
    front: dict[str, Any] = {
        "library_name": "spec-train",
        "tags": ["speculative-decoding", subject.kind],
    }
    local = target is not None and Path(target).exists()
    if target and "/" in target and not local:
        front["base_model"] = target
    name = target
    if target and local:  # no path of this machine
        name = Path(os.path.normpath(Path.cwd() / target)).name
    full = subject.config["vocab_size"]
    sizes = subject.config.get("draft_vocab_size", full), full
    count = sum(value.numel() for value in subject.draft.tensors.values())
    sampling = applied(subject.sampling) if subject.sampling else ""
    layers = f"outputs of decoder blocks {', '.join(map(str, subject.layers))}, from 0"
    rows = [
        ("draft", f"{kind}, form {subject.form}"),
        ("target", code(name) if name else "not recorded"),
        ("reads", layers if subject.layers else "the target's final hidden states"),
        ("drafted tokens", str(drafted)),
        ("parameters", f"{count / 1e6:,.1f} M with embedding and head where it has its own"),
        ("vocabulary", "{:,} of {:,} tokens".format(*sizes)),
        *_training(subject, measured),
        *((name, plain(text)) for name, text in prompt_lines(subject.origin)),
        *([("the target's sampling", plain(sampling))] if sampling else []),
    ]
    lines = [front_matter(front)]
    lines += [f"# {kind} draft for {plain(name or 'an unnamed target')}", ""]
    lines += ["A draft for speculative decoding: it proposes tokens that the target verifies.", ""]
    lines += [table(("", ""), rows), ""]
    lines += _by_part(measured)
    for serving in servings:
        lines += [f"## Serve with {serving.engine}", ""]
        lines += [code_block(serving.language, serving.lines), ""]
        lines += [serving.note, ""] if serving.note else []
    if system := common_system(subject.origin):
        lines += ["## System message", "", "The training documents begin with it. Send it with "]
        lines[-1] += "every request:"
        lines += ["", code_block("text", system.splitlines()), ""]
    if subject.form == "target":  # no draft directory
        return "\n".join(lines)
    lines += ["Acceptance depends on the text: measure it on your own prompts, for example with"]
    words = ["spec-train", "eval", "--draft", "DIR", "--target", target or "TARGET"]
    lines += [f"{code(shlex.join([*words, '--prompts', 'FILE']))}.", ""]
    return "\n".join(lines)


_PARTS = {
    "by_context": ("tokens of the context", lambda line: range_text(line["start"], line["end"])),
    "by_mode": ("answers", lambda line: line["mode"]),
    "by_source": ("source", lambda line: plain(line["source"])),
}
"""Tables of a validation that a card has, by their key: the head of the first column, its cells."""


def _by_part(measured: Mapping[str, Any]) -> list[str]:
    """Return tables of the acceptance by context, mode and source, where there are several."""
    lines: list[str] = []
    for name, (title, cell) in _PARTS.items():
        some = [line for line in measured.get(name) or () if line["rounds"]]
        if len(some) < 2:
            continue
        rows = [
            (
                *(cell(line), f"{line['rounds']:,}", shown(line["acceptance_length"], 2)),
                "{:.2f} to {:.2f}".format(*line["interval"]) if line["interval"] else "",
            )
            for line in some
        ]
        head = (title, "verifications", "acceptance length", "95 % interval")
        lines += [table(head, rows), ""]
    if not lines:
        return []
    said = "Simulated on held-out documents; what has one part alone is left out."
    return ["## Acceptance by context, mode and source", "", said, "", *lines]


def _training(subject: Subject, measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on the dataset and on the measured acceptance, where they are known."""
    origin = subject.config[SECTION].get("origin") or {}
    rows = []
    if fingerprint := origin.get("dataset_fingerprint"):
        rows.append(("dataset", f"fingerprint {code(str(fingerprint)[:16])}"))
    length = measured.get("serving_like_length")  # not "acceptance_length": that is of training
    if isinstance(length, int | float) and "step" in measured:
        text = f"{length:.2f} tokens per verification on held-out documents, "
        rows.append(("acceptance length", f"{text}simulated, at step {measured['step']}"))
    return rows
