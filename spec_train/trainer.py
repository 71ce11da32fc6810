"""The training loop: fit any draft that keeps the Draft protocol to a dataset, without its target.

One optimizer step = one global batch of the plan, in `accumulation` micro-batches. The supervised
slots of all of them are counted first, and every micro-batch's loss is divided by that one count,
so k micro-batches give the gradient of one batch. Weights and optimizer are fp32 masters; bf16 is
the arithmetic of the forward alone. A run is a function of its settings: order, validation split,
initial weights and learning rate follow from them, and a resumed run equals an uninterrupted one
bit for bit on the CPU.
"""

import contextlib
import logging
import math
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from spec_data.shards.errors import DraftError
from spec_data.shards.plan import BatchPlan
from spec_train.checkpoint import RunDirectory, Saved
from spec_train.config import FitConfig
from spec_train.failure import (
    FailedStep,
    arithmetic,
    cast_draft,
    describe_failure,
    random_state,
    set_random_state,
)
from spec_train.head import TargetHead
from spec_train.metrics import Sums, add_sums, shown, summarise_parts
from spec_train.mixture import Documents
from spec_train.release import KeepAll
from spec_train.stream import BatchStream, Step

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FitResult:
    """Where a run stands: `finished`, or stopped by signal number `stopped_by` at `step`."""

    directory: Path
    step: int
    finished: bool
    stopped_by: int | None = None
    best: dict[str, Any] | None = None

    def __str__(self) -> str:
        text = f"{'finished' if self.finished else 'stopped and saved'} at step {self.step}"
        if self.best and self.best["acceptance_length"] is not None:
            length = self.best["acceptance_length"]
            text += f"; best draft: step {self.best['step']}, acceptance length {length:.3f}"
        elif self.best and self.best.get("loss") is not None:
            text += f"; best draft: step {self.best['step']}, loss {self.best['loss']:.4f}"
        return text


def learning_rate(step: int, total: int, config: FitConfig) -> float:
    """Rate of step 0..total-1: linear warm-up, then a cosine that ends at min_lr_ratio * lr."""
    peak = config.lr or 0.0
    warm = math.ceil(config.warmup_ratio * total)
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - 1 - warm)
    low = config.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


class Trainer:
    """One run in memory: draft, optimizer, stream, figures so far."""

    def __init__(
        self,
        draft: Any,
        head: TargetHead,
        config: FitConfig,
        dataset: Documents,
        train: BatchPlan,
        validation: BatchPlan,
        run: RunDirectory,
        total: int,
    ) -> None:
        """Make a run of `total` steps at step 0. `config` is resolved: nothing in it is auto.

        The draft moves to the head's device: fp32 masters of what is trained, what is frozen in
        the dtype of the arithmetic.
        """
        self.head, self.config, self.dataset, self.directory = head, config, dataset, run
        self.validation_plan = validation
        self.total, self.step, self.tokens = total, 0, 0
        self.best: dict[str, Any] | None = None
        self.release = KeepAll()
        self.device = torch.device(config.device)
        self.dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        self.draft: Any = draft.to(self.device)
        self.params: list[nn.Parameter] = cast_draft(self.draft, self.dtype)
        names = {id(p): name for name, p in self.draft.named_parameters()}
        self.names = [names[id(p)] for p in self.params]
        with safe_open(dataset.target_dir / "head.safetensors", "pt") as file:
            self._target_dtype = file.get_slice("embed_tokens")[:1].dtype
        self.optimizer = self._make_optimizer()
        self.stream = self._make_stream(train)
        self._held_out = self._make_stream(validation)
        self._pending: Sums = {}  # figures since the last line of metrics
        self._pending_tokens = 0
        self._clock = time.perf_counter(), 0.0  # of that line, and the stream's waiting then
        self._grad_norm = 0.0
        self._saved_step = -1

    def _make_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self.params if p.ndim > 1]
        vectors = [p for p in self.params if p.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": self.config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        fused = self.device.type in ("cuda", "cpu")
        groups = [group for group in groups if group["params"]]
        return torch.optim.AdamW(groups, lr=self.config.lr or 0.0, betas=(0.9, 0.95), fused=fused)

    def _make_stream(self, plan: BatchPlan) -> BatchStream:
        return BatchStream(
            self.dataset,
            plan,
            self.draft.columns(self.dataset.manifest.supervision),
            batch_size=self.config.batch_size,
            dtype=self.dtype,
            pin=self.device.type == "cuda",
        )

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> FitResult:
        """Train to the last step, or until SIGTERM or Ctrl-C, and save."""
        steps = self.stream.take(self.total - self.step)
        bar = tqdm(
            total=self.total,
            initial=self.step,
            unit="step",
            mininterval=0.5 if sys.stderr.isatty() else 15,
            dynamic_ncols=True,
        )
        with _stop_signals() as stop, contextlib.closing(steps), bar, logging_redirect_tqdm():
            self.stream.stopping = lambda: bool(stop)
            if self.step == 0:
                self.validate()
            if self.total == 0:
                self.save()
            self._clock = time.perf_counter(), self.stream.waited
            for step in steps:
                self._train_step(step)
                if self._due(self.config.log_every):
                    bar.set_postfix_str(self._log(step), refresh=False)
                if self._due(self.config.eval_every):
                    self.validate()
                if self._due(self.config.save_every) or stop or self.release.due(step.index + 1):
                    self.save()
                bar.update()
                if stop:
                    break
            if stop:  # while there was nothing to read
                self.save()
        finished = self.step >= self.total
        stopped_by = stop[0] if stop and not finished else None
        result = FitResult(self.directory.path, self.step, finished, stopped_by, self.best)
        log.info("%s: %s", self.directory.path, result)
        return result

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return arithmetic(self.device, self.dtype)

    def _train_step(self, step: Step) -> None:
        counts = self._slot_counts(step)
        losses: list[Tensor] = []
        random: list[dict[str, Tensor]] = []
        for i, host in enumerate(step.batches):
            batch = host.to(self.device, self.dtype, non_blocking=True)
            self._pending_tokens += host.tokens
            random.append(random_state(self.device))
            with self._arithmetic():
                result = self.draft.loss(batch, self.head, counts)
            result.loss.backward()
            losses.append(result.loss.detach())
            self._pending = add_sums([self._pending, result.sums])
            del batch, result
            step.release(i)
        limit = self.config.clip or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.params, limit)
        *values, self._grad_norm = torch.stack([*losses, norm]).tolist()
        if not all(map(math.isfinite, (*values, self._grad_norm))):
            failed = FailedStep(self.step + 1, step, values, self._grad_norm, counts, random)
            raise describe_failure(
                failed, self.draft, self.head, self.stream, self.config, self.directory
            )
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.total, self.config)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1

    def _slot_counts(self, step: Step) -> Tensor:
        """Denominators over the whole step; several ranks would add theirs up here."""
        parts = [
            self.draft.slot_counts(batch.without_hidden().to(self.device)) for batch in step.batches
        ]
        return torch.stack(parts).sum(0)

    def _log(self, step: Step) -> str:
        """Write a line of metrics over the steps since the last one; gives it in short."""
        now, waited = time.perf_counter(), self.stream.waited
        seconds = max(1e-9, now - self._clock[0])
        figures = self.draft.summarise(self._pending)
        self.tokens += self._pending_tokens
        speed = self._pending_tokens / seconds
        self.directory.append_metrics(
            {
                "step": self.step,
                "split": "train",
                "epoch": round(step.epoch + step.share, 4),
                "tokens": self.tokens,
                **figures,
                "lr": self.optimizer.param_groups[0]["lr"],
                "grad_norm": self._grad_norm,
                "tokens_per_second": round(speed, 1),
                "data_wait": round((waited - self._clock[1]) / seconds, 4),
            }
        )
        self._pending, self._pending_tokens, self._clock = {}, 0, (now, waited)
        return (
            f"loss {figures['loss']:.3f}, acceptance length "
            f"{shown(figures['acceptance_length'], 2)}, {speed:,.0f} tok/s"
        )

    # -- validation -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Measure the held-out documents; keep the draft if none before did better."""
        started = time.perf_counter()
        figures: dict[str, Any] = {}
        if len(self.validation_plan.rows):
            figures = summarise_parts(self._held_out_sums(), self.draft.summarise)
            self.directory.append_metrics(
                {"step": self.step, "split": "validation", "tokens": self.tokens, **figures}
            )
            log.info(
                "validation at step %d: loss %.4f, acceptance length %s",
                *(self.step, figures["loss"], shown(figures["acceptance_length"])),
            )
            if figures["acceptance_length"] is None and self.best is None:
                log.warning(
                    "warning: no held-out answer is long enough for a chain of every depth: there "
                    "is no acceptance length, and `best` is the draft with the longest "
                    "product-limit length, then the lowest loss"
                )
        # without held-out documents the last draft is as good a choice as any
        if self.best is None or not figures or _better(figures, self.best):
            kept = ("acceptance_length", "product_limit_length", "loss")
            self.best = {"step": self.step} | {name: figures.get(name) for name in kept}
            self.directory.save_best(self.step, self._save_draft, figures)
        # validation is no part of training speed
        self._clock = self._clock[0] + time.perf_counter() - started, self._clock[1]

    @torch.no_grad()
    def _held_out_sums(self) -> dict[str, Sums]:
        """Sums over the parts of the validation split: always the same batches and random
        numbers."""
        total: dict[str, Sums] = {}
        plan = self.validation_plan
        self._held_out.load_state_dict(plan.state(0, 0))
        devices = [self.device] if self.device.type == "cuda" else []
        self.draft.eval()
        steps = self._held_out.take(len(plan.batches(0)))
        with (
            torch.random.fork_rng(devices),
            contextlib.closing(steps),
            self._arithmetic(),
        ):
            torch.manual_seed(self.config.seed)
            for step in steps:
                counts, part = self._slot_counts(step), plan.part_of(step.index)
                for batch in step.batches:
                    moved = batch.to(self.device, self.dtype)
                    sums = self.draft.loss(moved, self.head, counts).sums
                    total[part] = add_sums([total.get(part, {}), sums])
        self.draft.train()
        return total

    # -- state ------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write a checkpoint of this very step, unless there is one."""
        if self._saved_step == self.step:
            return
        tensors = random_state(self.device)
        tensors |= {f"pending.{name}": value for name, value in self._pending.items()}
        for name, parameter in zip(self.names, self.params, strict=True):
            tensors[f"master.{name}"] = parameter
            for key, value in self.optimizer.state[parameter].items():
                tensors[f"optimizer.{key}.{name}"] = value
        state = {
            "tokens": self.tokens,
            "pending_tokens": self._pending_tokens,
            "best": self.best,
            "stream": self.stream.state_dict(),
        }
        self.directory.save(self.step, self._save_draft, tensors, state)
        self._saved_step = self.step
        self.release.release(self.stream.batches_done)

    def _save_draft(self, folder: Path) -> None:
        """Write the draft directory in the target's dtype: frozen weights come back bit for bit."""
        self.draft.save_pretrained(folder, self._target_dtype)

    def restore(self, saved: Saved) -> None:
        """Take up a checkpoint: weights, optimizer, stream, random numbers, figures."""
        tensors, state = saved.tensors, saved.state
        self.stream.load_state_dict(state["stream"])
        lacking = [name for name in self.names if f"master.{name}" not in tensors]
        if lacking:
            raise DraftError(f"{saved.path}: no weights for {', '.join(lacking)}")
        for name, parameter in zip(self.names, self.params, strict=True):
            parameter.data.copy_(tensors[f"master.{name}"])
            for key in ("step", "exp_avg", "exp_avg_sq"):
                value = tensors.get(f"optimizer.{key}.{name}")
                if value is not None:
                    self.optimizer.state[parameter][key] = value.to(self.device)
        set_random_state(tensors, self.device)
        self._pending = {
            name.removeprefix("pending."): value.to(self.device)
            for name, value in tensors.items()
            if name.startswith("pending.")
        }
        self._pending_tokens, self.tokens = state["pending_tokens"], state["tokens"]
        self.best, self.step = state["best"], saved.step
        self._saved_step = saved.step
        log.info("going on from %s", saved.path)


def _better(figures: dict[str, Any], best: dict[str, Any]) -> bool:
    """Whether a draft has the longer product-limit length, or as long a one and a lower loss.

    A `best` that an older release saved is compared by what it has: the length of whole chains.
    """
    name = "product_limit_length" if "product_limit_length" in best else "acceptance_length"

    def rank(of: dict[str, Any]) -> tuple[float, float]:
        length, loss = of[name], of.get("loss")
        return (1.0 if length is None else length), (-math.inf if loss is None else -loss)

    return rank(figures) > rank(best)


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect the first SIGTERM or SIGINT in a list; a second Ctrl-C interrupts at once."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)
        log.warning("signal %d: finishing this step, then saving", number)

    old: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # only the main thread may
        for stop in (signal.SIGTERM, signal.SIGINT):
            old[stop] = signal.signal(stop, handle)
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
