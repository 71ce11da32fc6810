"""Several ranks on this machine, as `torchrun` would start them, but forked: they start at once."""

import os
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch.distributed as dist

from spec_data.terminal.console import run_cli
from spec_train.options.kinds import draft_options
from spec_train.training import ranks
from spec_train.training.fit import fit
from tests.forked import Forked
from tests.spec_train.drafts.any_draft import SMALL
from tests.spec_train.training.tools import OPTIONS

LIMIT_SECONDS = 240


@pytest.fixture(autouse=True)
def patience(monkeypatch):
    monkeypatch.setattr(ranks, "WATCH_SECONDS", 0.2)


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it wrote."""

    code: int  # negative: by that signal
    text: str


def on_ranks(body: Callable[[int], object], world: int = 2, agent: bool = True) -> list[Ended]:
    """Run `body(rank)` on each of `world` processes, as the spec-train command would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store
    # none connects before all are forked: the store's thread looks names up for whoever connects,
    # and a child forked meanwhile would inherit a lock that nobody releases
    held, gate = os.pipe()

    def work(rank: int) -> int:
        os.close(gate)
        os.read(held, 1)  # until the parent closes its end
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": agent, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        plain = Namespace(quiet=False, verbose=False, debug=False)
        return run_cli(lambda: body(rank) and None, plain)

    children = [Forked(lambda rank=rank: work(rank)) for rank in range(world)]
    os.close(gate)
    os.close(held)
    texts = ["".join(child.communicate(LIMIT_SECONDS)) for child in children]
    return [Ended(child.wait(), text) for child, text in zip(children, texts, strict=True)]


def fit_on_ranks(config, world: int = 2, prepare=lambda rank: None, draft: str = "eagle3"):
    """Run a fit on several ranks; `prepare(rank)` patches each rank first."""

    def body(rank: int):
        prepare(rank)
        run_draft(draft, config)

    return on_ranks(body, world)


def run_draft(draft: str, config):
    """Run a small fit of a draft by its name."""
    options = OPTIONS if draft == "eagle3" else draft_options(draft)(**SMALL[draft])
    return fit(draft, config, options)


def fit_well(config, world: int = 2, prepare=lambda rank: None, draft: str = "eagle3"):
    """Like `fit_on_ranks`; every rank must end without an error."""
    ended = fit_on_ranks(config, world, prepare, draft)
    said = "\n".join(f"-- rank {rank}\n{end.text}" for rank, end in enumerate(ended))
    assert [end.code for end in ended] == [0] * world, f"{[e.code for e in ended]}\n{said}"
    return ended
