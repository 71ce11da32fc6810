"""Datasets that are still being generated, and runs that follow them."""

import contextlib
import time
from pathlib import Path

import pytest

from spec_data.generation import capture
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.forked import Forked, fork_program
from tests.spec_data.runs import flags, generate_with, options, save_target, write_corpus

OPTIONS = Eagle3Options(ttt_steps=2, draft_vocab_size=40)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A target and a corpus."""
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", rows=60)


def made(source, out: Path, **changes) -> dict:
    return options(*source, out, max_shard_size="30KB", **changes)


def config_of(data: Path, out: Path, **changes) -> Training:
    given = dict(
        data=str(data), out=str(out), epochs=2, batch_size=2, accumulation=1, seq_len=128, lr=1e-3,
        validation=0.2, log_every=5, eval_every=7, save_every=2, device="cpu", window_tokens=300,
        follow=True, follow_timeout=60.0,
    )  # fmt: skip
    return Training(**(given | changes))


def run(config: Training):
    return fit("eagle3", config, OPTIONS)


class Stopped(Exception):
    """Generation dies here."""


def generate_units(source, out: Path, count: int, **changes) -> None:
    """Generate so many units and die; again: so many more."""
    original, done = capture.unit_forwards, []

    def dying(*args, **kwargs):
        if len(done) == count:
            raise Stopped
        done.append(1)
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "unit_forwards", dying)
        with contextlib.suppress(Stopped):
            generate_with(**made(source, out, **changes))


@pytest.fixture(scope="module")
def sealed(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("sealed") / "data"
    generate_with(**made(source, out))
    return out


@pytest.fixture(scope="module")
def reference(sealed, tmp_path_factory):
    """The run after generation, with the same flag."""
    out = tmp_path_factory.mktemp("reference") / "run"
    assert run(config_of(sealed, out)).finished
    return out


HELD = 8
GENERATE = """
import sys, time
from pathlib import Path
from spec_data.cli import main
from spec_data.generation import capture
original, gate, held = capture.unit_forwards, Path(sys.argv[1]), int(sys.argv[2])
def gated(plan, unit, *args):
    while unit >= held and not gate.exists():
        time.sleep(0.01)
    return original(plan, unit, *args)
capture.unit_forwards = gated
sys.exit(main(["generate", *sys.argv[3:]]))
"""


def start_generate(given: dict, gate: Path) -> Forked:
    """A process that makes HELD units, and the others once the file `gate` is there."""
    return fork_program(GENERATE, str(gate), str(HELD), *flags(given))


def wait_until(there, process: Forked | None = None) -> None:
    deadline = time.monotonic() + 120
    while not there():
        assert time.monotonic() < deadline and (process is None or process.poll() is None)
        time.sleep(0.01)
