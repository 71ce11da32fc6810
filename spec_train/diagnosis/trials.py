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
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch

from spec_data.progress import progress
from spec_data.shards.errors import SpecDataError
from spec_train.diagnosis.conventions import Neighbour, Setting, neighbours_of
from spec_train.diagnosis.outcome import Tried
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
    reached: float | None = None
    """That of the convention that fits best."""
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


def run_trials(setting: Setting, seed: int) -> Trials:
    """Try every neighbour of a setting, then those of the best one, until none is better.

    Nothing is tried with a draft that was never trained.
    """
    trials = Trials(_Measured(setting))
    for number in range(1, _ROUNDS + 1):
        if untouched(setting.draft) or not _one_round(trials, number, seed):
            break
    if trials.current.readable:
        trials.control = _against_control(trials.current, seed)
        trials.reached = trials.control.lengths[1]
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


def _one_round(trials: Trials, number: int, seed: int) -> bool:
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
        tried = _try(base, other, neighbour, number, len(possible), seed)
        trials.tried.append(tried)
        if tried.better:
            better.append((tried, other))
    best = _best([tried for tried, _ in better])
    if best is None:
        return False
    trials.current = next(other for tried, other in better if tried is best)
    trials.found.append(best)
    return True


def _best(better: list[Tried]) -> Tried | None:
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
    return best.length - tried.length < max(_LEAST_GAIN, _GAIN * (best.length - 1))


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
    def chains(self) -> list[np.ndarray]:
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
        draft = neighbour.make() if neighbour.make is not None else setting.draft
    except (SpecDataError, ValueError, RuntimeError) as error:
        log.debug("%s cannot be tried: %s", neighbour.text, error)
        return None
    return replace(setting, draft=draft, reading=neighbour.reading)


def _try(
    base: _Measured, other: _Measured, neighbour: Neighbour, number: int, tries: int, seed: int
) -> Tried:
    """Measure a neighbour against the base, or where that cannot be read against a control."""
    depth = chain_length(base.setting.draft)
    depth = min(depth, neighbour.depth or depth)
    losses = None
    if base.readable:
        found = compare(base.counts(depth), other.counts(depth), seed)
        if not _clearly_shorter(found):
            losses = _compared_losses(base, other, neighbour, seed)
    else:
        found = _against_control(other, seed)
    longer = _clearly_longer(found, tries) and (losses is None or losses.difference <= 0)
    lower = losses is not None and found.difference >= 0 and _clearly_lower(losses, tries)
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


def _compared_losses(
    base: _Measured, other: _Measured, neighbour: Neighbour, seed: int
) -> Comparison | None:
    """Compare the losses, where the neighbour has the same slots and the same vocabulary."""
    if neighbour.check not in _SAME_LOSS or base.losses is None or other.losses is None:
        return None
    return compare(base.losses, other.losses, seed)


def _clearly_longer(found: Comparison, tries: int) -> bool:
    wanted = max(_LEAST_GAIN, _GAIN * (found.lengths[0] - 1))
    significant = found.interval[0] > 0 and found.p_value * tries <= _LEVEL
    return significant and found.difference >= wanted


def _clearly_shorter(found: Comparison) -> bool:
    """Return whether a neighbour is out of the question, so that its loss need not be computed."""
    return found.interval[1] < -_GAIN * (found.lengths[0] - 1)


def _clearly_lower(found: Comparison, tries: int) -> bool:
    significant = found.interval[1] < 0 and found.p_value * tries <= _LEVEL
    return significant and -found.difference >= _GAIN * found.lengths[0]


def _against_control(measured: _Measured, seed: int) -> Comparison:
    """Compare a setting with itself on the states of other tokens."""
    setting = measured.setting
    control = _Measured(replace(setting, sample=setting.sample.shuffled(seed)))
    return compare(control.own_counts, measured.own_counts, seed)
