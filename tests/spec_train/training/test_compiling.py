"""Compiling is seen: on the bar while it goes on, and in two lines."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_train.attention import fused
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.compiling import compiling_shown
from spec_train.training.fit import fit
from tests.factory import tiny_dataset
from tests.spec_train.drafts.any_draft import SMALL

BEGINS, ENDS = "torch compiles kernels for this device", "graphs were compiled in"


class Seen:
    """A bar that keeps what it shows."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.paused = 0

    def set_postfix_str(self, text: str) -> None:
        self.texts.append(text)

    def unpause(self) -> None:
        self.paused += 1


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Chains are compiled on CPUs, as on a GPU."""
    torch._dynamo.reset()
    fused._compiled.cache_clear()
    fused._works.cache_clear()
    monkeypatch.setattr(fused, "FUSED_ON", ("cpu",))
    monkeypatch.setattr(fused, "COMPILER", "eager")
    yield
    fused._compiled.cache_clear()
    fused._works.cache_clear()
    torch._dynamo.reset()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [text for text in caplog.messages if BEGINS in text or ENDS in text]


def test_each_graph_is_shown_and_the_time_is_no_steps(compiled: None, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    seen: Any = Seen()
    with compiling_shown(seen, torch.device("cpu")):
        for function in (torch.sin, torch.cos):
            torch.compile(lambda x, f=function: f(x) + 1, backend="eager")(torch.zeros(3))
    assert seen.texts == [f"compiling kernels, graph {n}" for n in (1, 2)]
    assert seen.paused == 2
    begins, ends = lines(caplog)
    assert BEGINS in begins and ends.startswith("2 graphs")
    torch.compile(lambda x: x.tan(), backend="eager")(torch.zeros(3))
    assert len(seen.texts) == 2, "it still listens"


def test_nothing_is_said_where_nothing_is_compiled(caplog: Any) -> None:
    seen: Any = Seen()
    with compiling_shown(seen, torch.device("cpu")):
        torch.compile(lambda x: x.exp(), backend="eager")(torch.zeros(3))
    assert not seen.texts and not lines(caplog)


def test_an_error_ends_the_listening(compiled: None, caplog: Any) -> None:
    seen: Any = Seen()
    with pytest.raises(ZeroDivisionError), compiling_shown(seen, torch.device("cpu")):
        raise ZeroDivisionError
    torch.compile(lambda x: x.sinh(), backend="eager")(torch.zeros(3))
    assert not seen.texts and not lines(caplog)


def test_a_run_says_what_was_compiled(compiled: None, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    data = tiny_dataset(tmp_path / "data", n_docs=8)
    config = Training(data=str(data), out=str(tmp_path / "run"), epochs=1, device="cpu")
    fit("eagle3", config, DRAFT_OPTIONS["eagle3"](**SMALL["eagle3"]))
    begins, ends = lines(caplog)
    assert BEGINS in begins and int(ends.split()[0]) > 1
