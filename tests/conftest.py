"""Shared pytest set-up: no hub, quiet libraries, a fixed number of threads.

One thread by default, because parallel test workers must not fight over cores. SPEC_TEST_THREADS
sets another number, also for the processes that tests start; only forked ranks keep one thread. The
number of threads decides the order of sums: where a test compares bytes, both sides must run with
the same number.
"""

import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
# inherited by the processes that tests start
os.environ["OMP_NUM_THREADS"] = os.environ.get("SPEC_TEST_THREADS", "1")

import pytest
import torch

_cache = tempfile.TemporaryDirectory(prefix="spec-data-cache-")  # never the user's
os.environ["SPEC_DATA_CACHE"] = _cache.name
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
# nohup and shells that start jobs in the background leave these ignored, also in what tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


ROOT = Path(__file__).parents[1]
LONG = Path(__file__).with_name("long.txt")
"""Rows of tables, and tests, that are long by what they took: `scripts/slow_tests.py` writes it."""


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what tests/long.txt lists, and order the modules.

    Modules with long tests come first, so that no worker ends with one while others idle.

    A folder with fixtures of its own stays together, so that no two workers make them.
    """

    listed = {line for line in LONG.read_text().splitlines() if not line.startswith("#")}
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.long)
    if not any("::" in word for word in config.args):  # whole modules
        files = {item.nodeid.partition("::")[0] for item in items}
        gone = {n for n in listed if n.partition("::")[0] in files} - {i.nodeid for i in items}
        gone |= {name for name in listed if not (ROOT / name.partition("::")[0]).is_file()}
        if gone:
            raise pytest.UsageError(f"{LONG.name} lists what is no test: {', '.join(sorted(gone))}")

    def unit(item: pytest.Item) -> Path:
        folder = item.path.parent
        return folder if (folder / "conftest.py").exists() else item.path

    long = {unit(item) for item in items if item.get_closest_marker("long")}
    items.sort(key=lambda item: unit(item) not in long)
    for item in items:
        if item.get_closest_marker("engines"):
            item.add_marker(pytest.mark.timeout(1000))  # an engine starts in minutes


def pytest_collection_finish() -> None:
    """Modules and collected tests live to the end: the garbage collector need not visit them."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Else Triton's bindings report what is frozen as leaked."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def without_waiting_for_the_disk() -> Iterator[None]:
    """Tests kill processes, never the machine: what is written needs no way to the disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)  # which refuses a wrong descriptor as well
        yield


@pytest.fixture(scope="session", autouse=True)
def probed_once() -> Iterator[None]:
    """Probe a tokenizer once per process: hundreds of tests open the same few."""
    tokens = sys.modules.get("spec_data.corpus.tokens")
    if tokens is None:  # no collected test opens one
        yield
        return
    probed, known = tokens.Tokens._probed, {}

    def once(self) -> bool:
        if not self.cut_tokens:  # nothing to probe; some such tokenizers cannot be serialised
            return probed(self)
        key = (self._backend.to_str(), *self.cut_tokens.items())
        if key not in known:
            known[key] = probed(self)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens.Tokens, "_probed", once)
        yield
