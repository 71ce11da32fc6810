"""The checks that the trials decide: one per kind of convention, and whether the draft learned."""

from collections.abc import Iterator

from spec_train.diagnosis.conventions import FIXES
from spec_train.diagnosis.mask_tokens import reads_mask_token
from spec_train.diagnosis.outcome import FINDING, Check, Tried, finding, ok, undecided
from spec_train.diagnosis.trials import Trials, fitting_as_well, untouched
from spec_train.options.doctor_options import LEAST_DOCUMENTS

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
