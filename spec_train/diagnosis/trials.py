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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.models.families import text_table
from spec_data.shards.errors import SpecDataError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.progress import progress
from spec_train.diagnosis.conventions import FIXES, Neighbour, Setting, neighbours_of
from spec_train.diagnosis.outcome import FINDING, Check, Tried, finding, ok, undecided
from spec_train.diagnosis.sample import document_losses, drafted_chains, slot_counts
from spec_train.drafts import Draft
from spec_train.drafts.mask_token import usual_mask_tokens
from spec_train.losses.head import TargetHead
from spec_train.options.doctor_options import LEAST_DOCUMENTS
from spec_train.simulation.intervals import Comparison, compare

# -- mask tokens -----------------------------------------------------------------------------------
# Which mask tokens are worth trying with a draft.
#
# A mask token is the id of an embedding row, and nothing else marks it: the row is the target's and
# frozen, or the draft's own and trained. So the id decides what the draft computes in both cases.
# The learned states of a P-EAGLE draft, `mask_hidden`, stand beside that row and do not replace it.
#
# V target vocabulary, H hidden size.


def reads_mask_token(draft: Draft) -> bool:
    """Return whether a draft computes anything from its mask token.

    Only a P-EAGLE draft of one depth and a block of one slot do not; other kinds have none.
    """
    if getattr(draft.config, "mask_token_id", None) is None:
        return False
    return (draft.depth if draft.name == "peagle" else draft.config.block_size) > 1


def mask_tokens_to_try(
    draft: Draft, dataset: HiddenStatesDataset, head: TargetHead, counts: Tensor
) -> dict[int, str]:
    """Return ids that may be the mask token of a draft's training, and why; likeliest first.

    Empty for a draft that reads no mask token. Ids with the embedding of the declared one, or of an
    id before them, are left out: the draft computes the same with them.

    Args:
        draft: the draft.
        dataset: a dataset of its target, for the tokenizer.
        head: the target's embedding.
        counts: supervised tokens by id, int64 [V].
    """
    if not reads_mask_token(draft):
        return {}
    raw, config = dataset.target_config(), draft.config
    tables: dict[str, Any] = {**text_table(raw), **raw}
    theirs = head.embed_weight  # [V, H]
    usual = usual_mask_tokens(dataset.path / "target", tables, theirs, counts)
    own = draft.embed_tokens.weight.detach()  # [V, H]
    if config.train_embeddings and own.shape == theirs.shape:
        moved = (own.float() - theirs.to(own.device).float()).norm(dim=-1)  # [V]
        moved[counts.to(moved.device) > 0] = 0
        furthest = "of the tokens that no answer contains, the one that training changed most"
        usual = {int(moved.argmax()): furthest} | usual
    rows, found = [own[config.mask_token_id]], {}
    for token, why in usual.items():
        if not any(torch.equal(own[token], row) for row in rows):
            rows.append(own[token])
            found[token] = why
    return found


# -- trials ----------------------------------------------------------------------------------------


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


# -- trial checks ----------------------------------------------------------------------------------
# The checks that the trials decide: one per kind of convention, and whether the draft learned.


_AGREES = {
    "layer-ids": "the declared layers fit best",
    "layer-order": "the declared order of layers fits best",
    "state-shift": "each token has its own states",
    "final-norm": "the final state fits on its side of the norm",
    "carried-norm": "the declared norms fit best",
    "rope": "the declared rope fits best",
    "slot-layout": "the declared slots draft first",
    "mask-token": "the declared mask token fits best",
    "vocabulary-map": "the declared map fits best",
    "head": "the draft's own LM head fits best",
    "input-order": "token and state enter in the declared order",
    "embedding": "the draft's own embedding fits best",
}


def trial_checks(trials: Trials) -> Iterator[Check]:
    """Return a check for every kind of convention that was tried or could not be."""
    found = {tried.check: tried for tried in reversed(trials.found)}
    learned = _learned(trials)
    if learned.state == FINDING:  # then a better neighbour is better by luck
        yield learned
        return
    for name in _AGREES:
        tried = [t for t in trials.tried if t.check == name]
        lacks = trials.missing.get(name, [])
        if name in found:
            yield _found(found[name], trials)
        elif tried and not lacks:
            yield _agreed(name, tried)
        elif tried:
            yield _agreed(name, tried, _untried(lacks))
        elif lacks:
            yield undecided(name, _untried(lacks))
        elif name == "mask-token" and (why := _any_mask_token(trials)):
            yield ok(name, why)
    yield learned


def _found(best: Tried, trials: Trials) -> Check:
    low, high = best.interval
    against = (
        "with the states of other tokens, because the declared ones are not in the dataset"
        if trials.declared is None and best.round == 1
        else "as declared" if best.round == 1 else "before"
    )  # fmt: skip
    losses = []
    if best.loss is not None and best.loss_before is not None:
        p = best.loss_p_value
        losses = [
            f"teacher-forced loss {best.loss:.3f}, {best.loss_before:.3f} {against} (p = {p:.2g})"
        ]
    others = [f"fits about as well: {other.text}" for other in fitting_as_well(trials, best)]
    return finding(
        best.check,
        f"not as declared; what fits is: {best.text}",
        f"acceptance length {best.length:.2f}, {best.before:.2f} {against} (difference "
        f"{best.length - best.before:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}, p = "
        f"{best.p_value:.2g})",
        *losses,
        *others,
        fix=FIXES[best.check],
    )


def _agreed(name: str, tried: list[Tried], *more: str) -> Check:
    """Compare the best of the others with the convention that was found to fit."""
    last = max(t.round for t in tried)
    best = max((t for t in tried if t.round == last), key=lambda t: t.rank)
    line = (
        f"best of the others: {best.text}, acceptance length {best.length:.3f} instead of "
        f"{best.before:.3f}"
    )
    if best.loss is not None and best.loss_before is not None:
        line += f", loss {best.loss:.3f} instead of {best.loss_before:.3f}"
    text = _AGREES[name] if best.rank <= (0, 0) else "no other one fits clearly better"
    return ok(name, text, line, *more)


def _any_mask_token(trials: Trials) -> str | None:
    """Return why no other mask token was tried; None: the draft has none, or nothing was tried."""
    draft = trials.setting.draft
    if trials.declared is None or getattr(draft.config, "mask_token_id", None) is None:
        return None
    if not reads_mask_token(draft):
        return "no mask token is read: the draft proposes one token, from the known one"
    return "the usual mask tokens have the embedding of the declared one"


def _untried(lacks: list[str]) -> str:
    names = ", ".join(dict.fromkeys(lacks))
    return f"give --target, or a dataset with {names}: neighbours that read them were not tried"


def _learned(trials: Trials) -> Check:
    """Judge whether the draft reads the states of its target at all."""
    name, control, draft = "trained", trials.control, trials.setting.draft
    if control is None:
        lacks = sorted(set(trials.setting.reading.columns) - trials.setting.sample.columns)
        return undecided(name, f"give --target, or a dataset with {', '.join(lacks)}")
    low, high = control.interval
    figures = (
        f"acceptance length {control.lengths[1]:.2f}, {control.lengths[0]:.2f} with the states of "
        f"other tokens (difference {control.difference:+.2f}, 95 % interval {low:+.2f} to "
        f"{high:+.2f})"
    )
    if untouched(draft):
        return finding(
            name,
            "untrained: every norm still has its initial weight of 1",
            figures,
            fix="train it, or name the trained checkpoint: RUN/best",
        )
    if trials.uses_states:
        return ok(name, "the draft uses the states of the target", figures)
    return finding(
        name,
        "the states of this target make little or no difference: the draft was trained on those "
        "of another target, or under a convention that is not among the tried ones",
        figures,
        fix="give the dataset and target that it was trained with; then train again",
    )


def too_few(documents: int) -> Check:
    """Return the check of a dataset with too few documents for any trial."""
    return undecided(
        "conventions",
        f"give a dataset of at least {LEAST_DOCUMENTS} documents, or --split all: {documents} can "
        "decide nothing",
    )
