"""The menu of losses as options: what is refused, what every draft trains with."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.shards.errors import DraftError
from spec_train.cli import main
from spec_train.options.draft_options import draft_options
from tests.factory import tiny_dataset
from tests.spec_train.training import tools as trainer_tools
from tests.tolerance import close, network

config = trainer_tools.config


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=16)


@pytest.mark.parametrize(
    ("text", "expected"), [("auto", None), ("0.5", (1.0, 0.5, 0.25)), ("1,0.5,0", (1.0, 0.5, 0.0))]
)
def test_position_weights_are_a_decay_or_a_list(text: str, expected: Any) -> None:
    options = draft_options("eagle3")(ttt_steps=3, position_weights=text)
    assert options.weights_of(3) == expected


@pytest.mark.parametrize(
    ("draft", "options", "said"),
    [
        ("eagle3", {"position_weights": "1,0.5"}, "2 weights for 7 drafted tokens"),
        ("peagle", {"position_weights": "2"}, "a decay is above 0, at most 1"),
        ("peagle", {"position_weights": "half"}, "expected auto, one decay"),
        ("eagle3", {"ttt_steps": 2, "position_weights": "1,-1"}, "each is 0 or more"),
        ("eagle3", {"ttt_steps": 2, "position_weights": "0,0"}, "and one above 0"),
        ("eagle3", {"position_weights": "0.9", "step_decay": 0.7}, "both decide the weights"),
        ("eagle", {"loss": "reverse-kl", "loss_target": "hard"}, "is infinite"),
    ],
)
def test_values_without_a_meaning_are_refused(
    draft: str, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(DraftError, match=said):
        draft_options(draft)(**options)


EXACT = {  # every draft with another loss than its own; nothing is drawn at random
    "eagle": ("--loss", "tv", "--loss-target", "hard"),
    "eagle3": ("--loss", "jsd", "--ttt-steps", "3", "--position-weights", "1,0,0.5"),
    "peagle": ("--loss", "lk-lambda", "--depths", "1", "--num-layers", "1"),
    "dspark": ("--loss", "reverse-kl", "--num-layers", "1", "--markov-rank", "4"),
    "dflash": ("--loss", "ce", "--loss-target", "hard", "--num-layers", "1"),
    "dflash2": ("--loss", "kl", "--selector-weight", "0.5", "--num-layers", "1"),
    "domino": ("--loss", "tv", "--base-weight", "0.5", "--num-layers", "1"),
}


def gradient(data: Path, out: Path, draft: str, *more: str) -> tuple[float, float]:
    """Return the loss and the gradient norm of the first step of a run; read its draft back."""
    small = ["--seq-len", "48", "--steps", "1", "--validation", "0", "--log-every", "1"]
    flags = ["fit", draft, "--data", str(data), "--out", str(out), *small, *more]
    if draft == "eagle":
        out.with_suffix(".json").write_text('{"noise": 0.0}')
        flags += ["--config", str(out.with_suffix(".json"))]
    assert main([*flags, *EXACT[draft]]) == 0
    options = json.loads((out / "last" / "config.json").read_text())["spec_train"]["options"]
    assert options["loss"] == EXACT[draft][1]
    line = json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])
    return line["loss"], line["grad_norm"]


@pytest.mark.parametrize("draft", EXACT)
def test_micro_batches_of_any_size_have_the_gradient_of_the_step(
    data: Path, tmp_path: Path, draft: str
) -> None:
    whole = gradient(data, tmp_path / "whole", draft, "--batch-size", "4")
    parts = gradient(data, tmp_path / "parts", draft, "--batch-size", "1", "--accumulation", "4")
    close(parts, whole, terms=network(4, backward=True, slots=500), dtype=torch.float32)
    assert whole[1] > 0
