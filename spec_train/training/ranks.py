"""The processes of one run: who they are, what they add up, and how they end together.

One process needs none of this: every method is then the identity. Several are started by `torchrun`
or `accelerate launch`, one per device. Tensors go through torch.distributed (NCCL on GPUs, Gloo on
CPUs); words (settings, errors, waiting for each other) go through the launcher's key-value store,
because a rank that has failed takes part in no collective any more. The first error of any rank is
put there, and whoever waits looks for it; a rank stuck inside a collective is ended by a watching
thread. So an error anywhere ends every rank with that rank's message, and nothing hangs.

Data-parallel wrapping is accelerate's. Sharding is torch's `fully_shard` of the whole draft as one
unit: drafts call their submodules' methods and weights directly, so all weights are gathered when
the loss is entered; accelerate would shard norm and head as modules of their own, whose `forward`
nobody calls, and offers no sharding on CPUs, where it could be tested. What wraps or shards is
imported where it is used: it takes a second, which one process need not wait.
"""

import contextlib
import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError, RunError, SpecDataError

POLL_SECONDS = 0.02
WATCH_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""How long a rank may take to end by itself after another one failed."""
WAIT_SECONDS = 1800.0
"""How long to wait for a rank that says nothing, not even an error: as torch.distributed does."""
_ERROR, _LEFT, _STOP = "error", "left", "stop"


class PeerError(RunError):
    """Another rank failed; the message is its own."""


class Ranks:
    """This process among those of the run; a context manager around everything they do together.

    Leaving it without an error waits for all ranks, so that none ends while rank 0 still writes.
    """

    def __init__(self, device: str | torch.device = "cpu", sharding: str = "ddp") -> None:
        """Join the ranks that the launcher announced in the environment, if any.

        `device` is --device: with several ranks on GPUs each takes its own. `sharding`: "ddp"
        keeps the draft whole on every rank, "fsdp2" splits weights, gradients and optimizer.

        Raises:
            ConfigError: the launcher's settings and these contradict each other.
        """
        self.rank, self.world_size = 0, int(os.environ.get("WORLD_SIZE", "1"))
        self.sharding = sharding
        self.device = torch.device(device)
        self._store: Any = None
        self._words = 0  # exchanges of words so far: the same number on every rank
        self._ended = threading.Event()
        if self.world_size > 1:
            self._join()

    def _join(self) -> None:
        for other in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
            if os.environ.get(f"ACCELERATE_USE_{other}", "false").lower() == "true":
                raise ConfigError(
                    f"accelerate's configuration asks for {other}: spec-train decides that itself; "
                    "launch with a plain multi-process configuration and give --sharding"
                )
        if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size} but there is no RANK or MASTER_ADDR: unset it, "
                "or start with `torchrun --nproc-per-node N -m spec_train ...`"
            )
        if self.device.type == "cuda":
            if self.device.index is not None:
                raise ConfigError(
                    f"--device {self.device} with {self.world_size} processes: each takes its own "
                    "GPU; give --device cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
                )
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
            torch.cuda.set_device(self.device)
        store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            store=dist.PrefixStore("collectives", store),
            rank=self.rank,
            world_size=self.world_size,
        )
        self._store = dist.PrefixStore("words", store)
        if not self.is_main:
            for package in ("spec_data", "spec_train"):
                logging.getLogger(package).setLevel(logging.ERROR)
        # its own connection: a call that waits on the first one would block it
        watched = dist.PrefixStore("words", store.clone())
        threading.Thread(target=self._watch, args=(watched,), name="watch", daemon=True).start()

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files, logs and bars."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether this process is the whole run."""
        return self.world_size == 1

    @property
    def _sharded(self) -> bool:
        return not self.alone and self.sharding == "fsdp2"

    # -- ending together --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Begin what the ranks do together."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Wait for the others; after an error, tell them, or raise what they have told."""
        if self.alone:
            return
        try:
            if error is None:
                self.gather(None)
            else:
                self._tell(error)
        finally:
            self._ended.set()
            with contextlib.suppress(dist.DistError):  # gone with whoever held it
                self._leave_store()
            if error is None:
                dist.destroy_process_group()

    def _tell(self, error: BaseException) -> None:
        """Publish the error, or raise the one that was there first: its consequence is this one."""
        if isinstance(error, PeerError):
            return
        try:
            first = self._publish(error)
        except dist.DistError:
            return  # the store is gone: whoever held it has failed too
        mine = first.startswith(f"rank {self.rank}: ")
        if not mine and first.partition(": ")[2] != _in_words(error):  # not found by all together
            raise PeerError(first) from error

    def _leave_store(self) -> None:
        """Use the store no more. It may live in rank 0, which therefore leaves last."""
        if not self.is_main:
            self._store.add(_LEFT, 1)
            return
        until = time.monotonic() + GRACE_SECONDS / 2
        while self._store.add(_LEFT, 0) < self.world_size - 1 and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _publish(self, error: BaseException) -> str:
        """Make `error` the run's error unless there is one; gives the one that counts."""
        text = f"rank {self.rank}: {_in_words(error)}"
        return self._store.compare_set(_ERROR, "", text).decode()

    def _raise_told(self) -> None:
        """Raise the error of another rank, if there is one."""
        if self._store.check([_ERROR]):
            raise PeerError(self._store.get(_ERROR).decode())

    def _watch(self, store: Any) -> None:
        """Body of the thread: end this process if another failed and this one cannot know."""
        while not self._ended.wait(WATCH_SECONDS):
            try:
                text = store.get(_ERROR).decode() if store.check([_ERROR]) else None
            except dist.DistError as error:
                text = f"the process that holds the ranks together is gone ({error})"
            if text is None:
                continue
            if not self._ended.wait(GRACE_SECONDS):
                print(f"error: {text}", file=sys.stderr, flush=True)
                os._exit(1)
            return

    # -- words ------------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """The JSON values of all ranks, by rank; waits for the last of them.

        Raises:
            PeerError: another rank has failed, here or anywhere.
        """
        if self.alone:
            return [value]
        self._words += 1
        names = [f"{self._words}/{rank}" for rank in range(self.world_size)]
        self._store.set(names[self.rank], json.dumps(value))
        until = time.monotonic() + WAIT_SECONDS
        while not self._store.check(names):
            self._raise_told()
            if time.monotonic() > until:
                late = [r for r, name in enumerate(names) if not self._store.check([name])]
                raise RunError(f"no word of rank {late} in {WAIT_SECONDS / 60:.0f} minutes")
            time.sleep(POLL_SECONDS)
        return [json.loads(self._store.get(name)) for name in names]

    def call_stop(self) -> None:
        """Say that this rank was told to stop, to those that wait for data and not for it."""
        if not self.alone:
            self._store.set(_STOP, str(self.rank))

    def stop_called(self) -> bool:
        """Whether any rank has said so; the stop itself is agreed on with `agree`."""
        return not self.alone and self._store.check([_STOP])

    # -- tensors ----------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Sum of a tensor over the ranks, on its own device; all ranks call it, same shape."""
        if self.alone:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_all(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Sums of float64 tensors over the ranks in one exchange; same names and shapes."""
        if self.alone or not values:
            return values
        names = sorted(values)
        total = self.sum(torch.cat([values[name].double().flatten() for name in names]))
        parts = total.split([values[name].numel() for name in names])
        return {name: part.view_as(values[name]) for name, part in zip(names, parts, strict=True)}

    def agree(
        self,
        counts: Tensor,
        stop: bool = False,
        error: Exception | None = None,
        stopping: Callable[[], object] = lambda: False,
    ) -> tuple[Tensor, bool]:
        """Add up `counts` [S] over the ranks; also, whether any of them was told to stop.

        A rank that cannot do the step gives its `error` and zeros: it is raised there, and a
        PeerError with its message on the others, at the same step. One whose `stopping` turns true
        while the others are awaited says so to them: they may be waiting for data.
        """
        if self.alone:
            if error is not None:
                raise error
            return counts, stop
        if error is not None:
            self._publish(error)
        flags = counts.new_tensor([float(stop), float(error is not None)])
        total = torch.cat([counts, flags]).to(self.device)
        self._await(dist.all_reduce(total, async_op=True), stopping)
        stops, failures = total[-2:].tolist()
        if error is not None:
            raise error
        if failures:
            self._raise_told()
        return total[:-2].to(counts.device), stops > 0

    def _await(self, work: Any, stopping: Callable[[], object]) -> None:
        """Wait in Python, where signals arrive, and not inside the collective."""
        pause, called = 5e-5, False
        while not work.is_completed():
            if not called and stopping():
                self.call_stop()
                called = True
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)  # of every step: a GPU would be idle for longer
        work.wait()

    # -- the draft --------------------------------------------------------------------------------

    def prepare(self, module: nn.Module) -> nn.Module:
        """Wrap the module whose `forward` is the loss; all ranks go on with rank 0's weights.

        Its parameters are replaced by their shards under "fsdp2": ask for them after this. Frozen
        ones stay whole, for they are shared with the target's head.
        """
        if self.alone:
            return module
        frozen = {p for p in module.parameters() if not p.requires_grad}
        for tensor in (*(p for p in module.parameters() if p not in frozen), *module.buffers()):
            dist.broadcast(tensor.data, 0)
        if self.sharding == "ddp":
            return self._replicate(module)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        return cast(nn.Module, fully_shard(module, mesh=mesh, ignored_params=frozen))

    def _replicate(self, module: nn.Module) -> nn.Module:
        """Wrap for data parallelism, through accelerate; arithmetic and accumulation are ours.

        No search for unused parameters: `LossOnRanks` gives each a gradient in every step. Buffers
        never change, and an exchange of them would wait for ranks with fewer micro-batches.
        """
        from accelerate import Accelerator, DistributedDataParallelKwargs

        options = DistributedDataParallelKwargs(
            broadcast_buffers=False, gradient_as_bucket_view=True
        )
        cpu = self.device.type == "cpu"
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", kwargs_handlers=[options])
        with warnings.catch_warnings():  # torch renames broadcast_buffers; accelerate does not yet
            warnings.simplefilter("ignore", FutureWarning)
            return accelerator.prepare_model(module, device_placement=False)

    @contextlib.contextmanager
    def gradients(self, module: Any, last: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are added up in the last one.

        Ranks may have different numbers of micro-batches, so the others exchange nothing at all.
        """
        if self._sharded:
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
        elif not self.alone and not last:
            with module.no_sync():
                yield
            return
        yield

    def assemble(self, module: Any) -> None:
        """Make the weights of all ranks whole on each of them, for a last look at them."""
        if self._sharded:
            module.unshard()

    def release(self, module: Any) -> None:
        """Give back the memory of weights gathered for a forward without a backward."""
        if self._sharded:
            module.reshard()


def _in_words(error: BaseException) -> str:
    """An error's message, with its kind where it is not one of ours."""
    return str(error) if isinstance(error, SpecDataError) else f"{type(error).__name__}: {error}"
