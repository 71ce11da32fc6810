"""Which convention was the draft trained with? Measured: acceptance under each, on equal documents.

There are two measures. The acceptance length over all supervised slots is 1 + drafted tokens
accepted per slot, in chains of at most three. The teacher-forced loss of as many steps changes with
every probability. A neighbour is named if one of them is clearly better and the other one is not
worse. Clearly: by a fiftieth, with an interval that excludes 0, and a p-value of a paired
permutation test, multiplied by the number of neighbours (Bonferroni), below 0.05. The best one is
named; once it is corrected, a second mistake shows in the same way.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch, one_document
from spec_data.shards.errors import SpecDataError
from spec_data.terminal.progress import progress
from spec_train.diagnosis.checks import FINDING, Check, Tried, judged, undecided
from spec_train.diagnosis.conventions import KINDS, Neighbour, Setting, neighbours_of
from spec_train.drafts import Draft
from spec_train.simulation.intervals import Comparison, compare
from spec_train.simulation.simulated_decoding import documents_of, judge_chains

log = logging.getLogger(__name__)

LONGEST = 3  # drafted tokens of a chain
_LEAST_GAIN, _GAIN = 0.01, 0.02  # in accepted tokens per slot, and as a share of them
_LEVEL = 0.05
_OF_STATES = ("layer-ids", "layer-order", "state-shift", "final-norm", "carried-norm")
_SAME_LOSS = (*_OF_STATES, "rope", "window", "mask-token")  # same slots and vocabulary
_USED = 0.01, 0.1  # what a token's own states must add: in tokens, and as a share of the drafted
_USED_WELL = 0.3, 0.42  # chance reached 0.25 with random weights and 40 words


@dataclass
class Measured:
    """What a setting drafts and loses by document, each measured once, when it is asked for."""

    setting: Setting

    @property
    def lacks(self) -> list[str]:
        """The columns of states that the setting reads and the sample does not have."""
        return sorted(set(self.setting.reading.columns) - self.setting.sample.columns)

    @cached_property
    def depth(self) -> int:
        """How many drafted tokens of a chain are counted.

        Files of other trainers do not say for how many a draft was trained; at later ones it
        computes anything. An EAGLE-1/2 draft is trained for one, and its chains are all that
        measures it.
        """
        draft = self.setting.draft
        return draft.depth if draft.one_step else min(draft.depth, LONGEST)

    @cached_property
    def _batches(self) -> list[DraftBatch]:
        sample, reading, draft = self.setting.sample, self.setting.reading, self.setting.draft
        return [sample.read(batch, reading, draft) for batch in sample.batches]

    @cached_property
    def _chains(self) -> list[Tensor]:
        """The chains that the draft proposes at every slot, int64 [B, T, depth] of each pack."""
        draft, head = self.setting.draft, self.setting.sample.head
        with torch.inference_mode():
            return [draft.chains(b, head, self.depth, scored_only=True) for b in self._batches]

    def counts(self, depth: int | None = None) -> np.ndarray:
        """Return supervised slots, and the tokens that a chain there yields, int64 [N, 2].

        By document. Only the first `depth` tokens of a chain count, and the one that the target
        adds.
        """
        rows = []
        for batch, drafted in zip(self.setting.sample.batches, self._chains, strict=True):
            for _, arrays in documents_of(batch, drafted[..., : depth or self.depth]):
                outcomes = judge_chains(*arrays)
                slots = int(outcomes.at_risk[:, 0].sum())
                rows.append((slots, slots + int(outcomes.hit.sum())))
        return np.array(rows, dtype=np.int64).reshape(-1, 2)

    @cached_property
    def losses(self) -> np.ndarray | None:
        """Slots and their summed teacher-forced loss, float64 [N, 2] by document.

        None: the dataset has no teachers for it.
        """
        if not self.setting.sample.teachers:
            return None
        slots = iter(self.counts()[:, 0].tolist())
        rows: list[tuple[int, float]] = []
        for batch in self._batches:
            for document in range(int(batch.document_ids.max()) + 1):
                count = next(slots)
                loss = self._loss(one_document(batch, 0, document)) if count else 0.0
                rows.append((count, count * loss))
        return np.array(rows)

    def _loss(self, batch: DraftBatch) -> float:
        """Return the mean loss of a document; blocks are drawn alike at every call."""
        draft = self.setting.draft
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            counts = draft.slot_counts(batch)
            torch.default_generator.manual_seed(0)
            sums = draft.scored(batch, self.setting.sample.head, counts).sums
        return float(draft.summarise(sums)["loss"] or 0.0)


@dataclass
class Trials:
    """What was tried.

    Attributes:
        current: the convention that fits best: the declared one, or a neighbour that is better.
        tried: every neighbour. best: the one that is clearly better; None: there is none.
        missing: by check, the columns that the conventions not tried lack.
        declared: acceptance length of the declared convention; None: its states cannot be read.
        per_document: its counts, as `Measured.counts`.
        control: the convention that fits best, compared with states of other tokens.
    """

    current: Measured
    tried: list[Tried] = field(default_factory=list)
    best: Tried | None = None
    missing: dict[str, list[str]] = field(default_factory=dict)
    declared: float | None = None
    per_document: tuple[tuple[int, int], ...] = ()
    control: Comparison | None = None


def untouched(draft: Draft) -> bool:
    """Return whether every norm of a draft has the weight of ones that it starts with."""
    norms = [w for name, w in draft.named_parameters() if w.ndim == 1 and "norm" in name]
    return bool(norms) and all(bool((weight == 1).all()) for weight in norms)


def run_trials(setting: Setting) -> Trials:
    """Try every neighbour of a setting; nothing is tried with a draft that was never trained."""
    base = Measured(setting)
    trials = Trials(base)
    neighbours = [] if untouched(setting.draft) else neighbours_of(setting)
    if base.lacks:  # only another choice of layers can be measured
        neighbours = [n for n in neighbours if n.check == "layer-ids"]
    elif neighbours:
        trials.per_document = tuple((a, b) for a, b in base.counts().tolist())
        slots, tokens = base.counts().sum(0).tolist()
        trials.declared = tokens / max(slots, 1)
    possible = []
    for neighbour in neighbours:
        if lacks := neighbour.missing(setting.sample):
            trials.missing.setdefault(neighbour.check, []).extend(lacks)
        else:
            possible.append(neighbour)
    better: list[tuple[Tried, Measured]] = []  # of the others, no copy of a draft stays
    for neighbour in progress(possible, desc="conventions", unit="tried", leave=False):
        try:
            other = Measured(neighbour.applied(setting))
        except (SpecDataError, ValueError, RuntimeError) as error:  # there can be no such draft
            log.debug("%s cannot be tried: %s", neighbour.text, error)
            continue
        tried = _try(base, other, neighbour, len(possible))
        if tried.better and neighbour.leaks and _reads(_against_control(base), _USED):
            tried = replace(tried, better=False)  # it was trained with the declared states
        trials.tried.append(tried)
        if tried.better:
            better.append((tried, other))
    trials.best = best_of([tried for tried, _ in better])
    trials.current = next((other for tried, other in better if tried is trials.best), base)
    if not trials.current.lacks:
        trials.control = _against_control(trials.current)
    return trials


def best_of(better: list[Tried]) -> Tried | None:
    """Return the best of the better neighbours; None: there is none.

    The acceptance length decides. Of those of one check that are accepted about as long, the lower
    loss decides, because it changes with every probability.
    """
    if not better:
        return None
    best = max(better, key=lambda tried: tried.rank)
    close = [t for t in better if t.check == best.check and _as_long(t, best)]
    if any(tried.loss is None for tried in close):
        return best
    return min(close, key=lambda tried: tried.loss or 0.0)


def fitting_as_well(tried: list[Tried], best: Tried) -> list[Tried]:
    """Return the neighbours of the same check that cannot be told from the best one."""
    return [
        other
        for other in tried
        if other.better
        and other.check == best.check
        and other is not best
        and _as_long(other, best)
        and (other.loss or 0) <= (1 + _GAIN) * (best.loss or 0)
    ]


def _as_long(tried: Tried, best: Tried) -> bool:
    return best.length - tried.length < _enough(best.length)


def _enough(length: float) -> float:
    """Return the smallest difference from an acceptance length that matters."""
    return max(_LEAST_GAIN, _GAIN * (length - 1))


def _try(base: Measured, other: Measured, neighbour: Neighbour, tries: int) -> Tried:
    """Measure a neighbour against the base, or where that cannot be read against a control."""
    losses = None
    if base.lacks:
        lengths = _against_control(other)
    else:
        depth = min(base.depth, neighbour.depth or base.depth)
        lengths = compare(base.counts(depth), other.counts(depth))
        possible = lengths.interval[1] >= -_GAIN * (lengths.lengths[0] - 1)
        before = base.losses if possible and neighbour.check in _SAME_LOSS else None
        if before is not None and other.losses is not None:
            losses = compare(before, other.losses)
    longer = _clearly(lengths, 1, _enough(lengths.lengths[0]), tries)
    lower = losses is not None and _clearly(losses, -1, _GAIN * losses.lengths[0], tries)
    if losses is not None:  # the other measure must not be worse
        longer, lower = longer and losses.difference <= 0, lower and lengths.difference >= 0
    return Tried(
        check=neighbour.check,
        text=neighbour.text,
        length=lengths.lengths[1],
        before=lengths.lengths[0],
        interval=lengths.interval,
        p_value=lengths.p_value,
        loss=None if losses is None else losses.lengths[1],
        loss_before=None if losses is None else losses.lengths[0],
        loss_p_value=None if losses is None else losses.p_value,
        better=longer or lower,
    )


def _clearly(compared: Comparison, sign: int, least: float, tries: int) -> bool:
    """Return whether the second one is larger (sign 1) or smaller (-1), by `least` and no chance.

    It is one of so many `tries` (Bonferroni).
    """
    edge = compared.interval[0] if sign > 0 else -compared.interval[1]
    significant = edge > 0 and compared.p_value * tries <= _LEVEL
    return significant and sign * compared.difference >= least


def _against_control(measured: Measured) -> Comparison:
    """Compare a setting with itself on the states of other tokens."""
    setting = measured.setting
    control = Measured(replace(setting, sample=setting.sample.shuffled()))
    return compare(control.counts(), measured.counts())


def _reads(control: Comparison, least: tuple[float, float]) -> bool:
    """Return whether a token's own states add enough to the length with those of other tokens."""
    tokens, share = least
    enough = max(tokens, share * (control.lengths[0] - 1))
    return control.interval[0] > 0 and control.difference >= enough


# -- checks ----------------------------------------------------------------------------------------


def trial_checks(trials: Trials) -> Iterator[Check]:
    """Yield a check for every kind of convention that was tried or could not be, and "trained"."""
    trained = _judge_training(trials)
    yield trained
    if trained.state == FINDING:  # then a better neighbour is better by luck
        return
    for name in KINDS:
        lacks = ", ".join(dict.fromkeys(trials.missing.get(name, [])))
        untried = f"give --target, or a dataset with {lacks}: neighbours that read them were not "
        more = [f"{untried}tried"] if lacks else []
        if trials.best is not None and trials.best.check == name:
            yield _describe(trials.best, trials)
        elif any(tried.check == name for tried in trials.tried):
            yield judged(name, [], *more)
        elif lacks:
            yield undecided(name, *more)


def _describe(best: Tried, trials: Trials) -> Check:
    low, high = best.interval
    against = "as declared"
    if trials.declared is None:
        against = (
            "with the states of other tokens, because the declared ones are not in the dataset"
        )
    evidence = [
        f"acceptance length {best.length:.2f}, {best.before:.2f} {against} (difference "
        f"{best.length - best.before:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, p = "
        f"{best.p_value:.2g})"
    ]
    if best.loss is not None:
        evidence.append(
            f"teacher-forced loss {best.loss:.3f}, {best.loss_before:.3f} {against} (p = "
            f"{best.loss_p_value:.2g})"
        )
    others = fitting_as_well(trials.tried, best)
    evidence += [f"fits about as well: {other.text}" for other in others]
    return judged(best.check, [f"not as declared; what fits is: {best.text}"], *evidence)


def _judge_training(trials: Trials) -> Check:
    """Judge whether the draft reads the states of its target at all."""
    control = trials.control
    if control is None:
        lacks = ", ".join(trials.current.lacks)
        return undecided("trained", f"give --target, or a dataset with {lacks}")
    low, high = control.interval
    # A draft of other states is accepted longer by luck when they are read in some other way. So
    # more is asked where such a neighbour fits best.
    lucky = trials.best is not None and trials.best.check in (*_OF_STATES, "input-order")
    problems = []
    if untouched(trials.current.setting.draft):
        problems = ["untrained: every norm still has its initial weight of 1"]
    elif not _reads(control, _USED_WELL if lucky else _USED):
        problems = [
            "the states of this target make little or no difference: the draft was trained on "
            "those of another target, or under a convention that is not among the tried ones"
        ]
    figures = (
        f"acceptance length {control.lengths[1]:.2f}, {control.lengths[0]:.2f} with the states of "
        f"other tokens (difference {control.difference:+.2f}, 95 % interval {low:+.2f} to "
        f"{high:+.2f})"
    )
    return judged("trained", problems, figures, sound="the draft uses the states of the target")
