"""A small dataset gets smaller steps and more epochs; what the user gave stays as it is."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spec_data.terminal.given import changed
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.drafts.mtp.options import MtpOptions
from spec_train.options.training import Training
from spec_train.training import settings
from spec_train.training.settings import sized, with_rate
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import change, run

data, config = trainer_tools.data, trainer_tools.config
SEQ = 100


def dataset(packs: float):
    """Documents that fill `packs` packs of SEQ tokens; as many again have nothing to learn."""
    count = round(packs * SEQ / 50)
    lengths = np.full(2 * count, 50)
    return SimpleNamespace(lengths=lengths, supervised=np.arange(2 * count) % 2, growing=None)


def options(**given):
    return Training(**{"data": "d", "out": "o", "seq_len": SEQ, "validation": 0.0, **given})


def size(packs: float, world: int = 1, started=None, **given) -> tuple:
    config = sized(options(**given), dataset(packs), world, started)
    return config.batch_size, config.accumulation, config.epochs


@pytest.mark.parametrize(
    ("packs", "given", "expected"),
    [
        (4 * 500, {}, (4, 1, 3)),  # a large one gets the defaults
        (4 * 100, {}, (4, 1, 15)),  # 100 steps per epoch: more epochs, and then smaller steps
        (4 * 99, {}, (2, 1, 8)),  # 198 steps
        (10, {}, (1, 1, settings.MOST_EPOCHS)),
        (4 * 399, {"world": 4}, (2, 1, 8)),  # processes and accumulation count as packs
        (4 * 399, {"accumulation": 4}, (2, 4, 8)),
        (108, {"epochs": 2}, (1, 1, 2)),  # what the user gave stays
        (108, {"batch_size": 8}, (8, 1, 20)),
        (108, {"steps": 7, "batch_size": 2}, (2, 1, None)),
        (16 * 1500, {"preset": "50k"}, (4, 4, 6)),
        (160, {"preset": "50k"}, (1, 1, 10)),
        (400, {"preset": "50k"}, (4, 1, 15)),  # --accumulation first: a pack costs the same
        (160, {"preset": "50k", "epochs": 2, "batch_size": 2, "accumulation": 2}, (2, 2, 2)),
    ],
)
def test_steps_and_epochs_fit_the_dataset(packs, given, expected):
    assert size(packs, **given) == expected


def test_a_mixture_counts_every_document_by_its_weight():
    documents = dataset(100)
    half = len(documents.lengths) // 2
    parts = ((0, half, 3), (half, 2 * half, 0.5))
    shares = [SimpleNamespace(first=a, last=b, weight=weight) for a, b, weight in parts]
    mixture = object.__new__(settings.Mixture)
    vars(mixture).update(vars(documents), shares=shares)
    assert settings.packs_of_epoch(options(), mixture) == 50 * 3 + 50 * 0.5


@pytest.mark.parametrize(
    ("steps", "lr"), [(10, 0.008), (50, 0.008), (100, 0.008), (200, 0.004), (400, 0.002)]
)
def test_a_short_run_from_random_weights_has_a_higher_rate(steps, lr):
    plan = changed(options(), lr=0.002)  # what the width decides
    fresh, trained = Eagle3Options(), MtpOptions()
    assert with_rate(plan, fresh, steps, None).lr == pytest.approx(lr)
    assert with_rate(plan, fresh, 30 * steps + 400, None).lr == 0.002
    assert with_rate(plan, trained, steps, None).lr == 0.002  # as its target wrote it
    assert with_rate(changed(plan, init_from="run"), fresh, steps, None).lr == 0.002
    assert with_rate(options(lr=0.002), fresh, steps, None).lr == 0.002  # given
    assert with_rate(plan, fresh, steps, {"lr": 0.003}).lr == 0.003  # a run that resumes


@pytest.mark.long
def test_a_small_run_says_its_size_and_resumes_with_the_same_command(config, caplog, monkeypatch):
    monkeypatch.setattr(settings, "LEAST_STEPS", 8)
    given = change(config, steps=None, epochs=None, batch_size=None, validation=0.2, accumulation=1)
    with caplog.at_level(logging.INFO):
        first = run(given)
    assert "small dataset" in caplog.text and "steps of 1 pack" in caplog.text
    table = json.loads((Path(config.out) / "fit.json").read_text())
    assert table["batch_size"] == 1 and table["epochs"] > 1
    assert first.step >= 8 / 2
    monkeypatch.setattr(settings, "LEAST_STEPS", 1000)  # as another release
    again = run(given)
    assert again.finished and again.step == first.step
