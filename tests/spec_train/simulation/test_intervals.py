"""Intervals over prompts, and the paired comparison: against loops, and against known answers."""

import itertools
import json
import logging
import random
from pathlib import Path

import numpy as np
import pytest

import spec_train
from spec_data.shards.errors import ConfigError, MissingError
from spec_train.cli import main
from spec_train.simulation.intervals import FEWEST, compare, length_interval, ratio_interval
from tests.spec_train.reports.written import real_figures


def counts(prompts: int, mean: float, seed: int, spread: float = 0.5) -> np.ndarray:
    """Verifications and tokens of made-up prompts, whose lengths differ from prompt to prompt."""
    generator = np.random.default_rng(seed)
    rounds = generator.integers(5, 40, prompts)
    lengths = np.maximum(1.0, generator.normal(mean, spread, prompts))
    return np.stack([rounds, np.rint(rounds * lengths)], axis=1).astype(np.int64)


def slow_interval(table: np.ndarray, resamples: int) -> tuple[float, float]:
    """Draw prompts one by one, and sort."""
    draw, found = random.Random(5), []
    for _ in range(resamples):
        chosen = [draw.randrange(len(table)) for _ in table]
        rounds = sum(int(table[i][0]) for i in chosen)
        found.append(sum(int(table[i][1]) for i in chosen) / rounds)
    found.sort()
    return found[int(0.025 * resamples)], found[int(0.975 * resamples)]


@pytest.mark.parametrize("prompts", [8, 64])
def test_the_interval_is_that_of_a_loop(prompts: int) -> None:
    table = counts(prompts, 2.5, seed=1)
    low, high = length_interval(table)
    slow_low, slow_high = slow_interval(table, 3000)
    width = slow_high - slow_low
    assert low < table[:, 1].sum() / table[:, 0].sum() < high
    assert abs(low - slow_low) < 0.15 * width and abs(high - slow_high) < 0.15 * width


def test_the_interval_covers_the_truth_as_often_as_it_says() -> None:
    """Samples of 40 prompts from one population: about 95 % of the intervals hold its length."""
    population = counts(100_000, 2.5, seed=2)
    truth = population[:, 1].sum() / population[:, 0].sum()
    generator = np.random.default_rng(3)
    inside = 0
    for seed in range(100):
        low, high = length_interval(population[generator.integers(0, 100_000, 40)], seed)
        inside += low < truth < high
    assert 85 <= inside <= 99  # a binomial of 0.93 is below 85 once in 400 times


@pytest.mark.parametrize("busy", [0.0, 0.6])
def test_the_interval_of_a_speed_up_is_that_of_a_loop(busy: float) -> None:
    """A machine that does something else during some of the responses makes it wide."""
    generator = np.random.default_rng(4)
    tokens = generator.integers(20, 60, (16, 2))
    slow = 1 + 5 * (generator.random((16, 2)) < busy)
    seconds = tokens * slow / (1.8, 1.0)  # the draft is 1.8 times as fast
    rows = np.stack([tokens[:, 0], seconds[:, 0], tokens[:, 1], seconds[:, 1]], axis=1)
    draw, found = random.Random(6), []
    for _ in range(3000):
        with_draft, its_time, alone, time = (
            sum(column) for column in zip(*(rows[draw.randrange(16)] for _ in rows), strict=True)
        )
        found.append(with_draft / its_time / (alone / time))
    found.sort()
    expected = found[75], found[2925]
    width = expected[1] - expected[0]
    assert width < 1e-9 if not busy else width > 0.5
    assert ratio_interval(rows) == pytest.approx(expected, abs=0.15 * width + 1e-9)
    assert ratio_interval(rows[: FEWEST - 1]) is None


def test_prompts_without_a_verification_do_not_count() -> None:
    table = counts(20, 2.0, seed=4)
    padded = np.concatenate([table, np.zeros((5, 2), dtype=np.int64)])
    assert length_interval(padded) == length_interval(table)
    assert length_interval(table[:8]) is not None and length_interval(table[:7]) is None
    assert length_interval(np.zeros((0, 2), dtype=np.int64)) is None


def exact_p(a: np.ndarray, b: np.ndarray) -> float:
    """All 2 ** N exchanges."""
    gaps = []
    for swaps in itertools.product((False, True), repeat=len(a)):
        one = [y if s else x for x, y, s in zip(a.tolist(), b.tolist(), swaps, strict=True)]
        other = [x if s else y for x, y, s in zip(a.tolist(), b.tolist(), swaps, strict=True)]
        gaps.append(
            abs(
                sum(e for _, e in one) / sum(r for r, _ in one)
                - sum(e for _, e in other) / sum(r for r, _ in other)
            )
        )
    return sum(gap >= gaps[0] - 1e-12 for gap in gaps) / len(gaps)


@pytest.mark.parametrize("gain", [0.0, 0.1, 0.4])
def test_the_p_value_is_that_of_all_exchanges(gain: float) -> None:
    a = counts(9, 2.2, seed=6)
    b = a + np.stack([np.zeros(9), np.rint(gain * a[:, 0])], axis=1).astype(np.int64)
    b[::3, 1] += 2
    found = compare(a, b)
    assert found.p_value == pytest.approx(exact_p(a, b), abs=0.03)
    assert found.difference == pytest.approx(found.lengths[1] - found.lengths[0])


def write(path: Path, table: np.ndarray, names: list[str], **changes: object) -> Path:
    lines = [
        {"prompt": name, "rounds": int(rounds), "emitted": int(emitted)}
        for name, (rounds, emitted) in zip(names, table, strict=True)
    ]
    report = real_figures() | {"draft": path.stem}
    path.write_text(json.dumps(report | {"per_prompt": lines} | changes))
    return path


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture, caplog) -> None:
    caplog.set_level(logging.WARNING)
    a, names = counts(12, 2.0, seed=8), [f"p{i}" for i in range(12)]
    b = a + np.array([0, 6])
    one = write(tmp_path / "one.json", a, names)
    two = write(tmp_path / "two.json", b[1:], names[1:], temperature=1.0)
    assert main(["compare", str(one), str(two), "--json", str(tmp_path / "out.json")]) == 0
    printed = capsys.readouterr().out
    expected = compare(a[1:], b[1:])
    assert f"B - A  {expected.difference:+.3f}" in printed and "excludes 0" in printed
    assert "over 11 prompts" in printed
    assert "warning[compare]: temperature differs: 0.0 and 1.0" in caplog.text
    assert "warning[compare]: 1 prompts are in one file only" in caplog.text
    figures = json.loads((tmp_path / "out.json").read_text())
    assert figures["difference"] == expected.difference and figures["prompts"] == 11


def test_prompts_without_a_verification_are_left_out_and_named(tmp_path: Path, caplog) -> None:
    table = counts(4, 2.0, seed=9)
    table[2] = 0
    names = ["a", "b", "c", "d"]
    found = spec_train.compare(
        write(tmp_path / "one.json", table, names), write(tmp_path / "two.json", table, names)
    )
    assert found.prompts == 3
    assert "warning[compare]: 1 prompts have no verification" in caplog.text


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    table = counts(3, 2.0, seed=9)
    one = write(tmp_path / "one.json", table, ["a", "b", "c"])
    other = write(tmp_path / "other.json", table, ["c", "d", "e"])
    with pytest.raises(ConfigError, match="at least 2"):
        spec_train.compare(one, other)
    with pytest.raises(MissingError, match="eval --json"):
        spec_train.compare(one, tmp_path / "absent.json")
    (tmp_path / "data.json").write_text(json.dumps({"draft": "d", "data": {}}))
    with pytest.raises(ConfigError, match=r"data\.json: has no real decoding"):
        spec_train.compare(tmp_path / "data.json", one)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        spec_train.compare(tmp_path / "bad.json", one)
    for lines in ([1], [{"prompt": "a"}], [{"prompt": "a", "rounds": "3", "emitted": 1}]):
        damaged = write(tmp_path / "damaged.json", table, ["a", "b", "c"], per_prompt=lines)
        with pytest.raises(ConfigError, match=r"damaged\.json.*per_prompt"):
            spec_train.compare(one, damaged)
    with pytest.raises(ConfigError, match="seed -1"):
        spec_train.compare(one, one, seed=-1)
