"""One target split over the processes of torchrun (--tp-plan): the first one leads, others follow.

The first process runs the command as if it were alone. Before each forward it announces the inputs,
and the others run the same forward with their shards. They do nothing else: they read no corpus and
write no file. States are equal on all processes, because the blocks of transformers' plans return
whole sums.

    with leading(config.spread):
        ...  # the command; the other processes never come here, and end when it is over
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from spec_data.capture.backend import BackendOptions
from spec_data.capture.hooks import States
from spec_data.capture.model import Target
from spec_data.models.devices import local_gpu
from spec_data.models.target_options import Spread, processes
from spec_data.shards.errors import ConfigError, RunError
from spec_data.shards.position_data import Positions

_OPEN, _FORWARD, _POSITIONS, _END = "open", "forward", "positions", "end"
_WAITING = timedelta(days=30)  # the others wait while the first process renders the corpus
_COLLECTIVE = timedelta(hours=2)  # a collective of a forward, or of sharded loading


class _Commands:
    """The channel of JSON from the first process to the others."""

    def __init__(self) -> None:
        cuda = torch.cuda.is_available()
        if cuda:
            torch.cuda.set_device(local_gpu())
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, timeout=_COLLECTIVE)
        self.group = dist.new_group(backend="gloo", timeout=_WAITING)
        self.leads = dist.get_rank() == 0

    def announce(self, name: str, values: dict[str, Any]) -> None:
        """Send a command to the others."""
        text = bytearray(json.dumps([name, values]).encode())
        for part in (torch.tensor([len(text)]), torch.frombuffer(text, dtype=torch.uint8)):
            dist.broadcast(part, 0, group=self.group)

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

    Without tensor parallelism, every process runs its own block.

    Raises:
        ConfigError: torchrun started no other processes.
    """
    global _commands
    if not spread.tensor_parallel:
        yield
        return
    if processes() < 2:
        raise ConfigError(
            "--tp-plan splits the target over several processes: start the same command with "
            "`torchrun --nproc-per-node N -m spec_data ...`, N being the number of GPUs"
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
    transformers.utils.logging.disable_progress_bar()
    target: ShardedTarget | None = None
    while True:
        name, values = commands.receive()
        if name == _OPEN:
            spread = Spread(**values.pop("spread"))
            target = ShardedTarget.load(BackendOptions(**values, spread=spread))
        elif target is None or name == _END:
            return
        elif name == _FORWARD:
            inputs = torch.tensor(values.pop("inputs"))  # int64 [3, B, T]
            target.forward(*inputs, **values)
        else:
            target.positions(values["length"])


def _announced(name: str, values: dict[str, Any]) -> None:
    if _commands is not None and _commands.leads:
        _commands.announce(name, values)


class ShardedTarget(Target):
    """A target of which every process holds a part."""

    def __init__(self, model: Any, *layers: Any, **options: Any) -> None:
        """Gather embedding, head and norm, which all processes do together.

        The head is kept on the device as well: the first process computes logits alone.
        """
        super().__init__(model, *layers, **options)
        self._stored_head = super().head_tensors()
        for name in ("weight", "bias"):
            self.head_tensor(name)

    @classmethod
    def open(cls, options: BackendOptions) -> "ShardedTarget":
        """Load the shards of this process, and let the others load theirs."""
        if _commands is None:
            raise ConfigError("--tp-plan is an option of `spec-data generate`, estimate and verify")
        path = Path(options.path)
        local = str(path.resolve()) if path.exists() else str(options.path)
        _announced(_OPEN, asdict(options) | {"path": local})
        return cls.load(options)

    @classmethod
    def load(cls, options: BackendOptions) -> "ShardedTarget":
        """Load the shards of this process."""
        target = super().open(replace(options, device="auto"))
        assert isinstance(target, cls)
        return target

    def forward(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        form: str | None,
        *,
        full_logits: bool = False,
    ) -> States:
        """Run one forward on all processes; see `Target.forward`."""
        tensors = (input_ids, document_ids, position_ids)
        inputs = [tensor.tolist() for tensor in tensors]
        _announced(_FORWARD, {"inputs": inputs, "form": form, "full_logits": full_logits})
        try:
            return super().forward(*tensors, form, full_logits=full_logits)
        except torch.OutOfMemoryError:
            # The other processes wait inside this forward: it cannot be tried again.
            raise RunError(
                "out of memory on a GPU of --tp-plan; run the same command again with fewer "
                "--batch-tokens: finished shards are kept"
            ) from None

    def _devices(self) -> str:
        return f"{self.device.type}, split over {processes()} processes"

    def head_tensors(self) -> dict[str, Tensor]:
        return dict(self._stored_head)

    def positions(self, length: int) -> Positions:
        """Read and prove rotary frequencies and final norm, with a forward of all processes."""
        _announced(_POSITIONS, {"length": length})
        return super().positions(length)
