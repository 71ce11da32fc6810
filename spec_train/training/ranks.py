"""The processes (ranks) of one run: sums over them, messages between them, and a common end.

A single process needs none of this: every method then returns its input. `torchrun` (or, on GPUs,
`accelerate launch`) starts several ranks, one per device. Tensors go through torch.distributed
(NCCL on GPUs, Gloo on CPUs). Messages (settings, errors, barriers) go through the launcher's
key-value store, because a failed rank no longer joins collectives. The first error of any rank is
written to the store, and waiting ranks look for it there. A watch thread ends a rank that is
blocked inside a collective. So an error on one rank ends all ranks with the message of that rank,
and none hangs.

Weights are replicated by torch's DDP, or sharded by its `fully_shard`. Each of a draft's `units` is
gathered for itself, while the one before it computes, and freed after it, forward and backward. All
other weights are gathered when the loss is entered, and freed after the backward pass.
"""

import contextlib
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spec_data.models.devices import local_gpu
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.terminal.printable import printable

POLL_SECONDS = 0.02
WATCH_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""How long a rank may take to end by itself after another rank failed."""
WAIT_SECONDS = 1800.0
"""How long to wait for a silent rank, one without value or error, in messages and collectives."""
FOLLOWING_SECONDS = 30 * 86400.0
"""The same with --follow: a rank may wait for many units that the others do not need, and ends by
itself where one of them does not come."""
_ERROR, _LEFT, _STOP = "error", "left", "stop"
_ENDED = (
    "another process of this run has ended (perhaps it was killed, or its memory ran out): see its "
    "output, and run the same command again to resume"
)


_RUNS = itertools.count()
"""The runs of this process, one after the other: torchrun's store outlives each of them."""


def _of_launcher(name: str, default: str) -> int:
    """Return a number that a launcher has set."""
    text = os.environ.get(name, default)
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}: expected a number; unset it, or start with torchrun")
    return int(text)


class PeerError(RunError):
    """Another rank failed; carries the message of that rank."""


class Ranks:
    """The ranks of a run as seen by this process; a context manager around all their common work.

    A normal exit waits for all ranks, so that none ends while rank 0 still writes.
    """

    def __init__(
        self, device: str | torch.device = "cpu", sharding: str = "ddp", follow: bool = False
    ) -> None:
        """Join the ranks that the launcher announces in the environment, if any.

        `device` is --device; each of several ranks on GPUs uses a GPU of its own. `sharding`: "ddp"
        keeps a complete draft on every rank, "fsdp2" shards weights, gradients and optimizer. With
        `follow`, ranks wait for data.

        Raises:
            ConfigError: the launcher's settings contradict the options of the run.
        """
        self.rank, self.world_size = 0, _of_launcher("WORLD_SIZE", "1")
        self.sharding = sharding
        self._patience = FOLLOWING_SECONDS if follow else WAIT_SECONDS
        self._units: list[Any] = []  # what `fully_shard` gathers for itself
        self.device = torch.device(device)
        self._store: Any = None
        self._messages = 0  # exchanges of messages so far: the same number on every rank
        self._ended = threading.Event()
        if self.world_size > 1:
            self._join()
        elif rank := _of_launcher("RANK", "0"):
            raise ConfigError(
                f"RANK is {rank}, but WORLD_SIZE is {self.world_size}: each process would train "
                "the whole run; unset RANK, or start with `torchrun --nproc-per-node N -m "
                "spec_train ...`"
            )

    def _join(self) -> None:
        if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
            raise ConfigError(
                f"WORLD_SIZE is {self.world_size}, but RANK or MASTER_ADDR is not set; unset "
                "WORLD_SIZE, or start with `torchrun --nproc-per-node N -m spec_train ...`"
            )
        if self.device.type == "cuda":
            if self.device.index is not None:
                raise ConfigError(
                    f"--device {self.device} with {self.world_size} processes: each process uses "
                    "its own GPU; pass --device cuda, and choose GPUs with CUDA_VISIBLE_DEVICES"
                )
            self.device = torch.device("cuda", local_gpu())
            torch.cuda.set_device(self.device)
        store, self.rank, self.world_size = next(dist.rendezvous("env://"))
        run = f"run {next(_RUNS)}"
        self._store = dist.PrefixStore(f"{run}/messages", store)
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            self._refuse_shared_gpus()
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore(f"{run}/collectives", store),
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(seconds=self._patience),
            device_id=self.device if on_gpu else None,
        )
        if not self.is_main:
            for package in ("spec_data", "spec_train"):
                logging.getLogger(package).setLevel(logging.ERROR)
        # a second connection: a waiting call on the first one would block the watch thread
        watched = dist.PrefixStore(f"{run}/messages", store.clone())
        self._watcher = threading.Thread(
            target=self._watch, args=(watched,), name="watch", daemon=True
        )
        self._watcher.start()

    def _refuse_shared_gpus(self) -> None:
        """Say in words what NCCL reports as a duplicate GPU, or waits for."""
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        of_ranks = self.gather(f"GPU {uuid} of {socket.gethostname()}")
        for rank, gpu in enumerate(of_ranks):
            if (first := of_ranks.index(gpu)) < rank:
                raise ConfigError(
                    f"ranks {first} and {rank} share {gpu}: start one process per GPU, and let "
                    "each see its own GPU alone, or all of the machine"
                )

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files, logs and progress bars."""
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
        """Start the common work of the ranks."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Wait for the other ranks; after an error, publish it or raise the published one."""
        if self.alone:
            return
        try:
            if error is None:
                self.gather(None)
            else:
                self._report(error)
        finally:
            self._ended.set()
            with contextlib.suppress(dist.DistError):  # the process that held the store has ended
                self._leave_store()
            # A thread that comes back from the store while Python ends aborts the process.
            self._watcher.join(GRACE_SECONDS)
            if error is None:
                dist.destroy_process_group()

    def _report(self, error: BaseException) -> None:
        """Publish the error. If one was published earlier, raise that one: it is the cause."""
        if isinstance(error, PeerError):
            return
        told, first = PeerError(_ENDED) if _lost_a_rank(error) else error, ""
        with contextlib.suppress(dist.DistError):  # gone with the process that held the store
            first = self._publish(told)
        rank, _, text = first.partition(": ")
        if first and rank != f"rank {self.rank}" and text != _describe(told):  # not the same on all
            raise PeerError(first) from error
        if told is not error:
            raise told from error

    def _leave_store(self) -> None:
        """Stop using the store. Rank 0 may host it and therefore leaves last."""
        if not self.is_main:
            self._store.add(_LEFT, 1)
            return
        until = time.monotonic() + GRACE_SECONDS / 2
        while self._store.add(_LEFT, 0) < self.world_size - 1 and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def _publish(self, error: BaseException) -> str:
        """Make `error` the run's error unless another one is published; return the run's error."""
        text = f"rank {self.rank}: {_describe(error)}"
        return self._store.compare_set(_ERROR, "", text).decode()

    def _raise_published(self) -> None:
        """Raise the error that another rank published, if any."""
        if self._store.check([_ERROR]):
            raise PeerError(self._store.get(_ERROR).decode())

    def _watch(self, store: Any) -> None:
        """Body of the watch thread: end this process if another rank failed and this one hangs."""
        while not self._ended.wait(WATCH_SECONDS):
            try:
                text = store.get(_ERROR).decode() if store.check([_ERROR]) else None
            except dist.DistError as error:
                text = f"lost the connection to the launcher's key-value store ({error})"
            if text is None:
                continue
            if not self._ended.wait(GRACE_SECONDS):
                print(printable(f"error: {text}"), file=sys.stderr, flush=True)
                os._exit(1)
            return

    # -- messages ---------------------------------------------------------------------------------

    def gather(self, value: Any) -> list[Any]:
        """Return the JSON values of all ranks, by rank; waits until each rank has sent its value.

        Raises:
            PeerError: another rank has failed.
            RunError: a rank did not respond in time.
        """
        if self.alone:
            return [value]
        self._messages += 1
        names = [f"{self._messages}/{rank}" for rank in range(self.world_size)]
        self._store.set(names[self.rank], json.dumps(value))
        until = time.monotonic() + self._patience
        while not self._store.check(names):
            self._raise_published()
            if time.monotonic() > until:
                late = [str(r) for r, name in enumerate(names) if not self._store.check([name])]
                minutes = f"{self._patience / 60:.0f} minutes"
                raise RunError(
                    f"rank {', '.join(late)} did not respond for {minutes}; "
                    "check its log, then run the same command to resume"
                )
            time.sleep(POLL_SECONDS)
        return [json.loads(self._store.get(name)) for name in names]

    def call_stop(self) -> None:
        """Announce that this rank must stop, for ranks that wait for data."""
        if not self.alone:
            self._store.set(_STOP, str(self.rank))

    def stop_called(self) -> bool:
        """Return whether any rank announced a stop; the stop itself is decided by `agree`."""
        return not self.alone and self._store.check([_STOP])

    # -- tensors ----------------------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of a tensor over the ranks, on its device; collective, same shape."""
        if self.alone:
            return values
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total.to(values.device)

    def sum_all(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return sums of float64 tensors over the ranks; one all-reduce, same names and shapes."""
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
        """Return `counts` float64 [S] summed over the ranks, and whether any rank must stop.

        A rank that cannot do the step passes its `error` and zeros. The error is raised on that
        rank, and a PeerError with its message on the others, at the same step. If `stopping`
        returns true while this rank waits, it announces the stop: others may be waiting for data.
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
            self._raise_published()
        return total[:-2].to(counts.device), stops > 0

    def _await(self, work: Any, stopping: Callable[[], object]) -> None:
        """Wait in Python, where signals are handled, and not inside the collective."""
        pause, called = 5e-5, False
        while not work.is_completed():
            if not called and stopping():
                self.call_stop()
                called = True
            time.sleep(pause)
            pause = min(2 * pause, 1e-3)  # a longer pause would leave a GPU idle in every step
        work.wait()

    # -- the draft --------------------------------------------------------------------------------

    def prepare(
        self,
        module: nn.Module,
        dtype: torch.dtype = torch.float32,
        low: bool = False,
        units: Sequence[nn.Module] = (),
    ) -> nn.Module:
        """Wrap the module whose `forward` is the loss; all ranks receive rank 0's weights.

        `units` are those of the draft (see `Draft.units`).

        With `low`, gradients are reduced in bfloat16; so are weights gathered if the forward pass,
        which computes in `dtype`, rounds them anyway.

        "fsdp2" replaces trained parameters by their shards, so collect parameters after this call.
        Frozen parameters stay complete, because the target's head uses the same tensors.
        """
        if self.alone:
            return module
        frozen = {p for p in module.parameters() if not p.requires_grad}
        for tensor in (*(p for p in module.parameters() if p not in frozen), *module.buffers()):
            dist.broadcast(tensor.data, 0)
        if self.sharding == "ddp":
            # no search for unused parameters: `LossOnRanks` gives each a gradient in every step; no
            # broadcast of buffers: they never change, and ranks with fewer micro-batches would not
            # take part in it
            options: dict[str, Any] = {"broadcast_buffers": False, "gradient_as_bucket_view": True}
            if self.device.type == "cuda":
                options["device_ids"] = [self.device]
            with warnings.catch_warnings():  # newer releases of torch have renamed an option
                warnings.simplefilter("ignore", FutureWarning)
                wrapped = nn.parallel.DistributedDataParallel(module, **options)
            if low:
                wrapped.register_comm_hook(None, _mean_in_bf16)
            return wrapped
        from torch.distributed.device_mesh import init_device_mesh  # imported in a second
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(self.device.type, (self.world_size,))
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if low and dtype == torch.bfloat16 else None,
            reduce_dtype=torch.bfloat16 if low else None,
            cast_forward_inputs=False,  # slot counts stay float64
        )
        given: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "ignored_params": frozen}
        self._units = [fully_shard(unit, **given) for unit in units]
        whole: Any = fully_shard(module, reshard_after_forward=False, **given)
        # Said, and not left to what ran before: after a validation, in which ranks make other
        # calls, each would gather other weights ahead.
        order = [whole, *self._units]
        for one, following in itertools.pairwise(order):
            one.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([one])
        whole.set_modules_to_backward_prefetch(order[-1:])
        return cast(nn.Module, whole)

    @contextlib.contextmanager
    def gradients(self, module: Any, last: bool) -> Iterator[None]:
        """Wrap forward and backward of a micro-batch; only the last one reduces gradients.

        Earlier micro-batches communicate nothing, because ranks may have different numbers of them.
        """
        if self._sharded:
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            for unit in self._units:
                unit.set_reshard_after_forward(last)
        elif not self.alone and not last:
            with module.no_sync():
                yield
            return
        yield

    @contextlib.contextmanager
    def assembled(self, module: Any) -> Iterator[None]:
        """Gather the complete weights once, for forward passes that differ between the ranks."""
        parts = [module, *self._units] if self._sharded else []
        for part in parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in parts:
                part.reshard()


def _mean_in_bf16(_state: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks, as torch's hook, which refuses CPUs, does."""
    low = bucket.buffer().to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(low, async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: bucket.buffer().copy_(done.value()[0]))


def _lost_a_rank(error: BaseException) -> bool:
    """Return whether a collective has lost a process, which Gloo and NCCL say in words alone."""
    words = ("closed by peer", "reset by peer", "Broken pipe", "remote process exited")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _describe(error: BaseException) -> str:
    """Return the message of an error, after its class name if it is not a SpecDataError."""
    return str(error) if isinstance(error, SpecDataError) else f"{type(error).__name__}: {error}"
