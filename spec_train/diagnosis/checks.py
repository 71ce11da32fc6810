"""What the doctor says: checks, each decided or not, and the conventions that were tried.

A finding names a failure with its evidence and what to do. A check that cannot be decided says what
to give so that it can.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple
from xml.etree import ElementTree

from spec_data.pages.page import Column, Page, Section, Table, notebook_html
from spec_data.shards.draft_kinds import draft_kinds
from spec_data.terminal.command import Result
from spec_data.terminal.console import wrapped
from spec_data.terminal.text_table import text_table
from spec_train.formats.names import MASK_KEYS

OK, FINDING, UNDECIDED = "ok", "finding", "undecided"
_MARKS = {FINDING: "FINDING", OK: "ok", UNDECIDED: "not decidable"}
_SOUND = "no other convention fits clearly better"
_SHOWN, _BAR = 6, 16  # conventions, and the longest bar
_FINAL_ALONE = ", ".join(name for name, kind in draft_kinds().items() if not kind.layers)


class Code(NamedTuple):
    """What a check looks for: how the failure shows, what it is, and what to do."""

    symptom: str
    cause: str
    fix: str


CHECKS: dict[str, Code] = {
    "files": Code(
        "an engine refuses the draft",
        "keys of its config contradict each other, or tensors are missing",
        "correct the named key or file, or copy it again",
    ),
    "seal": Code(
        "the draft was good before it was copied",
        "its files are not those that were written: edited or damaged",
        "copy or export the draft again; an edit on purpose gets a new seal by `spec-train export "
        "--draft DIR --format hf --out NEW --accept-edited`",
    ),
    "ambiguous-keys": Code(
        "two engines accept differently many tokens",
        "the files leave open what is computed; how they were read is said, and is no finding",
        "",
    ),
    "weights": Code(
        "nothing is accepted, the loss is NaN",
        "weights that are not finite",
        "train again: the draft diverged, or was damaged",
    ),
    "max-positions": Code(
        "good in short chats, cut or refused in long ones",
        "`max_position_embeddings` is the length of the training",
        "set max_position_embeddings to the target's in the draft's config: it is no length of the "
        "training, but what engines serve",
    ),
    "embedding": Code(
        "nothing is accepted",
        "an embedding that is random, or of another target",
        "use the draft with the target that it was fitted to; if only its embedding is damaged or "
        "missing, export it again with --target",
    ),
    "head": Code(
        "nothing is accepted",
        "an LM head that is random, or of another target",
        "the target's head fits better than the file's: replace the draft's lm_head by the one "
        "that it was trained with; if it has a d2t, that may be of another head, or in another "
        "order than the rows",
    ),
    "layer-ids": Code(
        "fine in training, shorter in the engine, by a little or nearly to 1.0",
        "every layer one block off: keys count inputs or outputs of blocks",
        "write the layer ids that fit into the draft's config (docs/export-and-serving.md says "
        "which key counts outputs and which inputs of blocks), or train again with the declared "
        "ones",
    ),
    "layer-order": Code(
        "fine in one engine, bad in another",
        "layers in another order than `fc` was trained with",
        "sort the parts of fc by ascending layer id: `spec-train export` writes a draft so, which "
        "every engine reads alike",
    ),
    "state-shift": Code(
        "fine in its trainer, bad in every engine",
        "tokens were paired with the states of a neighbour",
        "correct the shift in the trainer, and train again: serving pairs each token with its own "
        "states",
    ),
    "streams": Code(
        "a target with several residual streams: fine in training, worse in every engine",
        "the streams were made one state otherwise than engines do",
        "capture the states again with `spec-data generate`, which contracts the streams as "
        "engines do, and train again",
    ),
    "final-norm": Code(
        f"a draft on final states alone ({_FINAL_ALONE}): fine in training, bad in the engine",
        "final states on the other side of the final norm",
        "serve and train with the same state: capture the one that the draft was trained with, or "
        "train again",
    ),
    "carried-norm": Code(
        "all tokens, or those after the first, are accepted less than in training",
        "a norm set otherwise (`norm_output`, `norm_before_residual`, `norm_before_fc`, `fc_norm`, "
        "`qk_norm`)",
        "set the flag in the draft's config to the value that fits; copy the draft again if its "
        "file lost a norm; or train again",
    ),
    "rope": Code(
        "worse, the longer the context",
        "another theta, partial factor or scaling than in training",
        "write the rope settings that fit into the draft's config, or train again",
    ),
    "window": Code(
        "a draft with sliding layers is accepted less than in training",
        "layers with a window that had none in training, or slots that see otherwise than in "
        "training the later ones of their block",
        "set the window keys of the draft's config (docs/windows.md) to what fits, or train again",
    ),
    "slot-layout": Code(
        "a block draft is accepted almost never",
        "it is decoded from the other slot",
        "set sample_from_anchor in the draft's config to the value that fits",
    ),
    "mask-token": Code(
        "drafts with mask slots: tokens of mask slots are bad (all, or all but the first)",
        "another mask token than in training",
        f"set the mask token in the draft's config ({', '.join(MASK_KEYS)}: those that it has) to "
        "the id that its trainer masked with. Of the usual ids, this one fits best",
    ),
    "vocabulary-map": Code(
        "drafted tokens are words without relation",
        "`d2t` holds ids for offsets, was never filled, or is another draft's",
        "replace d2t by the map that fits (offsets: token = row + d2t[row]); `spec-train export` "
        "writes one that every engine reads alike. If the map was never filled, train again",
    ),
    "input-order": Code(
        "nothing is accepted, though every shape fits",
        "token and state are joined in the other order",
        "exchange the two halves of the input weights: the files concatenate token and state in "
        "the other order",
    ),
    "trained": Code(
        "next to nothing is accepted anywhere",
        "an untrained draft, one trained for very few steps, or one trained on other states",
        "name a trained checkpoint (RUN/last is the newest), or give the dataset and target that "
        "it was trained with; else train again",
    ),
    "target": Code(
        "good with one checkpoint, bad with the served one",
        "another target than in training: weights, sizes or rope",
        "use the target that the draft was fitted to, or capture this one and train again",
    ),
    "drift": Code(
        "good with one target, lower with another: a fine-tune, a quantised copy, a later "
        "checkpoint",
        "the other target writes what the draft has not learned; or the draft is wrong with both",
        "let the other target answer prompts, capture some thousand tokens of it, and go on from "
        "this draft (docs/low-acceptance.md#another-checkpoint-of-the-target); of a draft that is "
        "wrong with both, correct its other findings first",
    ),
    "quantised": Code(
        "somewhat lower in the engine",
        "the target is quantised otherwise than it was captured",
        "serve the target as it was captured, or capture with the quantised target and train again",
    ),
    "chat-template": Code(
        "good on stored data, lower in chats",
        "prompts are rendered otherwise than in training",
        "serve with the template and kwargs of the training data, or generate the dataset with "
        "those that are served",
    ),
    "tokenizer": Code(
        "good on stored data, lower in chats",
        "another tokenizer than that of the training data",
        "serve with the tokenizer of the training data, or generate again",
    ),
    "data": Code(
        "training stands still, or stops at a document",
        "a damaged dataset",
        "copy or generate the dataset again; `spec-data verify` lists every failure",
    ),
    "on-policy": Code(
        "good on stored data, lower in decoding",
        "answers that the target would not give",
        "let the target answer the prompts itself (`spec-data regenerate`), and generate and train "
        "from that",
    ),
    "conventions": Code(
        "the report says only what the files decide",
        "the neighbouring conventions were not tried; the reason is said, and is no finding",
        "",
    ),
}
"""Every check by its code, which does not change between releases; docs/doctor.md has them all."""


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

    @property
    def page(self) -> str:
        """Where the failure is explained."""
        return f"docs/doctor.md#{self.name}"


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
    per_document: tuple[tuple[int, int], ...] = field(default=(), repr=False)
    """Supervised slots of each document, and the tokens that chains there yield."""
    next_command: Sequence[str] = ()
    fail_on: Literal["finding", "untried", "never"] = "finding"

    @property
    def exit_code(self) -> int:  # type: ignore[override]
        """1 with what `fail_on` names, or a draft that was not read, else 0."""
        untried = self.fail_on == "untried" and not self.tried
        failed = untried or self.kind is None or bool(self.findings)
        return int(self.fail_on != "never" and failed)

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
        del facts["next_command"], facts["fail_on"], facts["per_document"]
        facts["checks"] = [
            asdict(check) | {"fix": check.fix, "page": check.page} for check in self.checks
        ]
        return facts | {"findings": [check.name for check in self.findings]}

    def details(self) -> str:
        """Return every check, and every convention."""
        return "\n".join([*map(wrapped, self._lines(*_MARKS)), self._picture()])

    def __str__(self) -> str:
        head, length = f"{self.draft}: {self.kind or 'not read'}", ""
        if self.acceptance_length is not None:
            length = f"acceptance length {self.acceptance_length:.2f} over all slots, "
        if self.documents:
            head += f", {length}tried on {self.documents} documents"
        fine = sum(check.state == OK for check in self.checks)
        count = len(self.findings)
        last = f"{count or 'no'} finding{'' if count == 1 else 's'}, {fine} checks found nothing"
        shown = (state for state in _MARKS if state != OK)
        hang = max(map(len, _MARKS.values())) + 2
        lines = [wrapped(x, 2 if x.startswith(" ") else hang) for x in self._lines(*shown)]
        lines += [self._picture(_SHOWN)] if self.tried else []
        return "\n".join([head, *lines, f"{self.draft}: {last} (--verbose)"])

    def conventions(self) -> list[tuple[float, str, str]]:
        """Return length, bar and name of every convention: the declared one, then the longest."""
        declared = self.acceptance_length
        named = []
        for one in sorted(self.tried, key=lambda one: -one.length):
            shorter = declared not in (None, one.before)  # chains of fewer tokens
            before = f" ({one.before:.2f} as declared)" if shorter else ""
            named.append((one.length, f"{one.check}: {one.text}{before}"))
        if declared is not None:
            named.insert(0, (declared, "as declared"))
        most = max((length for length, _ in named), default=1.0)
        unit = _BAR / max(most - 1, 1e-9)
        return [(length, "█" * round((length - 1) * unit), text) for length, text in named]

    def _picture(self, count: int | None = None) -> str:
        """Return the first conventions as bars of text: what is above one token per slot."""
        rows = self.conventions()
        lines = text_table(((f"{x:.2f}", bar, text) for x, bar, text in rows[:count]), "><<")
        left = len(rows) - len(rows[:count])
        more = f"\n{left} more (--verbose)" if left else ""
        return f"acceptance length by convention\n{lines}{more}" if rows else ""

    def _repr_html_(self) -> str:
        """Return findings and conventions as a part of a notebook."""
        return notebook_html(self._page, str(self))

    def _page(self) -> Page:
        wanted = [check for check in self.checks if check.state != OK]
        rows = [[_MARKS[c.state], c.name, c.text, "; ".join(c.evidence), c.fix] for c in wanted]
        columns: list[Column] = [("result", "text"), ("code", "text"), ("what", "text")]
        columns += [("evidence", "text"), ("fix", "text")]
        checks = Table(title="", columns=columns, rows=rows)
        tried = Table(
            title="",
            columns=[("acceptance length", "number"), ("", "text"), ("convention", "text")],
            rows=self.conventions(),
            best=None if self.acceptance_length is None else 0,
        )
        sections = [Section(title="Findings", parts=[checks])] if rows else []
        if self.tried:
            text = f"On {self.documents} documents; the declared convention is marked."
            sections.append(Section(title="Every convention", parts=[tried], text=text))
        return Page(
            title=self.draft,
            kind="Draft",
            lead=f"{self.kind or 'Not readable as a draft'}, {len(self.checks)} checks.",
            figures=[
                ("findings", len(self.findings), "count"),
                ("not decidable", len(wanted) - len(self.findings), "count"),
                ("acceptance length", self.acceptance_length, "number"),
            ],
            sections=sections,
        )

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


_NO_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit_xml(diagnosis: Diagnosis) -> bytes:
    """Return JUnit XML, which CI shows: a finding is a failure, what is not decided is skipped."""
    states = [check.state for check in diagnosis.checks]
    suite = ElementTree.Element("testsuite", name="spec-train doctor", tests=str(len(states)))
    suite.set("failures", str(states.count(FINDING)))
    suite.set("errors", "0")
    suite.set("skipped", str(states.count(UNDECIDED)))
    for check in diagnosis.checks:
        case = ElementTree.SubElement(
            suite, "testcase", classname=_NO_XML.sub("?", diagnosis.draft), name=check.name
        )
        lines = [
            *check.evidence,
            *([f"fix: {check.fix}", f"see {check.page}"] if check.fix else []),
        ]
        text, more = (_NO_XML.sub("?", part) for part in (check.text, "\n".join(lines)))
        if check.state == FINDING:
            ElementTree.SubElement(case, "failure", message=text, type=check.name).text = more
        elif check.state == UNDECIDED:
            ElementTree.SubElement(case, "skipped", message=text).text = more
        elif more:
            ElementTree.SubElement(case, "system-out").text = f"{text}\n{more}"
    root = ElementTree.Element("testsuites")
    root.append(suite)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="utf-8", xml_declaration=True) + b"\n"
