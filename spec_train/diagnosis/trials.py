"""Which convention was the draft trained with? Measured: acceptance under each, on equal documents.

There are two measures. The acceptance length over all supervised slots is 1 + drafted tokens
accepted per slot, in chains of at most three. The teacher-forced loss of as many steps changes with
every probability. A neighbour is named if one of them is clearly better and the other one is not
worse. Clearly: by a fiftieth, with an interval that excludes 0, and a p-value of a paired
permutation test, multiplied by the number of neighbours (Bonferroni), below 0.05. The best one is
then taken as the convention, and its neighbours are tried, so that several mistakes are found one
after the other.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.errors import SpecDataError
from spec_data.terminal.progress import progress
from spec_train.diagnosis.checks import FINDING, Check, Tried, judged, undecided
from spec_train.diagnosis.conventions import (
    KINDS,
    Neighbour,
    Setting,
    neighbours_of,
    reads_mask_token,
)
from spec_train.diagnosis.sample import document_losses, drafted_chains, slot_counts
from spec_train.drafts import Draft
from spec_train.simulation.intervals import Comparison, compare

log = logging.getLogger(__name__)

_ROUNDS = 3
_LEAST_GAIN, _GAIN = 0.01, 0.02  # in accepted tokens per slot, and as a share of them
_LEVEL = 0.05
LONGEST = 3  # drafted tokens of a chain
_SAME_LOSS = (
    *("layer-ids", "layer-order", "state-shift", "final-norm", "carried-norm", "rope"),
    "mask-token",
)
_OF_STATES = ("layer-ids", "layer-order", "state-shift", "final-norm", "carried-norm")
_USED, _USED_WELL = 0.1, 0.42  # share of tokens that a token's own states must add


@dataclass
class Trials:
    """What was tried and found; `current` is the convention that fits best."""

    current: "_Measured"
    tried: list[Tried] = field(default_factory=list)
    found: list[Tried] = field(default_factory=list)
    """The better conventions, one per round."""
    missing: dict[str, list[str]] = field(default_factory=dict)
    """By check: the columns that the conventions not tried lack."""
    declared: float | None = None
    """Acceptance length of the declared convention; None: its states cannot be read."""
    control: Comparison | None = None
    """The convention that fits best, compared with states of other tokens."""

    @property
    def setting(self) -> Setting:
        """The setting of the convention that fits best."""
        return self.current.setting

    @property
    def uses_states(self) -> bool:
        """Whether the draft is accepted clearly longer than with the states of other tokens.

        A draft of other states is accepted longer by luck when they are read in some other way. So
        more is asked where such a neighbour was taken over.
        """
        found = self.control
        if found is None or found.interval[0] <= 0:
            return False
        if len(self.found) == _ROUNDS:  # one change after the other helps: none is the mistake
            return False
        lucky = any(tried.check in _OF_STATES for tried in self.found)
        share = _USED_WELL if lucky else _USED
        return found.difference >= max(_LEAST_GAIN, share * (found.lengths[0] - 1))


def run_trials(setting: Setting) -> Trials:
    """Try every neighbour of a setting, then those of the best one, until none is better.

    Nothing is tried with a draft that was never trained.
    """
    trials = Trials(_Measured(setting))
    for number in range(1, _ROUNDS + 1):
        if untouched(setting.draft) or not _one_round(trials, number):
            break
    if trials.current.readable:
        trials.control = _against_control(trials.current)

    return trials


def chain_length(draft: Draft) -> int:
    """Return how many drafted tokens of a chain are counted.

    Files of other trainers do not say for how many a draft was trained; at later ones it computes
    anything. An EAGLE-1/2 draft is trained for one, and its chains are all that measures it.
    """
    return draft.depth if draft.name == "eagle" else min(draft.depth, LONGEST)


def untouched(draft: Draft) -> bool:
    """Return whether every norm of a draft has the weight of ones that it starts with."""
    norms = [
        value.detach()
        for name, value in draft.named_parameters()
        if value.ndim == 1 and "norm" in name
    ]
    return bool(norms) and all(bool((value == torch.ones_like(value)).all()) for value in norms)


def _one_round(trials: Trials, number: int) -> bool:
    """Try the neighbours of the current setting; take the best one over if it is clearly better."""
    base, setting = trials.current, trials.setting
    neighbours = neighbours_of(setting)
    if not base.readable:  # only another choice of layers can be measured
        neighbours = [n for n in neighbours if n.check == "layer-ids"]
    possible = [n for n in neighbours if not n.missing(setting.sample)]
    if number == 1:
        for neighbour in neighbours:
            if lacks := neighbour.missing(setting.sample):
                trials.missing.setdefault(neighbour.check, []).extend(lacks)
    if base.readable and number == 1:
        trials.declared = base.length
    better: list[tuple[Tried, _Measured]] = []  # of the others, no copy of a draft is kept
    for neighbour in progress(possible, desc="conventions", unit="tried", leave=False):
        applied = _applied(setting, neighbour)
        if applied is None:
            continue
        other = _Measured(applied)
        tried = _try(base, other, neighbour, number, len(possible))
        trials.tried.append(tried)
        if tried.better:
            better.append((tried, other))
    best = best_of([tried for tried, _ in better])
    if best is None:
        return False
    trials.current = next(other for tried, other in better if tried is best)
    trials.found.append(best)
    return True


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


def fitting_as_well(trials: Trials, best: Tried) -> list[Tried]:
    """Return the neighbours of the same check and round that cannot be told from the best one."""
    return [
        tried
        for tried in trials.tried
        if tried.better
        and (tried.round, tried.check) == (best.round, best.check)
        and tried is not best
        and _as_long(tried, best)
        and (tried.loss or 0) <= (1 + _GAIN) * (best.loss or 0)
    ]


def _as_long(tried: Tried, best: Tried) -> bool:
    return best.length - tried.length < _enough(best.length)


@dataclass
class _Measured:
    """What a setting drafts, and its losses by document: each measured once, when it is asked for.

    A neighbour that is taken over is the base of the next round, and of the control.
    """

    setting: Setting

    @property
    def readable(self) -> bool:
        """Whether the sample has every state that the setting reads."""
        return not set(self.setting.reading.columns) - self.setting.sample.columns

    @cached_property
    def chains(self) -> list[Tensor]:
        """The chains of every slot (see `drafted_chains`), as long as `chain_length`."""
        setting, depth = self.setting, chain_length(self.setting.draft)
        return drafted_chains(setting.draft, setting.sample, setting.reading, depth)

    def counts(self, depth: int) -> np.ndarray:
        """Return the counts of chains of at most `depth` tokens (see `slot_counts`)."""
        return slot_counts(self.setting.sample, self.chains, depth)

    @cached_property
    def own_counts(self) -> np.ndarray:
        """The counts of whole chains."""
        return self.counts(chain_length(self.setting.draft))

    @cached_property
    def losses(self) -> np.ndarray | None:
        """The losses by document (see `document_losses`)."""
        setting, slots = self.setting, self.own_counts[:, 0]
        return document_losses(setting.draft, setting.sample, setting.reading, slots)

    @property
    def length(self) -> float:
        """Acceptance length over all slots."""
        return float(self.own_counts[:, 1].sum() / max(self.own_counts[:, 0].sum(), 1))


def _applied(setting: Setting, neighbour: Neighbour) -> Setting | None:
    """Return the setting of a neighbour; None if no such draft can be made."""
    try:
        return neighbour.applied(setting)
    except (SpecDataError, ValueError, RuntimeError) as error:
        log.debug("%s cannot be tried: %s", neighbour.text, error)
        return None


def _try(base: _Measured, other: _Measured, neighbour: Neighbour, number: int, tries: int) -> Tried:
    """Measure a neighbour against the base, or where that cannot be read against a control."""
    depth = chain_length(base.setting.draft)
    depth = min(depth, neighbour.depth or depth)
    losses = None
    if base.readable:
        found = compare(base.counts(depth), other.counts(depth))
        if found.interval[1] >= -_GAIN * (found.lengths[0] - 1):  # else it is out of the question
            losses = _compared_losses(base, other, neighbour)
    else:
        found = _against_control(other)
    longer = _clearly(found, 1, _enough(found.lengths[0]), tries)
    lower = losses is not None and _clearly(losses, -1, _GAIN * losses.lengths[0], tries)
    if losses is not None:  # the other measure must not be worse
        longer, lower = longer and losses.difference <= 0, lower and found.difference >= 0
    return Tried(
        round=number,
        check=neighbour.check,
        text=neighbour.text,
        length=found.lengths[1],
        before=found.lengths[0],
        interval=found.interval,
        p_value=found.p_value,
        loss=None if losses is None else losses.lengths[1],
        loss_before=None if losses is None else losses.lengths[0],
        loss_p_value=None if losses is None else losses.p_value,
        better=longer or lower,
    )


def _compared_losses(base: _Measured, other: _Measured, neighbour: Neighbour) -> Comparison | None:
    """Compare the losses, where the neighbour has the same slots and the same vocabulary."""
    if neighbour.check not in _SAME_LOSS or base.losses is None or other.losses is None:
        return None
    return compare(base.losses, other.losses)


def _enough(length: float) -> float:
    """Return the smallest difference from an acceptance length that matters."""
    return max(_LEAST_GAIN, _GAIN * (length - 1))


def _clearly(found: Comparison, sign: int, least: float, tries: int) -> bool:
    """Return whether the second one is larger (sign 1) or smaller (-1), by `least` and no chance.

    It is one of so many `tries` (Bonferroni).
    """
    edge = found.interval[0] if sign > 0 else -found.interval[1]
    significant = edge > 0 and found.p_value * tries <= _LEVEL
    return significant and sign * found.difference >= least


def _against_control(measured: _Measured) -> Comparison:
    """Compare a setting with itself on the states of other tokens."""
    setting = measured.setting
    control = _Measured(replace(setting, sample=setting.sample.shuffled()))
    return compare(control.own_counts, measured.own_counts)


# -- checks ----------------------------------------------------------------------------------------


def trial_checks(trials: Trials) -> Iterator[Check]:
    """Yield a check for every kind of convention that was tried or could not be, and "trained"."""
    named = {tried.check: tried for tried in reversed(trials.found)}
    learned = _learned(trials)
    if learned.state == FINDING:  # then a better neighbour is better by luck
        yield learned
        return
    for name in KINDS:
        tried = [t for t in trials.tried if t.check == name]
        lacks = ", ".join(dict.fromkeys(trials.missing.get(name, [])))
        untried = f"give --target, or a dataset with {lacks}: neighbours that read them were not "
        more = [f"{untried}tried"] if lacks else []
        if name in named:
            yield _better(named[name], trials)
        elif tried:
            yield agreed(name, tried, *more)
        elif lacks:
            yield undecided(name, *more)
        elif name == "mask-token" and (why := _no_mask_token(trials)):
            yield judged(name, [], sound=why)
    yield learned


def _better(best: Tried, trials: Trials) -> Check:
    low, high = best.interval
    against = "before" if best.round > 1 else "as declared"
    if trials.declared is None and best.round == 1:
        against = (
            "with the states of other tokens, because the declared ones are not in the dataset"
        )
    losses = []
    if best.loss is not None and best.loss_before is not None:
        p = best.loss_p_value
        losses = [
            f"teacher-forced loss {best.loss:.3f}, {best.loss_before:.3f} {against} (p = {p:.2g})"
        ]
    return judged(
        best.check,
        [f"not as declared; what fits is: {best.text}"],
        f"acceptance length {best.length:.2f}, {best.before:.2f} {against} (difference "
        f"{best.length - best.before:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, p = "
        f"{best.p_value:.2g})",
        *losses,
        *(f"fits about as well: {other.text}" for other in fitting_as_well(trials, best)),
    )


def agreed(name: str, tried: list[Tried], *more: str) -> Check:
    """Compare the best of the others with the convention that was found to fit."""
    last = max(t.round for t in tried)
    best = max((t for t in tried if t.round == last), key=lambda t: t.rank)
    line = (
        f"best of the others: {best.text}, acceptance length {best.length:.3f} instead of "
        f"{best.before:.3f}"
    )
    if best.loss is not None and best.loss_before is not None:
        line += f", loss {best.loss:.3f} instead of {best.loss_before:.3f}"
    text = "" if best.rank <= (0, 0) else "no other one fits clearly better"
    return judged(name, [], line, *more, sound=text)


def _no_mask_token(trials: Trials) -> str | None:
    """Return why no other mask token was tried; None: the draft has none, or nothing was tried."""
    draft = trials.setting.draft
    if trials.declared is None or getattr(draft.config, "mask_token_id", None) is None:
        return None
    if not reads_mask_token(draft):
        return "no mask token is read: the draft proposes one token, from the known one"
    return "the usual mask tokens have the embedding of the declared one"


def _learned(trials: Trials) -> Check:
    """Judge whether the draft reads the states of its target at all."""
    control, setting = trials.control, trials.setting
    if control is None:
        lacks = sorted(set(setting.reading.columns) - setting.sample.columns)
        return undecided("trained", f"give --target, or a dataset with {', '.join(lacks)}")
    low, high = control.interval
    figures = (
        f"acceptance length {control.lengths[1]:.2f}, {control.lengths[0]:.2f} with the states of "
        f"other tokens (difference {control.difference:+.2f}, 95 % interval {low:+.2f} to "
        f"{high:+.2f})"
    )
    problems = []
    if untouched(setting.draft):
        problems = ["untrained: every norm still has its initial weight of 1"]
    elif not trials.uses_states:
        problems = [
            "the states of this target make little or no difference: the draft was trained on "
            "those of another target, or under a convention that is not among the tried ones"
        ]
    return judged("trained", problems, figures)
