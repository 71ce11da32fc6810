"""Writing checkpoints, drafts and metrics in a thread, while training continues.

Weights and optimizer state are copied to the host, into buffers that every save reuses. One thread
hashes, writes and renames a host copy of the draft. The next copy waits for earlier writes. An
error in the thread is raised at the next step, and nothing is written after it: a later checkpoint
would say that a draft is the best which is not on the disk. `close` waits for the thread; so
checkpoints are complete after the end of a run, a stop and an error.
"""

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError, RunError
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.training.run_directory import RunDirectory

PROJECT = "spec-train"


class Tracking:
    """The metrics of a run in TensorBoard, wandb and the other trackers of accelerate.

    `metrics.jsonl` always has every metric; trackers receive the numbers of the same lines.
    """

    def __init__(self, names: str, folder: Path, cpu: bool) -> None:
        """Start the trackers of a comma-separated list, for the run in `folder`.

        Raises:
            ConfigError: a tracker is unknown, or its package is not installed.
        """
        from accelerate import Accelerator
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

        wanted = [name.strip() for name in names.split(",") if name.strip()]
        for name in wanted:
            if name not in LOGGER_TYPE_TO_CLASS:
                choices = ", ".join(sorted(LOGGER_TYPE_TO_CLASS))
                raise ConfigError(f"--track {name}: unknown; known: {choices}")
            if name not in map(str, get_available_trackers()):
                raise ConfigError(f"--track {name}: not installed; run: pip install {name}")
        try:
            self._accelerator = Accelerator(
                cpu=cpu, mixed_precision="no", log_with=wanted, project_dir=str(folder)
            )
        except NotImplementedError as error:  # several GPUs of the RTX 40 series, an old driver
            raise ConfigError(
                f"--track {names}: accelerate refuses these GPUs ({str(error).splitlines()[0]}); "
                "set NCCL_P2P_DISABLE=1 and NCCL_IB_DISABLE=1, or leave --track out"
            ) from None
        run = {"wandb": {"name": folder.name, "dir": str(folder)}}
        self._accelerator.init_trackers(PROJECT, init_kwargs=run)

    def line(self, line: dict[str, Any]) -> None:
        """Send the numbers of a line of metrics, named <split>/<name>."""
        numbers = {
            f"{line['split']}/{name}": value
            for name, value in line.items()
            if isinstance(value, int | float) and name != "step"
        }
        self._accelerator.log(numbers, step=line["step"])

    def close(self) -> None:
        """Finish all trackers; `Accelerator.end_training` would end the ranks' group as well."""
        for tracker in self._accelerator.trackers:
            tracker.finish()


def host_copy(draft: Draft) -> Draft:
    """Return a copy of a draft on the host; it shares frozen weights that are there already."""
    tensors: dict[int, Any] = {}
    for tensor in itertools.chain(draft.parameters(), draft.buffers()):
        weight, trained = isinstance(tensor, nn.Parameter), tensor.requires_grad
        data = tensor
        if not (weight and not trained and tensor.is_cpu):
            data = _host_buffer(tensor) if trained else torch.empty_like(tensor, device="cpu")
            data.copy_(tensor.detach())
            data = nn.Parameter(data, trained) if weight else data
        tensors[id(tensor)] = data
    return copy.deepcopy(draft, tensors)


def _host_buffer(like: Tensor) -> Tensor:
    """Allocate host memory for a tensor; page-locked for a GPU tensor, which copies faster."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Saver:
    """Writes the files of one run; without a directory (on every rank except 0) nothing."""

    def __init__(
        self,
        directory: RunDirectory | None,
        draft: Draft,
        dtype: torch.dtype,
        tracking: Tracking | None = None,
    ) -> None:
        """Save `draft` into `directory`, complete and with its weights in `dtype`."""
        self.directory = directory
        self.draft: Draft = draft  # with a directory: a complete copy on the host
        self._tracking = tracking
        self._dtype = dtype
        self._host: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writes: list[Future[Any]] = []
        self._failed = False  # a write has failed, so all later ones do nothing
        if directory is not None:
            self.draft = host_copy(draft)
            self._host = {f"master.{n}": p.data for n, p in self.draft.named_parameters()}

    def keep_exact(self, head: TargetHead) -> None:
        """Write frozen weights of the target as it has them, not as the forward pass does."""
        self.draft.share(head)

    def draft_bytes(self) -> int:
        """Return the bytes of the weights in a saved draft, with its copy of the embedding."""
        return self._dtype.itemsize * sum(p.numel() for _, p in self.draft.named_parameters())

    def hold(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors to the host; overwrites the copies of an earlier call with the same names.

        "master.<name>" is also the weight of that name in the draft that is written.
        """
        held, devices = {}, set()
        for name, tensor in tensors:  # every rank iterates to the end: this gathers shards
            if self.directory is None:
                continue
            if name not in self._host:
                self._host[name] = _host_buffer(tensor)
            held[name] = self._host[name]
            held[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            devices |= {tensor.device} if tensor.is_cuda else set()
        for device in devices:
            torch.cuda.synchronize(device)
        return held

    def checkpoint(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        then: Callable[[], None] | None = None,
    ) -> None:
        """Write checkpoint `step` from held tensors; call `then` once it is durable."""
        if (directory := self.directory) is None:
            return

        def write(*given: Any) -> None:
            directory.save(*given)
            if then is not None:
                then()

        self._submit(write, step, tensors, state)

    def best(self, step: int, figures: dict[str, Any], simulated: dict[str, Any]) -> None:
        """Write the held weights as the best draft, with the results of `Validation.measure`."""
        if self.directory is not None:
            self._submit(self.directory.save_best, step, figures, simulated, calibrate_by=figures)

    def metrics(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl and send it to the trackers."""
        if self.directory is not None:
            self.directory.append_metrics(line)
        if self._tracking is not None:
            self._tracking.line(line)

    def check(self, wait: bool = False) -> None:
        """Raise the error of a finished write, if any; `wait` until everything is written.

        Raises:
            RunError: a write failed; it says what of the run is complete on the disk.
        """
        while self._writes and (wait or self._writes[0].done()):
            try:
                self._writes.pop(0).result()
            except RunError as error:
                if self.directory is not None:
                    error.args = (f"{error}. {self.directory.on_disk()}", *error.args[1:])
                raise

    def close(self) -> None:
        """Wait for the writes and ignore their errors, which would hide the first one."""
        with contextlib.suppress(BaseException):
            self.check(wait=True)
        self._writer.shutdown()
        if self._tracking is not None:
            self._tracking.close()

    def _submit(
        self, write: Callable[..., Any], step: int, *arguments: Any, calibrate_by: Any = None
    ) -> None:
        # in the target's dtype, so that frozen weights keep their bits
        save = self.draft.save_pretrained
        save_draft = partial(save, dtype=self._dtype, figures=calibrate_by)

        def unless_failed() -> None:
            if not self._failed:
                self._failed = True
                write(step, save_draft, *arguments)
                self._failed = False

        self._writes.append(self._writer.submit(unless_failed))
