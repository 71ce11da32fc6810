"""When the length of training and that of serving part."""

import pytest

from spec_train.simulation.train_serve_gap import train_serve_gap, uncut_length


@pytest.mark.parametrize(
    "forced, served, rounds, warned",
    [
        *((3.0, 2.6, 500, True), (3.0, 2.8, 500, False), (3.0, 1.0, 20, False)),
        *((2.0, 2.4, 500, False), (3.0, None, 500, False), (None, 2.0, 500, False)),
        (1.2, 1.12, 500, False),  # nearly nothing is accepted: two fifths of it are no loss
    ],
)
def test_a_draft_that_is_worse_on_its_own_states_is_warned_of(forced, served, rounds, warned):
    text = train_serve_gap({"product_limit_length": forced}, served, rounds)
    assert (text is not None) == warned
    assert text is None or "counts 3.00 tokens per verification, serving-like decoding 2.60" in text


def test_the_uncut_length_adds_the_products_of_the_rates():
    assert uncut_length([0.5, 0.4, None, 0.9]) == pytest.approx(1 + 0.5 + 0.5 * 0.4)
    assert uncut_length([]) == uncut_length([None]) == 1
