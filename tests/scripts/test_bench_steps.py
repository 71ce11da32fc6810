"""`scripts/bench/steps.py` compares a tree's steps with another's; here with its own."""

import argparse
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts" / "bench"))

import steps


@pytest.mark.long
def test_a_tree_has_the_losses_of_itself(capsys) -> None:
    assert "eagle" in steps.kinds(steps.ROOT)
    steps.line("eagle", steps.ROOT, argparse.Namespace(length=24, vocab=64, rounds=1))
    name, *figures, loss = capsys.readouterr().out.split()
    assert (name, loss) == ("eagle", "same")
    seconds, before, ratio, *peaks = map(float, figures)
    assert seconds > 0 and before > 0 and ratio > 0 and len(peaks) == 3
