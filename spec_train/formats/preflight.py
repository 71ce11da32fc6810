"""The preflight: checks a draft against the rules of each engine's release before it is written.

The rules come from the source code of the releases named in `rules`. Those that a CPU can run were
also tested (`tests/engines`). An engine that is not listed for a kind of draft cannot serve it.
"""

from collections.abc import Callable

import torch

from spec_data.models.engine_targets import served
from spec_data.models.families import find_spec
from spec_data.shards.identity import compare
from spec_train.formats import rules_block, rules_eagle
from spec_train.formats.draft_seal import SECTION, some_of
from spec_train.formats.known_keys import unread_text
from spec_train.formats.preflight_notes import (
    NOTE,
    OF_TARGET,
    OK,
    REFUSE,
    WARN,
    Finding,
    Notes,
    Subject,
)
from spec_train.formats.read_forms import unread_form
from spec_train.formats.rules import (
    DEEPSPEC,
    LLAMA_CPP,
    SGLANG,
    SPEC_TRAIN,
    SPECULATORS,
    TRANSFORMERS,
    VLLM,
    VLLM_CPU,
    vllm_cpu,
)
from spec_train.formats.rules_bias import refused_biases

MAX_POSITIONS, WEIGHTS, EMBEDDING = "max-positions", "weights", "embedding"
"""The rules of `general` that have a name (see `Finding.rule`)."""


def general(subject: Subject) -> Notes:
    """Check what is needed in every engine."""
    notes = Notes(SPEC_TRAIN)
    broken = [
        name
        for name, value in subject.own.tensors.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    notes.refuse(bool(broken), f"weights that are not finite: {', '.join(broken)}", WEIGHTS)
    layers, count = subject.layers, subject.num_layers
    notes.refuse(layers != sorted(set(layers)), f"layers {layers} must be ascending and unique")
    notes.refuse(
        count is not None and bool(layers) and layers[-1] >= count,
        f"layer {layers[-1:]} of a target with {count} decoder blocks (ids are outputs of blocks, "
        "from 0)",
    )
    notes.warn(
        count is None and bool(layers),
        "the target's number of decoder blocks is unknown, so it was not checked whether the draft "
        "reads the last one; pass --target DIR",
    )
    notes.warn(
        "origin" in subject.config["spec_train"] and not subject.config["spec_train"]["origin"],
        "the draft does not record its target and the chat template of its training data",
    )
    notes.warn(
        bool(subject.changed),
        f"keys that engines read are not as this release writes them: {some_of(subject.changed)}; "
        "serve an export of this draft, not these files",
    )
    notes.warn(bool(subject.unread), unread_text(list(subject.unread)))
    notes.warn(
        subject.origin.get("rope_factors") == "short",
        "the states were captured with the short factors of longrope; an engine whose maximum "
        "length is above theirs uses the long ones for every prompt, and accepts less. Start it "
        "with a smaller one, or capture with --rope-factors long",
    )
    own_limit, limit = subject.config["max_position_embeddings"], subject.target.max_positions
    notes.warn(
        limit is not None and own_limit < limit,
        f"max_position_embeddings {own_limit} is less than the target's {limit}: at that length "
        "engines stop drafting, or end the sequence",
        MAX_POSITIONS,
    )
    _sizes(notes, subject)
    _embedding(notes, subject)
    _identity(notes, subject)
    return notes


def _unknown_to(subject: Subject, engine: str) -> list[Finding]:
    """Refuse a draft whose arithmetic no engine knows.

    These are rotary frequencies that no rope settings express, and a class of the family's own.
    """
    section, found = subject.config[SECTION], []
    if "inv_freq" in (section.get("positions") or {}):
        found.append(
            "computes rotary frequencies from config.json, but the draft was fitted with those of "
            "its dataset, which no rope settings express; correct the rope of the target's "
            "config.json, and generate and fit again"
        )
    spec = find_spec(subject.origin.get("architectures") or ())
    if spec is not None and subject.kind in spec.drafts:
        found.append(f"does not know {spec.drafts[subject.kind]}, the draft class of {spec.family}")
    return [Finding(engine, REFUSE, text) for text in found]


def _identity(notes: Notes, subject: Subject) -> None:
    """Compare the target with the one that the draft was fitted to, fact by fact.

    Every difference is a warning: engines serve fine-tuned and quantised targets on purpose.
    """
    target, origin = subject.target, subject.origin
    for problem in target.problems:
        notes.note(True, f"not compared with the draft's training: {problem}")
    if not origin or not target.identity:
        return
    found = compare(
        origin,
        target.identity,
        of_recorded="the draft was fitted with",
        of_found=f"{target.name} has",
    )
    for line in found.texts:
        notes.warn(True, line)
    notes.note(
        bool(found.unknown),
        f"not compared, because only one side tells it: {found.not_compared}",
    )


def _sizes(notes: Notes, subject: Subject) -> None:
    """Compare sizes with the target's config.json, which may be known without its weights."""
    target, config = subject.target, subject.config
    own = config.get("target_hidden_size", config["hidden_size"])
    notes.refuse(
        target.hidden_size not in (None, own),
        f"the draft reads states of size {own}, {target.name} has hidden size "
        f"{target.hidden_size}: the draft was fitted to another target",
    )
    notes.warn(
        target.embedding is None and target.vocab_size not in (None, config["vocab_size"]),
        f"the draft is for a vocabulary of {config['vocab_size']}, the config of {target.name} has "
        f"{target.vocab_size}: the draft may be for another target",
    )


def _embedding(notes: Notes, subject: Subject) -> None:
    """Check that the embedding equals the target's bit for bit: engines share or replace it."""
    own, other = subject.own.tensors.get("embed_tokens.weight"), subject.target.embedding
    if own is None or other is None:
        return
    notes.refuse(
        own.shape != other.shape,
        f"embed_tokens has shape {list(own.shape)}, the target's {list(other.shape)}: the draft "
        "was fitted to another target",
        EMBEDDING,
    )
    if own.shape == other.shape and not subject.config.get("train_embeddings"):
        notes.refuse(
            not torch.equal(own, other.to(own.dtype)),
            "embed_tokens is not the target's: the draft was fitted to another target",
            EMBEDDING,
        )
        exact = torch.promote_types(own.dtype, other.dtype) == own.dtype
        notes.warn(
            own.dtype != other.dtype,
            f"embed_tokens is the target's, {'stored' if exact else 'rounded'} as {own.dtype} "
            f"instead of {other.dtype}; engines keep a second copy instead of sharing",
        )


Check = Callable[[Subject], Notes]
_BLOCK: tuple[tuple[str, Check], ...] = (
    ("vllm", rules_block.vllm_block),
    ("vllm-cpu", rules_block.vllm_cpu_block),
    ("sglang", rules_block.sglang_block),
    ("llama.cpp", rules_block.llama_cpp_block),
    ("speculators", rules_block.speculators_block),
    ("deepspec", rules_block.deepspec_block),
)
CHECKS: dict[str, tuple[tuple[str, Check], ...]] = {
    "eagle": (
        ("vllm", rules_eagle.vllm_eagle),
        ("vllm-cpu", vllm_cpu),
        ("sglang", rules_eagle.sglang_eagle),
    ),
    "eagle3": (
        ("vllm", rules_eagle.vllm_eagle3),
        ("vllm-cpu", vllm_cpu),
        ("sglang", rules_eagle.sglang_eagle3),
        ("llama.cpp", rules_eagle.llama_cpp_eagle3),
        ("speculators", rules_eagle.speculators_eagle3),
        ("deepspec", rules_eagle.deepspec_eagle3),
    ),
    "peagle": (
        ("vllm", rules_eagle.vllm_peagle),
        ("vllm-cpu", vllm_cpu),
        ("speculators", rules_eagle.speculators_eagle3),
    ),
    "dspark": _BLOCK,
    "dflash": (*_BLOCK, ("transformers", rules_block.transformers_block)),
}
"""The engines that can serve a kind of draft, with their checks."""
READERS = {
    "vllm": ("vllm",),
    "sglang": ("sglang",),
    "speculators": ("speculators", "vllm"),
    "deepspec": ("deepspec",),
    "transformers": ("transformers",),
    "hf": (),
}
"""The engines that a format is written for: a refusal by one of them stops the export."""
_NAMES = {
    "vllm": VLLM,
    "vllm-cpu": VLLM_CPU,
    "sglang": SGLANG,
    "llama.cpp": LLAMA_CPP,
    "speculators": SPECULATORS,
    "deepspec": DEEPSPEC,
    "transformers": TRANSFORMERS,
}


def preflight(subject: Subject, *, formed: bool = False) -> dict[str, list[Finding]]:
    """Return the findings by engine; "spec-train", the general checks, comes first.

    `formed` says that the user chose the form: engines that cannot read it then refuse it. Without,
    each engine is checked with the form that it reads.
    """
    found = {"spec-train": list(general(subject))}
    checks = dict(CHECKS[subject.kind])
    for engine, name in _NAMES.items():
        if engine in checks:
            biases = refused_biases(subject.kind, subject.config, name)
            own = [*_unknown_to(subject, name), *biases, *checks[engine](subject)]
            found[engine] = [*own, *_target(subject, engine, name)]
            if formed and (problem := unread_form(engine, subject)):
                found[engine] = [Finding(name, REFUSE, problem)]
        else:
            text = f"does not support {subject.kind} drafts"
            found[engine] = [Finding(name, REFUSE, text)]
    for engine, findings in found.items():
        if all(finding.level == NOTE for finding in findings):
            name = _NAMES.get(engine, SPEC_TRAIN)
            found[engine] = [Finding(name, OK, "loads and computes what was trained"), *findings]
    return found


def _target(subject: Subject, engine: str, name: str) -> list[Finding]:
    """Say whether an engine's release can serve the target with this draft: see the table."""
    kind = subject.kind
    if kind == "dflash" and subject.config["sample_from_anchor"]:
        kind = "dspark"  # as which engines serve it
    found = served(engine, kind, subject.architectures)
    if found.answer:
        return []
    level = WARN if found.answer is None else REFUSE
    return [Finding(name, level, found.text([kind]), OF_TARGET)]


def refusals(found: dict[str, list[Finding]], form: str) -> list[Finding]:
    """Return the findings that forbid an export in the format `form`."""
    engines = ("spec-train", *READERS[form])
    return [f for engine in engines for f in found[engine] if f.level == REFUSE]
