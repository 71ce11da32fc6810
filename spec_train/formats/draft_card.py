"""README.md of an export: a model card that says what the draft is, for which target, how to serve.

In: what was written. Out: Markdown with the front matter of the Hugging Face Hub.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spec_data.shards.card_text import code, code_block, front_matter, plain, table
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.preflight_notes import Subject
from spec_train.formats.serve_commands import Serving

CARD = "README.md"

_NAMES = {"eagle": "EAGLE", "eagle3": "EAGLE-3", "peagle": "P-EAGLE", "dspark": "DSpark"}
_NAMES["dflash"] = "DFlash"


def draft_card(
    subject: Subject, servings: Sequence[Serving], drafted: int, measured: Mapping[str, Any]
) -> str:
    """Return the card of an export.

    Args:
        subject: the draft, its target and the form that was written.
        servings: how engines serve it.
        drafted: tokens that it is trained to propose per round.
        measured: the figures of its last validation, `validation.json`; empty if there is none.
    """
    kind, target = _NAMES[subject.kind], subject.target.name
    front: dict[str, Any] = {
        "library_name": "spec-train",
        "tags": ["speculative-decoding", subject.kind],
    }
    local = target is not None and Path(target).exists()
    if target and "/" in target and not local:
        front["base_model"] = target
    name = Path(target).name if target and local else target  # no path of this machine
    full = subject.config["vocab_size"]
    sizes = subject.config.get("draft_vocab_size", full), full
    count = sum(value.numel() for value in subject.own.tensors.values())
    layers = f"outputs of decoder blocks {_listed(subject.layers)}, from 0"
    rows = [
        ("draft", f"{kind}, form {subject.form}"),
        ("target", code(name) if name else "not recorded"),
        ("reads", layers if subject.layers else "the target's final hidden states"),
        ("tokens per round", str(drafted)),
        ("parameters", f"{count / 1e6:,.1f} M with embedding and head where it has its own"),
        ("vocabulary", "{:,} of {:,} tokens".format(*sizes)),
        *_training(subject, measured),
    ]
    lines = [front_matter(front)]
    lines += [f"# {kind} draft for {plain(name or 'an unnamed target')}", ""]
    lines += ["A draft for speculative decoding: it proposes tokens that the target verifies.", ""]
    lines += [table(("", ""), rows), ""]
    for serving in servings:
        lines += [f"## Serve with {serving.engine}", ""]
        lines += [code_block(serving.language, serving.lines), ""]
        lines += [serving.note, ""] if serving.note else []
    lines += ["Acceptance depends on the text: measure it on your own prompts, for example with"]
    words = ["spec-train", "eval", "--draft", "DIR", "--target", target or "TARGET"]
    lines += [f"{code(shlex.join([*words, '--prompts', 'FILE']))}.", ""]
    return "\n".join(lines)


def _training(subject: Subject, measured: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the rows on the dataset and on the measured acceptance, where they are known."""
    origin = subject.config[SECTION].get("origin") or {}
    rows = []
    if fingerprint := origin.get("dataset_fingerprint"):
        rows.append(("dataset", f"fingerprint {code(str(fingerprint)[:16])}"))
    if measured.keys() >= {"acceptance_length", "step"}:
        rows.append(
            (
                "acceptance length",
                f"{measured['acceptance_length']:.2f} tokens per round on held-out documents, "
                f"simulated, at step {measured['step']}",
            )
        )
    return rows


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
