"""Checks of a draft's files: the seal, keys that contradict each other, weights, engines' rules.

Every rule is that of `spec_train.formats`; here its result gets a name.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from spec_data.shards.errors import DraftError, SpecDataError
from spec_train.diagnosis.outcome import OK, Check, finding, ok, undecided
from spec_train.drafts import Draft, own_files, read_draft
from spec_train.evaluation.exporting import keys_changed
from spec_train.formats.draft_files import DraftFiles, read_files
from spec_train.formats.forms import with_facts_in
from spec_train.formats.names import unread_keys
from spec_train.formats.preflight import (
    EMBEDDING,
    MAX_POSITIONS,
    NOTE,
    OF_TARGET,
    REFUSE,
    WARN,
    WEIGHTS,
    Finding,
    Subject,
    general,
    preflight,
)
from spec_train.formats.target_facts import TargetFacts

_MAPS, _ORDER = "spec_train.formats.vocabulary_maps", "spec_train.formats.layer_order"
_COPY = "copy or export the draft again; an edit on purpose gets a new seal by `spec-train export "
_COPY += "--draft {} --out NEW --accept-edited`"


@dataclass(frozen=True)
class ReadDraft:
    """A draft and its files as they are on disk, or why there is none, with what was noticed."""

    draft: Draft | None
    files: DraftFiles | None
    checks: tuple[Check, ...]


def read_checked(folder: Path, facts: TargetFacts) -> ReadDraft:
    """Read a draft of any program; a draft that differs from its seal is read all the same.

    Raises:
        MissingError: there is no draft.
    """
    checks, error = [], None
    with _warnings() as said:
        try:
            draft, files = read_draft(folder, facts)
            text = "as it was sealed" if files.sealed else "no seal: another trainer's"
            checks.append(ok("seal", text))
        except DraftError as problem:
            error = problem
    if error is not None:
        with _warnings() as said:
            try:
                draft, files = read_draft(folder, facts, accept_edited=True)
                checks.append(finding("seal", str(error), fix=_COPY.format(folder)))
            except DraftError as problem:
                return ReadDraft(None, None, (_unreadable(problem, folder, facts),))
    checks.append(ok("files", f"a draft of kind {draft.name}, its keys agree"))
    return ReadDraft(draft, files, (*checks, *_noticed(said)))


def _unreadable(error: DraftError, folder: Path, facts: TargetFacts) -> Check:
    """Return the check of files that make no draft."""
    if facts.embedding is None:  # perhaps it only shares the target's weights
        try:
            lacks = "embed_tokens" not in " ".join(read_files(folder, True).tensors)
        except SpecDataError:
            lacks = False
        if lacks:
            return undecided("files", "give --target or --data: the file shares the target's "
                             "embedding", str(error))  # fmt: skip
    return finding("files", str(error), fix="correct the named key or file, or copy it again")


@contextmanager
def _warnings() -> Iterator[list[logging.LogRecord]]:
    """Collect the warnings of reading a draft instead of printing them."""
    found: list[logging.LogRecord] = []

    class Collector(logging.Handler):
        """Keeps every record."""

        def emit(self, record: logging.LogRecord) -> None:
            """Keep a record."""
            found.append(record)

    logger, collector = logging.getLogger("spec_train"), Collector(logging.WARNING)
    before = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(collector)
        logger.propagate = before


def _noticed(said: list[logging.LogRecord]) -> Iterator[Check]:
    """Name what reading warned of: maps and orders that engines read otherwise, and doubts."""
    lines: dict[str, list[str]] = {}
    for record in said:
        lines.setdefault(record.name, []).append(record.getMessage().removeprefix("warning: "))
    if maps := lines.pop(_MAPS, []):
        yield finding(
            "vocabulary-map",
            maps[0],
            *maps[1:],
            fix="`spec-train export` writes a map that every engine reads alike; if the map was "
            "never filled, train again with a vocabulary",
        )
    if order := lines.pop(_ORDER, []):
        yield finding(
            "layer-order",
            order[0],
            *order[1:],
            fix="`spec-train export` writes ascending ids with sorted parts, which every engine "
            "reads alike",
        )
    doubts = [line for some in lines.values() for line in some if "no seal" not in line]
    text = "the files say everything that decides what is computed"
    yield ok("ambiguous-keys", "read with assumptions" if doubts else text, *doubts)


def subject_of(read: ReadDraft, facts: TargetFacts, folder: Path) -> Subject:
    """Return what the rules of engines are applied to."""
    assert read.draft is not None and read.files is not None
    own = own_files(read.draft, str(folder))
    changed = keys_changed(read.files, own)
    unread = tuple(unread_keys(read.files))
    return Subject(own, with_facts_in(read.files, facts), "vllm", changed, unread)


def general_checks(subject: Subject) -> Iterator[Check]:
    """Name what the rules for every engine find."""
    found = [f for f in general(subject) if f.level in (REFUSE, WARN)]
    by_rule = {name: [f.text for f in found if f.rule == name] for name in
               (WEIGHTS, MAX_POSITIONS, EMBEDDING)}  # fmt: skip
    if texts := by_rule[WEIGHTS]:
        yield finding(WEIGHTS, *texts, fix="train again: the draft diverged, or was damaged")
    else:
        yield ok(WEIGHTS, "every weight is finite")
    limit = subject.target.max_positions
    if texts := by_rule[MAX_POSITIONS]:
        fix = f"set max_position_embeddings to {limit} in the draft's config: it is no length of "
        yield finding(MAX_POSITIONS, *texts, fix=fix + "the training, but what engines serve")
    elif limit is None:
        yield undecided(MAX_POSITIONS, "give --target or --data, whose length is compared")
    else:
        yield ok(MAX_POSITIONS, "at least the target's length")
    if texts := by_rule[EMBEDDING]:
        yield finding(
            EMBEDDING,
            *texts,
            fix="use the draft with the target that it was fitted to; if only its embedding is "
            "damaged or missing, export it again with --target",
        )
    elif subject.target.embedding is None:
        yield undecided(EMBEDDING, "give --target or --data, whose embedding is compared")
    else:
        own = subject.config.get("train_embeddings")
        yield ok(EMBEDDING, "the draft's own, trained" if own else "the target's, bit for bit")
    others = [f.text for f in found if not f.rule]
    if layers := [text for text in others if text.startswith("layer")]:
        yield finding("layer-ids", *layers, fix="correct the layer ids; outputs count from 0")


def engine_check(subject: Subject, engine: str | None) -> Check:
    """Apply the rules of one engine."""
    if engine is None:
        return undecided("engine", "give --engine vllm, sglang or llama.cpp")
    found: list[Finding] = preflight(subject)[engine]
    refused = [f.text for f in found if f.level == REFUSE]
    rest = [f"{f.level}: {f.text}" for f in found if f.level in (WARN, NOTE)]
    name = found[0].engine
    if refused:
        return finding(
            "engine",
            f"{name}: {refused[0]}",
            *refused[1:],
            *rest,
            fix="`spec-train export --check` lists every engine; export for one that serves it",
        )
    if unknown := [f.text for f in found if f.rule == OF_TARGET]:
        return undecided("engine", f"{name}: {unknown[0]}", *rest)
    return ok("engine", f"{name} loads it and computes what was trained", *rest)


def joined(checks: list[Check]) -> list[Check]:
    """Return one check per name: the worst of its checks, with the evidence of the others."""
    found: dict[str, Check] = {}
    for check in checks:
        other = found.get(check.name)
        if other is None:
            found[check.name] = check
        elif other.state == OK or (check.state != OK and other.fix is None):
            found[check.name] = _with(check, other if other.state != OK else None)
        elif check.state != OK:
            found[check.name] = _with(other, check)
    return list(found.values())


def _with(check: Check, other: Check | None) -> Check:
    more = () if other is None else (other.text, *other.evidence)
    return Check(**{**vars(check), "evidence": (*check.evidence, *more)})
