"""Several ranks on this machine, as `torchrun` would start them, but forked: they start at once."""

import faulthandler
import logging
import os
import signal
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from spec_data.terminal.console import run_cli
from tests.spec_train.training.tools import OPTIONS, run

LIMIT_SECONDS = 240


@dataclass(frozen=True)
class Ended:
    """How a rank ended, and what it wrote to stderr."""

    code: int  # negative: by that signal
    text: str


def on_ranks(
    folder: Path, body: Callable[[int], object], world: int = 2, agent: bool = True
) -> list[Ended]:
    """Run `body(rank)` on each of `world` processes, as the spec-train command would."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = store.port
    if not agent:
        del store
    folder.mkdir(parents=True, exist_ok=True)
    # none connects before all are forked: the store's thread looks names up for whoever connects,
    # and a child forked meanwhile would inherit a lock that nobody releases
    held, gate = os.pipe()
    children = []
    for rank in range(world):
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            os.close(gate)
            os.read(held, 1)  # until the parent closes its end
            _become(rank, world, port, agent, folder / f"rank-{rank}.txt", body)
        children.append(child)
    os.close(gate)
    os.close(held)
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT_SECONDS
    while len(codes) < world and time.monotonic() < until:
        for child in set(children) - set(codes):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGABRT)  # faulthandler writes the stacks
        codes[child] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    texts = [(folder / f"rank-{rank}.txt").read_text() for rank in range(world)]
    return [Ended(codes[c], text) for c, text in zip(children, texts, strict=True)]


def _become(
    rank: int, world: int, port: int, agent: bool, log: Path, body: Callable[[int], object]
) -> None:
    """In the child: take the environment of a rank, run, and end without pytest's clean-up."""
    code = 99
    torch.set_num_threads(1)  # a fork has none of its parent's OpenMP threads and waits for them
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        sys.stdout = os.fdopen(1, "w")
        sys.stderr = os.fdopen(2, "w")
        faulthandler.enable(sys.stderr)
        logging.getLogger().handlers.clear()  # those of pytest
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        place |= {"TORCHELASTIC_USE_AGENT_STORE": agent, "TORCHELASTIC_RESTART_COUNT": 0}
        os.environ.update({name: str(value) for name, value in place.items()})
        plain = Namespace(quiet=False, log_file=None, debug=False)
        code = run_cli(lambda: body(rank) and None, plain)
        sys.stderr.flush()
    finally:
        os._exit(code)


def fit_on_ranks(config, world: int = 2, prepare=lambda rank: None, options=OPTIONS):
    """Run a fit on several ranks; `prepare(rank)` patches each rank first."""

    def body(rank: int):
        prepare(rank)
        run(config, options)

    return on_ranks(Path(config.out + "-said"), body, world)


def fit_well(config, world: int = 2, prepare=lambda rank: None, options=OPTIONS):
    """Like `fit_on_ranks`; every rank must end without an error."""
    ended = fit_on_ranks(config, world, prepare, options)
    said = "\n".join(f"-- rank {rank}\n{end.text}" for rank, end in enumerate(ended))
    assert [end.code for end in ended] == [0] * world, f"{[e.code for e in ended]}\n{said}"
    return ended
