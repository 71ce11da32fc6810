"""Which of several better conventions is named, and when a better one is luck: figures alone."""

from typing import Any

import pytest

from spec_train.diagnosis.checks import Tried
from spec_train.diagnosis.trials import Trials, best_of, fitting_as_well
from spec_train.simulation.intervals import Comparison


def tried(text: str, length: float, loss: float | None = None, **others: Any) -> Tried:
    given: dict[str, Any] = {
        "check": "rope",
        "text": text,
        "length": length,
        "before": 2.0,
        "interval": (0.1, 0.9),
        "p_value": 0.001,
        "loss": loss,
        "loss_before": None if loss is None else 2.0,
        "loss_p_value": None if loss is None else 0.001,
        "better": True,
    }
    return Tried(**given | others)


def test_the_longer_one_is_named_and_the_lower_loss_among_equals():
    long, equal, short = (
        tried("long", 3.01, 0.5),
        tried("equal", 3.0, 0.4),
        tried("short", 2.5, 0.1),
    )
    assert best_of([short, equal, long]) is equal
    assert best_of([short, tried("long", 3.01)]).text == "long", "without losses, by length alone"
    other = tried("other", 3.0, 0.4, check="layer-ids")
    assert best_of([other, long]) is long, "another check is another mistake"
    assert best_of([]) is None


def test_what_fits_as_well_is_listed():
    best = tried("best", 3.0, 0.5)
    others = [
        best,
        tried("equal", 3.0, 0.505),
        tried("shorter", 2.9, 0.5),
        tried("likelier before", 3.0, 0.6),
        tried("not better", 3.0, 0.5, better=False),
    ]
    assert [one.text for one in fitting_as_well(others, best)] == ["equal"]


@pytest.mark.parametrize("check, uses", [("mask-token", True), ("layer-order", False)])
def test_only_another_reading_of_the_states_is_luck(check, uses):
    """A fifth of the accepted tokens comes from the right states."""
    control = Comparison(
        prompts=13,
        lengths=(2.55, 2.95),
        intervals=((2.5, 2.6), (2.9, 3.0)),
        difference=0.4,
        interval=(0.3, 0.5),
        p_value=0.001,
    )
    best = tried("a", 2.95, check=check)
    trials = Trials(current=None, best=best, control=control)  # type: ignore[arg-type]
    assert trials.uses_states == uses
