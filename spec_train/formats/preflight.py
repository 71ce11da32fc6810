"""The preflight: checks a draft against the facts of each engine's release before it is written.

The facts are rows of `spec_data/models/engines.toml`, whose head says how to write one. Here are
the names that their conditions may use, and the checks that hold for every engine. An engine that
does not name a kind of draft cannot serve it.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from spec_data.models.engines import Fact, engines, served
from spec_data.models.rope_settings import yarn_scales
from spec_data.shards.identity import compare
from spec_data.shards.serving import GENERATION
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import files_of
from spec_train.formats.names import unread_text
from spec_train.formats.serving_conditions import noted, warned
from spec_train.formats.target_facts import TargetFacts
from spec_train.options.draft_options import FULL, SLIDING

REFUSE, WARN, NOTE, OK = "refuse", "warn", "note", "ok"
UNREAD, START = "unread", "start"  # rows that are no findings: see `unread_form`, `start_notes`
SPEC_TRAIN = "spec-train"  # reports the checks that hold for every engine
# Rules with a name (see `Finding.rule`); the last: whether an engine serves the draft's target
MAX_POSITIONS, WEIGHTS, EMBEDDING, OF_TARGET = "max-positions", "weights", "embedding", "target"
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
    "in": lambda value, values: value in values,
}


@dataclass(frozen=True)
class Finding:
    """One sentence about one engine's release; REFUSE: the draft would fail or be read wrongly.

    `rule` names a rule that other code asks for; most have no name.
    """

    engine: str
    level: str
    text: str
    rule: str = ""


@dataclass(frozen=True)
class Subject:
    """A draft in our own form, its target, and the form of its output.

    `unread` are keys of another trainer's files of which it is unknown what they change; `beside`
    the names of further files of the export.
    """

    draft: DraftFiles
    target: TargetFacts
    form: str
    unread: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        return self.draft.config

    @property
    def kind(self) -> str:
        return str(self.config[SECTION]["draft"])

    @property
    def layers(self) -> list[int]:
        """Layer ids: outputs of decoder blocks, from 0; empty if it reads only the final hidden."""
        return list(self.config[SECTION].get("layers", ()))

    @property
    def num_layers(self) -> int | None:
        """Decoder blocks of the target; None if neither the target nor the config has them."""
        config = self.config.get("num_target_layers")
        return self.target.num_layers or config or self.origin.get("config.num_hidden_layers")

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the target's class; empty if neither the target nor the draft says them."""
        return self.target.architectures or tuple(self.origin.get("architectures") or ())

    @property
    def origin(self) -> dict[str, Any]:
        """The identity of the target and prompts that it was fitted to; empty if not recorded."""
        return self.config[SECTION].get("origin") or {}

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling that engines take from the target's files, or from those of the capture."""
        recorded: dict[str, float] = self.origin.get(GENERATION) or {}
        return recorded if self.target.sampling is None else self.target.sampling

    @property
    def served_kind(self) -> str:
        """The kind as which engines serve the draft."""
        return files_of(self.kind).served_as(self.config) or self.kind


def draft_facts(subject: Subject) -> dict[str, Any]:
    """Return what conditions and texts of the table may name.

    They are keys of the config, what the kind adds, and what is added here.
    """
    config, section, kind = subject.config, subject.config[SECTION], subject.kind
    layers = subject.layers
    types = set(config.get("layer_types") or ())
    types = types if SLIDING in types else {FULL}
    rope = config.get("rope_parameters") or {}
    yarn = rope.get("rope_type") == "yarn"
    scales = yarn_scales(rope) if yarn else {}
    return {
        **files_of(kind).facts(config),
        **config,
        "kind": kind,
        "form": subject.form,
        "blocks": int(config.get("num_hidden_layers", 1)),  # decoder layers of the draft
        "aux_states": len(layers),
        "first_layer": next(iter(layers), None),
        "last_layer": bool(layers) and layers[-1] + 1 == subject.num_layers,
        "embedding_states": -1 in layers,
        "reduced": config.get("draft_vocab_size", 0) < config.get("vocab_size", 0),
        "mask_hidden": "mask_hidden" in subject.draft.tensors,
        "lm_head": "lm_head.weight" in subject.draft.tensors,
        "sliding": SLIDING in types,
        "sinks": bool(config.get("attention_sink_bias")),
        "mixed": len(types) > 1,  # sliding and full layers
        "window_before": (config.get("sliding_window") or 0) - 1,
        "target_class": next(iter(subject.architectures), None),
        "rope_type": rope.get("rope_type"),
        "rotated": rope.get("partial_rotary_factor", 1),  # share of a head
        "untruncated": yarn and rope.get("truncate") is False,
        "yarn_trained": scales.get("trained"),
        "yarn_without_attention_factor": scales.get("without_attention_factor"),
        "yarn_of_factor": scales.get("of_factor"),
        "beside": " ".join(subject.beside),
        "rotary_table": "inv_freq" in (section.get("positions") or {}),
    }


def holds(condition: str, facts: dict[str, Any]) -> bool:
    """Return whether a condition of the table holds; an empty one always does."""
    return not condition or any(
        all(_term(term, facts) for term in part.split(" and ")) for part in condition.split(" or ")
    )


def _term(term: str, facts: dict[str, Any]) -> bool:
    if term.startswith("not "):
        return not _term(term.removeprefix("not "), facts)
    name, *rest = term.split()
    if not rest:
        return bool(facts.get(name))
    compare_with, value = rest
    values = [_value(word, facts) for word in value.split(",")]
    other = values if compare_with == "in" else values[0]
    return bool(_OPERATORS[compare_with](facts.get(name), other))


def _value(word: str, facts: dict[str, Any]) -> Any:
    return int(word) if word.lstrip("-").isdigit() else facts.get(word, word)


def _rows(subject: Subject, engine: str, *verdicts: str) -> Iterator[tuple[Fact, dict[str, Any]]]:
    """Yield the rows of an engine that hold for a draft, with the facts for their texts."""
    facts = draft_facts(subject) | {"engine": engine}
    for row in engines().facts.rows:
        concerns = row.verdict in verdicts and row.concerns(engine, subject.kind)
        if concerns and holds(row.condition, facts):
            yield row, facts


def unread_form(engine: str, subject: Subject) -> str | None:
    """Return why an engine cannot read the form of `subject`, and what to write; None if it can."""
    return next((row.text.format(**facts) for row, facts in _rows(subject, engine, UNREAD)), None)


def start_notes(engine: str, subject: Subject, folder: str) -> list[str]:
    """Return what is said beside the command that starts an engine with the draft in `folder`."""
    rows = _rows(subject, engine, START)
    return [row.text.format(**facts | {"draft": folder}) for row, facts in rows]


def refusing(draft: str, key: str) -> list[str]:
    """Return the releases that refuse every draft of a kind whose config has `key`, by itself."""
    return [
        row.release
        for engine, row in engines().engine.items()
        if draft in row.drafts
        and any(
            fact.verdict == REFUSE and fact.condition == key and fact.concerns(engine, draft)
            for fact in engines().facts.rows
        )
    ]


def readers(form: str) -> list[str]:
    """Return the engines that a form is written for: a refusal by one of them stops the export."""
    return [engine for engine, row in engines().engine.items() if form in row.forms]


def preflight(subject: Subject, *, formed: bool = False) -> dict[str, list[Finding]]:
    """Return the findings by engine; "spec-train", the general checks, comes first.

    `formed` says that the user chose the form: engines that cannot read it then refuse it. Without,
    each engine is checked with the form that it reads.
    """
    findings = {SPEC_TRAIN: general(subject)}
    findings |= {engine: of_engine(subject, engine, formed=formed) for engine in engines().engine}
    for engine, rows in findings.items():
        if all(finding.level == NOTE for finding in rows):
            ok = Finding(release(engine), OK, "loads and computes what was trained")
            findings[engine] = [ok, *rows]
    return findings


def of_engine(subject: Subject, engine: str, *, formed: bool = False) -> list[Finding]:
    """Return the findings of one engine; none if it loads and computes what was trained."""
    name, row = release(engine), engines().engine[engine]
    if subject.kind not in row.drafts:
        return [Finding(name, REFUSE, f"does not support {subject.kind} drafts")]
    if code := subject.config[SECTION].get("code"):
        text = f"does not know {code}, the class of {subject.kind} drafts for this target"
        return [Finding(name, REFUSE, text)]
    if formed and (problem := unread_form(engine, subject)):
        return [Finding(name, REFUSE, problem)]
    findings = [
        Finding(name, fact.verdict, fact.text.format(**facts))
        for fact, facts in _rows(subject, engine, REFUSE, WARN)
    ]
    answer = served(engine, subject.served_kind, subject.architectures)
    if not answer.answer:
        level = WARN if answer.answer is None else REFUSE
        findings.append(Finding(name, level, answer.text([subject.served_kind]), OF_TARGET))
    return findings


def release(engine: str) -> str:
    """Return the release of an engine, for example "vLLM 0.33.0"; spec-train's is its name."""
    return engine if engine == SPEC_TRAIN else engines().engine[engine].release


def refusals(findings: dict[str, list[Finding]], form: str) -> list[Finding]:
    """Return the findings that forbid an export in the format `form`."""
    return [
        f for engine in (SPEC_TRAIN, *readers(form)) for f in findings[engine] if f.level == REFUSE
    ]


# -- what holds for every engine -------------------------------------------------------------------


def general(subject: Subject) -> list[Finding]:
    """Check what is needed in every engine."""
    checks = _of_weights, _of_config, _of_sizes, _of_embedding, _of_identity, _of_prompts
    rows = chain.from_iterable(check(subject) for check in checks)
    return [Finding(SPEC_TRAIN, *row) for row in rows]


_Rows = Iterator[tuple[str, ...]]
"""(level, text) of findings, and the rule if it has a name."""


def _of_weights(subject: Subject) -> _Rows:
    broken = [
        name
        for name, value in subject.draft.tensors.items()
        if value.is_floating_point() and not bool(torch.isfinite(value).all())
    ]
    if broken:
        yield REFUSE, f"weights that are not finite: {', '.join(broken)}", WEIGHTS


def _of_config(subject: Subject) -> _Rows:
    layers, count, section = subject.layers, subject.num_layers, subject.config[SECTION]
    if layers != sorted(set(layers)):
        yield REFUSE, f"layers {layers} must be ascending and unique"
    if count is not None and layers and layers[-1] >= count:
        text = f"layer {layers[-1:]} of a target with {count} decoder blocks (ids are outputs of "
        yield REFUSE, text + "blocks, from 0)"
    if count is None and layers:
        text = "the target's number of decoder blocks is unknown, so it was not checked whether "
        yield WARN, text + "the draft reads the last one; pass --target DIR"
    if "origin" in section and not section["origin"]:
        text = "the draft does not record its target and the chat template of its training data"
        yield WARN, text
    if subject.unread:
        yield WARN, unread_text(list(subject.unread))
    if subject.origin.get("rope_factors") == "short":
        text = "the states were captured with the short factors of longrope; an engine whose "
        text += "maximum length is above theirs uses the long ones for every prompt, and accepts "
        yield WARN, text + "less. Start it with a smaller one, or capture with --rope-factors long"
    length, limit = subject.config["max_position_embeddings"], subject.target.max_positions
    if limit is not None and length < limit:
        text = f"max_position_embeddings {length} is less than the target's {limit}: at that "
        yield WARN, text + "length engines stop drafting, or end the sequence", MAX_POSITIONS


def _of_prompts(subject: Subject) -> _Rows:
    """Say what serving must have beyond the target's files, and what engines add."""
    for text in warned(subject.origin, subject.sampling):
        yield WARN, text
    for text in noted(subject.origin, subject.sampling):
        yield NOTE, text


def _of_sizes(subject: Subject) -> _Rows:
    """Compare sizes with the target's config.json, which may be known without its weights."""
    target, config = subject.target, subject.config
    size = config.get("target_hidden_size", config["hidden_size"])
    if target.hidden_size not in (None, size):
        text = f"the draft reads states of size {size}, {target.name} has hidden size "
        yield REFUSE, f"{text}{target.hidden_size}: the draft was fitted to another target"
    if target.embedding is None and target.vocab_size not in (None, config["vocab_size"]):
        text = f"the draft is for a vocabulary of {config['vocab_size']}, the config of "
        text += f"{target.name} has {target.vocab_size}: the draft may be for another target"
        yield WARN, text


def _of_embedding(subject: Subject) -> _Rows:
    """Check that the embedding equals the target's bit for bit: engines share or replace it."""
    stored, other = subject.draft.tensors.get("embed_tokens.weight"), subject.target.embedding
    if stored is None or other is None:
        if stored is not None and subject.target.hidden_size:
            text = "the target's embedding was not found in its files, so it was not compared"
            yield WARN, text, EMBEDDING
        return
    if stored.shape != other.shape:
        text = f"embed_tokens has shape {list(stored.shape)}, the target's {list(other.shape)}: "
        yield REFUSE, text + "the draft was fitted to another target", EMBEDDING
    elif not subject.config.get("train_embeddings"):
        if not torch.equal(stored, other.to(stored.dtype)):
            text = "embed_tokens is not the target's: the draft was fitted to another target"
            yield REFUSE, text, EMBEDDING
        if stored.dtype != other.dtype:
            exact = torch.promote_types(stored.dtype, other.dtype) == stored.dtype
            text = f"embed_tokens is the target's, {'stored' if exact else 'rounded'} as "
            text += f"{stored.dtype} instead of {other.dtype}; engines keep a second copy instead "
            yield WARN, text + "of sharing"


def _of_identity(subject: Subject) -> _Rows:
    """Compare the target with the one that the draft was fitted to, fact by fact.

    Every difference is a warning: engines serve fine-tuned and quantised targets on purpose. So is
    a target that is not here, if it has not the name of the one that the draft was fitted to.
    """
    target, origin = subject.target, subject.origin
    level = NOTE if target.identity or target.name == origin.get("target_name") else WARN
    for problem in target.problems:
        yield level, f"not compared with the draft's training: {problem}"
    if not origin or not target.identity:
        return
    fitted, name = "the draft was fitted with", f"{target.name} has"
    compared = compare(origin, target.identity, of_recorded=fitted, of_current=name)
    for line in compared.texts:
        yield WARN, line
    if compared.unknown:
        yield NOTE, f"not compared, because only one side tells it: {compared.not_compared}"
