"""What the doctor says: checks, each decided or not, and the conventions that were tried.

A finding names a failure with its evidence and what to do. A check that cannot be decided says what
to give so that it can.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped

OK, FINDING, UNDECIDED = "ok", "finding", "undecided"
_MARKS = {FINDING: "FINDING", OK: "ok", UNDECIDED: "not decidable"}
_SOUND = "no other convention fits clearly better"
_MASK_KEYS = "mask_token_id, and ptd_token_id, pard_token or dspark_noise_token_id"

CHECKS: dict[str, str] = {
    "files": "correct the named key or file, or copy it again",
    "seal": "copy or export the draft again; an edit on purpose gets a new seal by `spec-train "
    "export --draft DIR --format hf --out NEW --accept-edited`",
    "ambiguous-keys": "",
    "weights": "train again: the draft diverged, or was damaged",
    "max-positions": "set max_position_embeddings to the target's in the draft's config: it is no "
    "length of the training, but what engines serve",
    "embedding": "use the draft with the target that it was fitted to; if only its embedding is "
    "damaged or missing, export it again with --target",
    "head": "replace the draft's lm_head by the one that it was trained with; the target's fits "
    "better than the file's",
    "layer-ids": "write the layer ids that fit into the draft's config (docs/export-and-serving.md "
    "says which key counts outputs and which inputs of blocks), or train again with the declared "
    "ones",
    "layer-order": "sort the parts of fc by ascending layer id: `spec-train export` writes a draft "
    "so, which every engine reads alike",
    "state-shift": "the trainer paired each token with the states of a neighbour, which serving "
    "does not do. Correct the shift in the trainer, and train again",
    "final-norm": "serve and train with the same state: capture the one that the draft was trained "
    "with, or train again",
    "carried-norm": "set the flag in the draft's config to the value that fits, or train again",
    "rope": "write the rope settings that fit into the draft's config, or train again",
    "slot-layout": "set sample_from_anchor in the draft's config to the value that fits",
    "mask-token": f"set the mask token in the draft's config ({_MASK_KEYS} where it has them) to "
    "the id that its trainer masked with. Of the usual ids, this one fits best",
    "vocabulary-map": "replace d2t by the map that fits (offsets: token = row + d2t[row]); "
    "`spec-train export` writes one that every engine reads alike. If the map was never filled, "
    "train again",
    "input-order": "exchange the two halves of the input weights: the files concatenate token and "
    "state in the other order",
    "trained": "name the trained checkpoint (RUN/best), or give the dataset and target that it was "
    "trained with; else train again",
    "target": "use the target that the draft was fitted to, or capture this one and train again",
    "quantised": "serve the target as it was captured, or capture with the quantised target and "
    "train again",
    "chat-template": "serve with the template and kwargs of the training data, or generate the "
    "dataset with those that are served",
    "tokenizer": "serve with the tokenizer of the training data, or generate again",
    "data": "copy or generate the dataset again; `spec-data verify` lists every failure",
    "on-policy": "let the target answer the prompts itself (`spec-data regenerate`), and generate "
    "and train from that",
    "conventions": "",
}
"""Every check by its name, which does not change between releases: what to do about a finding."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check of a draft.

    Attributes:
        name: a key of `CHECKS`.
        state: "ok", "finding" or "undecided".
        text: the result in one sentence; of an undecided check, what to give.
        evidence: figures and details, a line each.
    """

    name: str
    state: str
    text: str
    evidence: tuple[str, ...] = ()

    @property
    def fix(self) -> str | None:
        """What to do about a finding."""
        return CHECKS[self.name] if self.state == FINDING else None


def judged(name: str, problems: Iterable[str], *evidence: str, sound: str = _SOUND) -> Check:
    """Return a finding with the problems as text and evidence; without one, a sound check.

    `evidence` are more lines, in both cases; `sound` is said without a problem.
    """
    lines = tuple(dict.fromkeys(problems))
    if lines:
        more = (*lines[1:], *evidence)
        return Check(name=name, state=FINDING, text=lines[0], evidence=more)
    return Check(name=name, state=OK, text=sound, evidence=evidence)


def undecided(name: str, text: str, *evidence: str) -> Check:
    """Return a check that lacks something; `text` says what to give."""
    return Check(name=name, state=UNDECIDED, text=text, evidence=evidence)


def one_per_name(checks: Sequence[Check]) -> list[Check]:
    """Return one check per name: its finding with the evidence of others, else the undecided one.

    The first finding comes first, then what is not decided, then what is sound.
    """
    order = (FINDING, UNDECIDED, OK)
    merged: dict[str, Check] = {}
    for check in sorted(checks, key=lambda check: order.index(check.state)):
        first = merged.setdefault(check.name, check)
        if first is not check and check.state != OK:
            lines = (*first.evidence, check.text, *check.evidence)
            merged[check.name] = replace(first, evidence=tuple(dict.fromkeys(lines)))
    return [merged[name] for name in dict.fromkeys(check.name for check in checks)]


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A convention that the draft was run under, compared with the declared one.

    `length` and `before` are acceptance lengths over all supervised slots of the documents: with
    this convention, and with the declared one.
    """

    check: str
    text: str
    length: float
    before: float
    interval: tuple[float, float]
    """95 % interval of `length` minus `before`, over the documents."""
    p_value: float
    loss: float | None
    """Teacher-forced loss per slot; None: not comparable, or the dataset has no teachers for it."""
    loss_before: float | None
    loss_p_value: float | None
    better: bool

    @property
    def rank(self) -> tuple[float, float]:
        """Larger is better: the gain in acceptance length, then the lower loss."""
        gain = 0.0 if self.loss is None else (self.loss_before or 0.0) - self.loss
        return self.length - self.before, gain


@dataclass(frozen=True, kw_only=True)
class Diagnosis(Result):
    """The result of `spec-train doctor`: every check, and every convention that was tried."""

    draft: str
    kind: str | None
    """Name of the kind of draft; None if its files cannot be read."""
    checks: tuple[Check, ...]
    tried: tuple[Tried, ...] = ()
    documents: int = 0
    """Documents that the conventions were tried on."""
    acceptance_length: float | None = None
    """Of the draft as its files declare it, over all supervised slots; None: not measured."""
    next_command: Sequence[str] = ()

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 with findings, else 0."""
        return int(bool(self.findings))

    @property
    def findings(self) -> tuple[Check, ...]:
        """The checks that found a failure."""
        return tuple(check for check in self.checks if check.state == FINDING)

    def named(self, name: str) -> Check | None:
        """Return the check of that name, None if it does not apply to this kind of draft."""
        return next((check for check in self.checks if check.name == name), None)

    def facts(self) -> dict[str, Any]:
        """Return plain values of everything."""
        facts = asdict(self)
        del facts["next_command"]
        facts["checks"] = [asdict(check) | {"fix": check.fix} for check in self.checks]
        return facts | {"findings": [check.name for check in self.findings]}

    def details(self) -> str:
        """Return every check."""
        return "\n".join(map(wrapped, self._lines(*_MARKS)))

    def __str__(self) -> str:
        head, length = f"{self.draft}: {self.kind or 'not readable as a draft'}", ""
        if self.acceptance_length is not None:
            length = f"acceptance length {self.acceptance_length:.2f} over all slots, "
        if self.documents:
            head += f", {length}tried on {self.documents} documents"
        fine = sum(check.state == OK for check in self.checks)
        count = len(self.findings)
        last = f"{count or 'no'} finding{'' if count == 1 else 's'}, {fine} checks are fine"
        shown = (state for state in _MARKS if state != OK)
        hang = max(map(len, _MARKS.values())) + 2
        lines = [wrapped(x, 2 if x.startswith(" ") else hang) for x in self._lines(*shown)]
        return "\n".join([head, *lines, f"{self.draft}: {last} (--verbose)"])

    def _lines(self, *states: str) -> Iterator[str]:
        width = max(map(len, _MARKS.values()))
        indent = " " * (width + 2)
        chosen = (check for check in self.checks if check.state in states)
        for check in sorted(chosen, key=lambda check: [*_MARKS].index(check.state)):
            yield f"{_MARKS[check.state]:{width}}  {check.name}: {check.text}"
            label = "evidence: " if check.state == FINDING else ""
            yield from (f"{indent}{label}{line}" for line in check.evidence)
            if check.fix:
                yield f"{indent}fix: {check.fix}"
