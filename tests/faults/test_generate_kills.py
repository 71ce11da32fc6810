"""SIGKILL at random moments of generation: the finished directory has the same bytes.

One process, or several workers at once. Each command is started again until it ends by itself; then
every file is compared with that of a run without a kill.
"""

import collections
import time
from pathlib import Path

import numpy as np
import pytest

from spec_data.cli import main
from spec_data.generation.units import finalize
from tests import forked
from tests.faults.tools import report, trials
from tests.forked import Forked
from tests.spec_data.runs import digests, flags, options, run, save_target, write_corpus

one_thread = forked.one_thread
TAKES = [0.0]  # seconds of a whole generation, on this machine and under its load
LONGEST = 240.0  # seconds: a command that takes longer hangs


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 40)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "data"
    begun = time.monotonic()
    run(*source, out, max_shard_size="60KB")
    TAKES[0] = time.monotonic() - begun
    return out


def generate_words(source, out: Path, **changes) -> list[str]:
    return ["generate", *flags(options(*source, out, max_shard_size="60KB", **changes))]


def killed_until_done(commands: list, rng: np.random.Generator, kills: int) -> int:
    """Run commands side by side and kill each at random moments; return how many kills hit.

    A killed command starts again at once. The moments are spread over what the work takes here.
    """
    left, hit = dict.fromkeys(range(len(commands)), kills), 0

    def begin(n: int) -> tuple[Forked, float]:
        process = Forked(lambda: main(commands[n]))
        return process, time.monotonic() + rng.uniform(0.0, 1.5) * TAKES[0]

    running = {n: begin(n) for n in left}
    end = time.monotonic() + LONGEST
    while running:
        assert time.monotonic() < end
        for n, (process, due) in list(running.items()):
            if process.poll() is not None:
                assert process.returncode == 0, process.communicate()
                del running[n]
            elif left[n] and time.monotonic() >= due:
                process.kill()
                process.wait()
                left[n], hit = left[n] - 1, hit + 1
                running[n] = begin(n)
        time.sleep(0.002)
    return hit


@pytest.mark.parametrize(("workers", "runs"), [pytest.param(1, 2, marks=pytest.mark.long), (2, 1)])
def test_killed_generation_ends_in_the_same_bytes(source, whole, tmp_path, workers, runs):
    """One process that is killed three times, or two workers that are killed twice each."""
    outcomes, name = collections.Counter(), f"kills of generate, {workers} workers"
    for trial, rng in trials(name, runs):
        out = tmp_path / f"data{trial}"
        more = [{"workers": f"{i}/{workers}"} for i in range(workers)] if workers > 1 else [{}]
        commands = [generate_words(source, out, **given) for given in more]
        hit = killed_until_done(commands, rng, 4 - workers)
        if workers > 1:
            finalize(out, set())
        assert digests(out) == digests(whole)
        outcomes["kills"] += hit
        outcomes["equal directories"] += 1
    report(name, outcomes)
    assert outcomes["kills"]
