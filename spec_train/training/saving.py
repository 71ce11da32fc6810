"""What a run writes, off the path of its steps.

Weights and optimizer are copied to the host once, into buffers that are used again for every save,
and one thread hashes, writes and renames; the run goes on meanwhile. The next copy waits for the
writes before it. What goes wrong in the thread is raised at the next step, and `close` waits, so
the end of a run, a stop and an error all leave whole checkpoints. A kill loses at most the one in
the making: the directory is the same as with saving in place.

The draft that the thread writes is a copy on the host too, with the weights put together where
ranks hold shards: so a draft needs to know nothing of threads or shards.
"""

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.errors import RunError
from spec_train.training.checkpoint import RunDirectory
from spec_train.training.tracking import Tracking

log = logging.getLogger(__name__)


def host_copy(draft: Any) -> Any:
    """A copy of a draft on the host; frozen weights that are there already are shared with it."""
    tensors: dict[int, Any] = {}
    for tensor in itertools.chain(draft.parameters(), draft.buffers()):
        if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.is_cpu:
            tensors[id(tensor)] = tensor
            continue
        data = (
            _host_buffer(tensor) if tensor.requires_grad else torch.empty_like(tensor, device="cpu")
        )
        data.copy_(tensor.detach())
        if isinstance(tensor, nn.Parameter):
            data = nn.Parameter(data, tensor.requires_grad)
        tensors[id(tensor)] = data
    return copy.deepcopy(draft, tensors)


def _host_buffer(like: Tensor) -> Tensor:
    """Memory on the host for a tensor; page-locked, so that a GPU copies into it at full speed."""
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class Saver:
    """Writes of one run; without a directory (on every rank but 0) it writes nothing."""

    def __init__(
        self,
        directory: RunDirectory | None,
        draft: Any,
        dtype: torch.dtype,
        tracking: Tracking | None = None,
    ) -> None:
        """Save into `directory` the `draft`, whole and with its weights in `dtype`."""
        self.directory = directory
        self.draft: Any = None  # on the host, whole, with the weights that are held
        self._tracking = tracking
        self._dtype = dtype
        self._host: dict[str, Tensor] = {}
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="writer")
        self._writes: list[Future[Any]] = []
        if directory is not None:
            self.draft = host_copy(draft)
            self._host = {f"master.{n}": p.data for n, p in self.draft.named_parameters()}

    def hold(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors to the host, over what an earlier call with the same names has copied.

        "master.<name>" is also the weight of that name in the draft that is written.
        """
        held, copying = {}, False
        for name, tensor in tensors:  # to the end on every rank: shards are put together here
            if self.directory is None:
                continue
            if name not in self._host:
                self._host[name] = _host_buffer(tensor)
            held[name] = self._host[name]
            held[name].copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            copying |= tensor.is_cuda
        if copying:
            torch.cuda.synchronize()
        return held

    def checkpoint(
        self,
        step: int,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Write checkpoint `step` of what is held; call `then` once it is safely there."""
        directory = self.directory
        if directory is None:
            return

        def write() -> None:
            directory.save(step, self._save_draft, tensors, state)
            then()

        self._submit(write)

    def best(self, step: int, figures: dict[str, Any]) -> None:
        """Write the draft as it is held as the best one."""
        if self.directory is not None:
            self._submit(self.directory.save_best, step, self._save_draft, figures)

    def failure(self, step: int, write: Callable[[Path], None]) -> Path:
        """Write the directory of a failed step at once; the run ends with it."""
        if self.directory is None:
            raise RunError(f"step {step} failed in a run without a directory")
        return self.directory.save_failure(step, write)

    def metrics(self, line: dict[str, Any]) -> None:
        """Append a line to metrics.jsonl, and show it where else it is wanted."""
        if self.directory is not None:
            self.directory.append_metrics(line)
        if self._tracking is not None:
            self._tracking.line(line)

    def check(self) -> None:
        """Raise what a write has raised."""
        while self._writes and self._writes[0].done():
            self._writes.pop(0).result()

    def wait(self) -> None:
        """Wait until everything is written, and raise what that has raised."""
        while self._writes:
            self._writes.pop(0).result()

    def close(self) -> None:
        """Wait for the writes; for use after an error, when one more would hide it."""
        with contextlib.suppress(BaseException):
            self.wait()
        self._writer.shutdown()
        if self._tracking is not None:
            self._tracking.close()

    def _submit(self, write: Callable[..., Any], *arguments: Any) -> None:
        self._writes.append(self._writer.submit(write, *arguments))

    def _save_draft(self, folder: Path) -> None:
        """Write the draft directory in the target's dtype: frozen weights come back bit for bit."""
        self.draft.save_pretrained(folder, self._dtype)
