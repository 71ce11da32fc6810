"""What `fit` says would help, on curves whose answer is known."""

import pytest

from spec_train.training.result import advice


def curves(trained, held_out, epochs=3.0, chains=2000, steps=300, deeper=0):
    """Lines of metrics.jsonl: tokens accepted of two, as functions of the share of the steps that
    are done. Validations may measure `deeper` depths than training does, all accepted.
    """
    lines = [
        {"step": step, "epoch": epochs * step / steps, "accept_rate/1": gain(step / steps) / 2}
        | {f"accept_rate/{d}": 1.0 for d in range(2, 3 + more)}
        for gain, every, more in ((trained, 10, 0), (held_out, 50, deeper))
        for step in range(every, steps + 1, every)
    ]
    half = steps // 10
    start = {"step": 0, "chains": chains}
    return lines[:half], [start, *(line | {"chains": chains} for line in lines[half:])]


def rising(share):
    return 2 * share


def flat(share):
    return min(1.0, 4 * share)


def higher(share):
    return 1.5 * min(1.0, 4 * share)


@pytest.mark.parametrize(
    ("trained", "held_out", "given", "words"),
    [
        (rising, rising, {}, "more steps"),
        (higher, flat, {}, "more data"),
        (rising, flat, {}, "more data"),
        (flat, flat, {}, ""),  # neither: the curves say nothing
        (higher, flat, {"epochs": 0.9}, ""),  # every document was new
        (rising, rising, {"epochs": 0.9}, "more steps"),
        (
            higher,
            flat,
            {"deeper": 2},
            "more data (accepted of 2 drafted: 1.50 on trained documents, 1.00",
        ),
        (rising, rising, {"chains": 100}, ""),  # too few held-out tokens
        (rising, rising, {"steps": 200}, ""),  # too few validations
        (rising, lambda share: 0.0, {}, ""),
    ],
)
def test_what_would_help_is_judged_by_the_curves(trained, held_out, given, words):
    text = advice(*curves(trained, held_out, **given))
    assert text.startswith(words) and bool(text) == bool(words)


def test_a_run_without_held_out_documents_gets_no_advice():
    training, validation = curves(rising, rising)
    assert advice(training, []) == "" and advice([], validation) == ""
