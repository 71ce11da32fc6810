"""One target run by several processes of torchrun: the first one leads, the others follow.

The first process runs the command as if it were alone. Before each forward it announces the inputs,
and the others run the same forward with their part. They do nothing else: they read no corpus and
write no file. What the parts are, the two kinds of targets say: `ShardedTarget` (--tp-plan) and
`context_parallel` (--context-parallel).

    with leading(config.spread):
        ...  # the command; the other processes never come here, and end when it is over
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spec_data.capture.backend import BackendOptions, open_backend
from spec_data.capture.hooks import States
from spec_data.capture.model import Target
from spec_data.models.devices import is_memory_error, local_gpu
from spec_data.models.target_options import Spread, processes
from spec_data.shards.errors import ConfigError, RunError, TargetError
from spec_data.shards.position_data import Positions

_OPEN, _FORWARD, _POSITIONS, _END = "open", "forward", "positions", "end"
_WAITING = timedelta(days=30)  # the others wait while the first process renders the corpus
_COLLECTIVE = timedelta(hours=2)  # a collective of a forward, or of sharded loading
_FAILING = timedelta(minutes=5)  # between the first and the last process that fails in a forward
# What a family raises in all processes alike where its code does not allow the parts: the first
# process may then try another forward.
_OF_FAMILY = (NotImplementedError, ValueError, TypeError, AttributeError, KeyError, IndexError)


class _Commands:
    """The channel of JSON from the first process to the others."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_gpu())
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        store, rank, count = next(dist.rendezvous("env://"))
        given: dict[str, Any] = {"rank": rank, "world_size": count, "timeout": _COLLECTIVE}
        dist.init_process_group(backend, store=dist.PrefixStore("collectives", store), **given)
        self._failures = dist.PrefixStore("failures", store)
        self._failed = 0  # forwards
        self.group = dist.new_group(backend="gloo", timeout=_WAITING)
        self.leads = dist.get_rank() == 0

    def announce(self, name: str, values: dict[str, Any]) -> None:
        """Send a command to the others."""
        text = bytearray(json.dumps([name, values]).encode())
        for part in (torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)):
            dist.broadcast(part, 0, group=self.group)

    def all_fail(self) -> bool:
        """Say that a forward has failed here; return whether it fails in all processes."""
        self._failed += 1
        names = [f"{self._failed}/{rank}" for rank in range(processes())]
        self._failures.set(names[dist.get_rank()], "")
        try:
            self._failures.wait(names, _FAILING)
        except dist.DistError:
            return False
        return True

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Wait for the next command."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            dist.broadcast(length, 0, group=self.group)
        except RuntimeError:
            raise SystemExit(1) from None  # the first process has ended, and said why
        body = torch.zeros(int(length), dtype=torch.uint8)
        dist.broadcast(body, 0, group=self.group)
        name, values = json.loads(body.numpy().tobytes())
        return name, values


_commands: _Commands | None = None


@contextmanager
def leading(spread: Spread) -> Iterator[None]:
    """Run the block in the first process; the others serve it, and exit when it is over.

    A target that lies in one process alone is run by every process on its own.

    Raises:
        ConfigError: torchrun started another number of processes.
    """
    global _commands
    flag, asked = spread.over_processes
    if not flag:
        yield
        return
    started = processes()
    if started < 2 or asked not in (None, started):
        raise ConfigError(
            f"{flag} needs {asked or 'several'} processes, and there are {started}: start the same "
            f"command with `torchrun --nproc-per-node {asked or 'N'} -m spec_data ...`, one "
            "process for each GPU"
        )
    _commands = _Commands()
    if not _commands.leads:
        _follow(_commands)
        dist.destroy_process_group()
        raise SystemExit(0)
    # An error of the command ends this process, and torchrun then ends the others: they may be
    # inside a forward, where they would never receive another command.
    yield
    _commands.announce(_END, {})
    dist.destroy_process_group()
    _commands = None


def _follow(commands: _Commands) -> None:
    """Run what the first process announces, until it is done."""
    target: Any = None
    while True:
        name, values = commands.receive()
        if name == _OPEN:
            spread = Spread(**values.pop("spread"))
            target = open_backend("hf", BackendOptions(**values, spread=spread))
        elif target is None or name == _END:
            return
        elif name == _FORWARD:
            inputs = torch.tensor(values.pop("inputs"))  # int64 [3, B, T]
            with suppress(*_OF_FAMILY):  # the first process has the same error, and says so
                target.forward(*inputs, **values)
        else:
            target.positions(values["length"])


def _announced(name: str, values: dict[str, Any]) -> None:
    if _commands is not None and _commands.leads:
        _commands.announce(name, values)


class SharedTarget(Target):
    """A target whose forwards need all processes."""

    flag: str  # the option that asks for it

    @classmethod
    def open(cls, options: BackendOptions) -> "SharedTarget":
        """Load the part of this process, and let the others load theirs."""
        if _commands is None:
            raise ConfigError(f"{cls.flag} is an option of `spec-data generate`, estimate, verify")
        path = Path(options.path)
        local = str(path.resolve()) if path.exists() else str(options.path)
        _announced(_OPEN, asdict(options) | {"path": local})
        device = f"cuda:{local_gpu()}" if torch.cuda.is_available() else "cpu"
        target = super().open(replace(options, device=device))
        assert isinstance(target, cls)
        return target

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        form: str | None,
        *,
        full_logits: bool = False,
        images: dict[str, Tensor] | None = None,
    ) -> States:
        """Run one forward on all processes; see `Target.forward`."""
        if images:
            raise TargetError(f"{self.flag}: images are captured on one device; leave it out")
        tensors = (input_ids, document_ids, position_ids)
        inputs = [tensor.tolist() for tensor in tensors]
        try:
            _announced(_FORWARD, {"inputs": inputs, "form": form, "full_logits": full_logits})
            return self.forward_together(*tensors, form, full_logits)
        except _OF_FAMILY as error:
            # The others may go on, and wait for this process in their next collective.
            if _commands is not None and not _commands.all_fail():
                raise RunError(
                    f"a forward of {self.flag} failed in process {dist.get_rank()}, and not in "
                    f"all of them ({type(error).__name__}: {error})"
                ) from error
            raise
        except RuntimeError as error:
            if is_memory_error(error):
                # The other processes wait inside this forward: it cannot be tried again.
                raise RunError(
                    f"out of memory on a GPU of {self.flag}; run the same command again with fewer "
                    "--batch-tokens: finished shards are kept"
                ) from None
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            raise RunError(
                f"another process of {self.flag} has ended, or cannot be reached: what it wrote "
                "says why. Run the same command again: finished shards are kept"
            ) from error

    def forward_together(
        self, ids: Tensor, documents: Tensor, positions: Tensor, form: str | None, full: bool
    ) -> States:
        """Run the part of this process; the first one returns all states."""
        return super().forward(ids, documents, positions, form, full_logits=full)

    def _devices(self) -> str:
        return f"{self.device.type}, split over {processes()} processes"

    def positions(self, length: int) -> Positions:
        """Read and prove rotary frequencies and final norm, with a forward of all processes."""
        _announced(_POSITIONS, {"length": length})
        return super().positions(length)


class ShardedTarget(SharedTarget):
    """A target of which every process holds a part of every layer.

    States are equal on all processes: the blocks of transformers' plans return whole sums.
    """

    flag = "--tp-plan"

    def __init__(self, model: Any, *layers: Any, **options: Any) -> None:
        """Gather embedding, head and norm, which all processes do together.

        The head is kept on the device as well: the first process computes logits alone.
        """
        super().__init__(model, *layers, **options)
        self._stored_head = super().head_tensors()
        for name in ("weight", "bias"):
            self.head_tensor(name)

    def head_tensors(self) -> dict[str, Tensor]:
        return dict(self._stored_head)
