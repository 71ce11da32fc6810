"""Options of losses: weights of positions, and what is refused."""

from typing import Any

import pytest

from spec_data.shards.errors import DraftError
from spec_train.options.kinds import draft_options


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", None), ("0.5", (1.0, 0.5, 0.25)), ("1,0.5,0", (1.0, 0.5, 0.0))]
)
def test_position_weights_are_a_decay_or_a_list(text: str, expected: Any) -> None:
    options = draft_options("eagle3")(ttt_steps=3, position_weights=text)
    assert options.weights_of(3) == expected


@pytest.mark.parametrize(("text", "smoothing"), [("0.5", None), ("dpace", 0.5), ("dpace:1", 1.0)])
def test_dpace_is_a_weighting_of_block_drafts(text: str, smoothing: float | None) -> None:
    options = draft_options("dspark")(block_size=2, position_weights=text)
    assert options.smoothing == smoothing
    assert options.weights_of(2) == ((1.0, 0.5) if smoothing is None else (1.0, 1.0))


@pytest.mark.parametrize(
    ("draft", "options", "said"),
    [
        ("eagle3", {"position_weights": "1,0.5"}, "2 weights for 7 drafted tokens"),
        ("peagle", {"position_weights": "2"}, "a decay is above 0, at most 1"),
        ("peagle", {"position_weights": "half"}, "expected auto, one decay"),
        ("eagle3", {"ttt_steps": 2, "position_weights": "1,-1"}, "each is 0 or more"),
        ("eagle3", {"ttt_steps": 2, "position_weights": "0,0"}, "and one above 0"),
        ("eagle3", {"position_weights": "0.9", "step_decay": 0.7}, "both decide the weights"),
        ("mtp", {"position_weights": "0.9", "step_decay": 0.7}, "both decide the weights"),
        ("eagle3", {"position_weights": "dpace"}, "expected auto, one decay"),
        ("dflash", {"position_weights": "dpace:0"}, "above 0 and at most 1"),
        ("dflash", {"position_weights": "dpce"}, "1,0.8,0.5, or dpace"),
        ("lilicorr", {"position_weights": "dpace:much"}, "above 0 and at most 1"),
        ("eagle", {"loss": "reverse-kl", "loss_target": "hard"}, "is infinite"),
    ],
)
def test_values_without_a_meaning_are_refused(
    draft: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DraftError, match=said):
        draft_options(draft)(**options)


def test_several_values_may_be_a_list_as_of_every_function() -> None:
    given = {"layers": [0, 2, 4], "ttt_steps": 3, "position_weights": [1, 0.8, 0.5]}
    options: Any = draft_options("eagle3")(**given)
    assert (options.layers, options.position_weights) == ("0,2,4", "1,0.8,0.5")
