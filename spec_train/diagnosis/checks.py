"""What the doctor says: checks, each decided or not, and the conventions that were tried.

A finding names a failure with its evidence and what to do. A check that cannot be decided says what
to give so that it can.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spec_data.terminal.command import Result
from spec_data.terminal.text_table import text_table

OK, FINDING, UNDECIDED = "ok", "finding", "undecided"
_MARKS = {FINDING: "FINDING", OK: "ok", UNDECIDED: "not decidable"}
_SHOWN = 6  # conventions of a round


class Rule(NamedTuple):
    """What a check says if it finds nothing, and what to do if it finds something."""

    sound: str
    fix: str


_MASK_KEYS = "mask_token_id, and ptd_token_id, pard_token or dspark_noise_token_id"

CHECKS: dict[str, Rule] = {
    "files": Rule(
        "its keys agree",
        "correct the named key or file, or copy it again",
    ),
    "seal": Rule(
        "as it was sealed",
        "copy or export the draft again; an edit on purpose gets a new seal by `spec-train export "
        "--draft DIR --out NEW --accept-edited`",
    ),
    "ambiguous-keys": Rule("the files say everything that decides what is computed", ""),
    "weights": Rule(
        "every weight is finite",
        "train again: the draft diverged, or was damaged",
    ),
    "max-positions": Rule(
        "at least the target's length",
        "set max_position_embeddings to the target's in the draft's config: it is no length of the "
        "training, but what engines serve",
    ),
    "embedding": Rule(
        "the target's, bit for bit, or trained",
        "use the draft with the target that it was fitted to; if only its embedding is damaged or "
        "missing, export it again with --target",
    ),
    "head": Rule(
        "the draft's own LM head fits best",
        "replace the draft's lm_head by the one that it was trained with; the target's fits better "
        "than the file's",
    ),
    "layer-ids": Rule(
        "the declared layers fit best",
        "write the layer ids that fit into the draft's config (docs/export-and-serving.md says "
        "which key counts outputs and which inputs of blocks), or train again with the declared "
        "ones",
    ),
    "layer-order": Rule(
        "the declared order of layers fits best",
        "sort the parts of fc by ascending layer id: `spec-train export` writes a draft so, which "
        "every engine reads alike",
    ),
    "state-shift": Rule(
        "each token has its own states",
        "the trainer paired each token with the states of a neighbour, which serving does not do. "
        "Correct the shift in the trainer, and train again",
    ),
    "final-norm": Rule(
        "the final state fits on its side of the norm",
        "serve and train with the same state: capture the one that the draft was trained with, or "
        "train again",
    ),
    "carried-norm": Rule(
        "the declared norms fit best",
        "set the flag in the draft's config to the value that fits, or train again",
    ),
    "rope": Rule(
        "the declared rope fits best",
        "write the rope settings that fit into the draft's config, or train again",
    ),
    "slot-layout": Rule(
        "the declared slots draft first",
        "set sample_from_anchor in the draft's config to the value that fits",
    ),
    "mask-token": Rule(
        "the declared mask token fits best",
        f"set the mask token in the draft's config ({_MASK_KEYS} where it has them) to the id that "
        "its trainer masked with. Of the usual ids, this one fits best",
    ),
    "vocabulary-map": Rule(
        "the declared map fits best",
        "replace d2t by the map that fits (offsets: token = row + d2t[row]); `spec-train export` "
        "writes one that every engine reads alike. If the map was never filled, train again",
    ),
    "input-order": Rule(
        "token and state enter in the declared order",
        "exchange the two halves of the input weights: the files concatenate token and state in "
        "the other order",
    ),
    "trained": Rule(
        "the draft uses the states of the target",
        "name the trained checkpoint (RUN/best), or give the dataset and target that it was "
        "trained with; else train again",
    ),
    "target": Rule(
        "weights, config and rope are those of the training",
        "use the target that the draft was fitted to, or capture this one and train again",
    ),
    "quantised": Rule(
        "the target runs in the precision of the capture",
        "serve the target as it was captured, or capture with the quantised target and train again",
    ),
    "chat-template": Rule(
        "prompts are rendered as in the training data",
        "serve with the template and kwargs of the training data, or generate the dataset with "
        "those that are served",
    ),
    "tokenizer": Rule(
        "the tokenizer is that of the training data",
        "serve with the tokenizer of the training data, or generate again",
    ),
    "data": Rule(
        "verified",
        "copy or generate the dataset again; `spec-data verify` lists every failure",
    ),
    "on-policy": Rule(
        "the answers are the target's own",
        "let the target answer the prompts itself (`spec-data regenerate`), and generate and train "
        "from that",
    ),
    "conventions": Rule("", ""),
}
"""Every check by its name, which does not change between releases."""


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
        return CHECKS[self.name].fix if self.state == FINDING else None


def judged(name: str, problems: Iterable[str], *evidence: str, sound: str = "") -> Check:
    """Return a finding with the problems as text and evidence; without one, a sound check.

    Args:
        name: of the check.
        problems: what was found.
        evidence: more lines, in both cases.
        sound: what is said without a problem, instead of the text of the rule.
    """
    lines = tuple(dict.fromkeys(problems))
    if lines:
        more = (*lines[1:], *evidence)
        return Check(name=name, state=FINDING, text=lines[0], evidence=more)
    return Check(name=name, state=OK, text=sound or CHECKS[name].sound, evidence=evidence)


def undecided(name: str, text: str, *evidence: str) -> Check:
    """Return a check that lacks something; `text` says what to give."""
    return Check(name=name, state=UNDECIDED, text=text, evidence=evidence)


def one_per_name(checks: Sequence[Check]) -> list[Check]:
    """Return one check per name: its finding with the evidence of others, else the undecided one.

    The first finding comes first, then what is not decided, then what is sound.
    """
    order = (FINDING, UNDECIDED, OK)
    merged = []
    for name in dict.fromkeys(check.name for check in checks):
        same = sorted(
            (check for check in checks if check.name == name),
            key=lambda check: order.index(check.state),
        )
        worst, others = same[0], [check for check in same[1:] if check.state != OK]
        more = (line for check in others for line in (check.text, *check.evidence))
        merged.append(Check(**{**vars(worst), "evidence": (*worst.evidence, *dict.fromkeys(more))}))
    return merged


@dataclass(frozen=True, kw_only=True)
class Tried:
    """A convention that the draft was run under, compared with the one before it.

    `length` and `before` are acceptance lengths over all supervised slots of the documents: with
    this convention, and with the one that the files declare or that was found better before.
    """

    round: int
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
    which_documents: str = ""
    """Which these are, if other ones were to be expected: such as those that it was trained on."""
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
        return {
            "draft": self.draft,
            "kind": self.kind,
            "findings": [check.name for check in self.findings],
            "checks": [{**vars(check), "fix": check.fix} for check in self.checks],
            "tried": [vars(tried) for tried in self.tried],
            "documents": self.documents,
            "which_documents": self.which_documents,
            "acceptance_length": self.acceptance_length,
        }

    def __str__(self) -> str:
        lines = [f"{self.draft}: {self.kind or 'not readable as a draft'}"]
        if self.documents:
            where = f"{self.documents} documents"
            where += f" ({self.which_documents})" if self.which_documents else ""
            length = self.acceptance_length
            lines[0] += (
                f", tried on {where}"
                if length is None
                else f", acceptance length {length:.2f} over all slots of {where}"
            )
        for state in _MARKS:
            lines += _lines(check for check in self.checks if check.state == state)
        lines += _table(self.tried)
        count = len(self.findings)
        lines.append(f"{self.draft}: {count or 'no'} finding{'' if count == 1 else 's'}")
        return "\n".join(lines)


def _lines(checks: Iterable[Check]) -> Iterator[str]:
    width = max(map(len, _MARKS.values()))
    for check in checks:
        yield f"{_MARKS[check.state].ljust(width)}  {check.name}: {check.text}"
        indent = " " * (width + 2)
        label = "evidence: " if check.state == FINDING else ""
        yield from (f"{indent}{label}{line}" for line in check.evidence)
        if check.fix:
            yield f"{indent}fix: {check.fix}"


def _table(tried: Sequence[Tried]) -> Iterator[str]:
    """Yield the tried conventions, the best of each round first."""
    for number in sorted({one.round for one in tried}):
        some = sorted((t for t in tried if t.round == number), key=lambda t: t.rank, reverse=True)
        before = next((t.loss_before for t in some if t.loss_before is not None), None)
        words = "as declared" if number == 1 else "with the better convention above"
        rows = [
            ("convention", "acceptance length", "p-value", "loss", "p-value"),
            (words, f"{some[0].before:.3f}", "", _number(before, ".3f"), ""),
        ]
        rows += [
            (
                f"{'better: ' if one.better else ''}{one.check}: {one.text}",
                *(f"{one.length:.3f}", f"{one.p_value:.2g}"),
                *(_number(one.loss, ".3f"), _number(one.loss_p_value, ".2g")),
            )
            for one in some[:_SHOWN]
        ]
        yield from text_table(rows).splitlines()
        if len(some) > _SHOWN:
            yield f"and {len(some) - _SHOWN} more, of at most {some[_SHOWN].length:.3f} (in --json)"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
