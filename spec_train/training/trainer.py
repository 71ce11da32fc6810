"""The training loop: fit any draft that keeps the Draft protocol to a dataset, without its target.

One optimizer step = one global batch of the plan, dealt out in micro-batches to the ranks. The
supervised slots of all of them are counted first, and every micro-batch's loss is divided by that
one count, so k micro-batches on any number of ranks give the gradient of one batch. Weights and
optimizer are fp32 masters; bf16 is the arithmetic of the forward alone. A run is a function of its
settings: order, validation split, initial weights, random numbers and learning rate follow from
them, and a resumed run equals an uninterrupted one bit for bit on the CPU.

Random numbers are a function of the micro-batch's place (seed, epoch, packs before it), so no state
of a generator is kept, and what else draws numbers, or where, does not matter.

What every rank does here, it does in the same order; only `Saver` knows who writes.
"""

import contextlib
import functools
import itertools
import logging
import math
import signal
import time
from collections.abc import Generator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spec_data.devices import compute_dtype
from spec_data.progress import progress
from spec_data.shards.errors import DraftError, RunError
from spec_train.data.batch import padding_batch
from spec_train.data.mixture import Documents
from spec_train.data.order import BatchPlan
from spec_train.data.release import KeepAll
from spec_train.data.stream import BatchStream, BufferOptions, Step
from spec_train.head import TargetHead
from spec_train.metrics import Sums, add_sums, shown, summarise_parts
from spec_train.options import FitConfig
from spec_train.training.checkpoint import RunDirectory, Saved
from spec_train.training.failure import (
    FailedStep,
    MicroBatch,
    arithmetic,
    cast_draft,
    describe_failure,
)
from spec_train.training.optimizer import Masters, learning_rate
from spec_train.training.rank_loss import LossOnRanks
from spec_train.training.ranks import Ranks
from spec_train.training.result import FitResult, better
from spec_train.training.saving import Saver
from spec_train.training.seeds import place_seed
from spec_train.training.signals import stop_signals
from spec_train.training.tracking import Tracking

log = logging.getLogger(__name__)


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
        run: RunDirectory | None,
        total: int,
        ranks: Ranks | None = None,
    ) -> None:
        """Make a run of `total` steps at step 0. `config` is resolved: nothing in it is auto.

        The draft moves to the rank's device: fp32 masters of what is trained, what is frozen in
        the dtype of the arithmetic. `run` is None on every rank but the first.
        """
        self.head, self.config, self.dataset = head, config, dataset
        self.ranks = ranks or Ranks(config.device)
        self.validation_plan = validation
        self.total, self.step, self.tokens = total, 0, 0
        self.best: dict[str, Any] | None = None
        self.release = KeepAll()
        self.device = self.ranks.device
        self.dtype = compute_dtype(config.dtype, self.device)
        self.draft: Any = draft.to(self.device)
        cast_draft(self.draft, self.dtype)
        with safe_open(dataset.target_dir / "head.safetensors", "pt") as file:
            dtype = file.get_slice("embed_tokens")[:1].dtype
        tracking = None
        if run is not None and config.track:
            tracking = Tracking(config.track, run.path, self.device.type == "cpu")
        self.saver = Saver(run, self.draft, dtype, tracking)
        self._loss = self.ranks.prepare(LossOnRanks(self.draft))
        self.masters = Masters(self.draft, config)
        self.stream = self._make_stream(train)
        self._held_out = self._make_stream(validation)
        self._pending: Sums = {}  # figures since the last line of metrics
        self._pending_tokens = 0
        self._clock = time.perf_counter(), 0.0  # of that line, and the stream's waiting then
        self._grad_norm = self._lr = self._step_loss = 0.0
        self._held_step = self._saved_step = -1
        self._signals: list[int] = []
        self._held: dict[str, Tensor] = {}
        self._counts = torch.zeros(0)  # slot counts of the step in use, over all ranks

    def _make_stream(self, plan: BatchPlan) -> BatchStream:
        on_gpu = self.device.type == "cuda"
        # a CPU decodes faster beside the training, some tokens at a time in its cache
        decode_on = self.device if on_gpu else None
        return BatchStream(
            self.dataset,
            plan,
            self.draft.columns(self.dataset.manifest.supervision),
            batch_size=self.config.batch_size,
            buffers=BufferOptions(dtype=self.dtype, pin=on_gpu, decode_on=decode_on),
            rank=self.ranks.rank,
            world_size=self.ranks.world_size,
        )

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> FitResult:
        """Train to the last step, or until any rank gets SIGTERM or Ctrl-C, and save."""
        left = self.total - self.step
        steps = self.stream.take(left, lambda: bool(self._signals) or self.ranks.stop_called())
        bar = progress(
            total=self.total, initial=self.step, desc="fit", disable=not self.ranks.is_main
        )
        with (
            contextlib.closing(self.saver),
            stop_signals() as self._signals,
            contextlib.closing(steps),
            bar,
        ):
            if self.step == 0:
                self.validate()
            if self.total == 0:
                self.save()
            self._clock = time.perf_counter(), self.stream.waited
            while self.step < self.total:
                step = self._next_step(steps)
                if step is None:
                    self.save()
                    break
                self._train_step(step)
                if self.step < self.config.log_every:  # later the mean since the last line is shown
                    bar.set_postfix_str(f"loss {self._step_loss:.3f}", refresh=False)
                if self._due(self.config.log_every):
                    bar.set_postfix_str(self._log(step), refresh=False)
                if self._due(self.config.eval_every):
                    self.validate()
                unneeded = self.release.due(step.index + 1)
                if self._due(self.config.save_every) or unneeded:
                    self.save()
                bar.update()
            self.saver.wait()
        finished = self.step >= self.total
        stopped_by = None if finished else (self._signals or [signal.SIGTERM])[0]
        result = FitResult(Path(self.config.out), self.step, finished, stopped_by, self.best)
        log.info("%s: %s", result.directory, result)
        if stopped_by is not None:
            log.info("the same command resumes the run")
        return result

    def _next_step(self, steps: Generator[Step, None, None]) -> Step | None:
        """The next step and its slot counts; None when any rank was told to stop.

        One that is told so while it waits for data, or for another rank that does, has no part of
        the step, so none does it.
        What the reader or the writer has raised is raised on all ranks.
        """
        try:
            self.saver.check()
            step = None if self._signals else next(steps, None)
        except Exception as error:
            self.ranks.agree(self._no_counts(), error=error)
            raise
        if step is None:
            self.ranks.call_stop()
        own = self._no_counts() if step is None else self._slot_counts("train", step)
        self._counts, stopped = self.ranks.agree(
            own, stop=step is None, stopping=lambda: self._signals
        )
        if stopped and step is not None:
            self.stream.untake(step)
        return None if stopped else step

    def _no_counts(self) -> Tensor:
        return self.draft.slot_counts(padding_batch(self.device))

    def _due(self, every: int) -> bool:
        return self.step % every == 0 or self.step == self.total

    def _arithmetic(self) -> AbstractContextManager[Any]:
        return arithmetic(self.device, self.dtype)

    def _train_step(self, step: Step) -> None:
        losses: list[Tensor] = []
        for i, host in enumerate(step.batches):
            batch = host.to(self.device, self.dtype, non_blocking=True)
            self._pending_tokens += host.tokens
            self._seed("train", step, i)
            last = i == len(step.batches) - 1
            with self.ranks.gradients(self._loss, last):
                earlier = losses if last and not self.ranks.alone else None
                with self._arithmetic():
                    loss, sums = self._loss(batch, self.head, self._counts, earlier)
                (loss * self.ranks.world_size).backward()  # the ranks' gradients are averaged
            losses.append(loss.detach())
            self._pending = add_sums([self._pending, sums])
            del batch, loss, sums
            step.release(i)
        norm = self.masters.clip()
        *values, self._grad_norm = torch.stack([*losses, norm]).tolist()
        self._refuse_non_finite(step, values)
        self._lr = learning_rate(self.step, self.total, self.config)
        self.masters.step(self._lr)
        self.step += 1
        self._step_loss = sum(values) * self.ranks.world_size  # as this rank estimates it

    def _seed(self, kind: str, step: Step, i: int) -> None:
        """Let the random numbers that follow be those of micro-batch i, whoever computes it."""
        torch.manual_seed(place_seed(self.config.seed, kind, step.epoch, step.numbers[i]))

    def _slot_counts(self, kind: str, step: Step) -> Tensor:
        """Denominators of this rank's part of the step; drawn as its losses will be."""
        parts = []
        for i, batch in enumerate(step.batches):
            self._seed(kind, step, i)
            parts.append(self.draft.slot_counts(batch.without_hidden().to(self.device)))
        return torch.stack(parts).sum(0)

    def _refuse_non_finite(self, step: Step, losses: list[float]) -> None:
        """Raise on all ranks: a loss that is not finite makes the norm so on each of them."""
        if all(map(math.isfinite, (*losses, self._grad_norm))):
            return
        rows = [batch.rows for batch in step.batches]
        own = [part for part in zip(step.numbers, rows, losses, strict=True) if any(part[1])]
        found = sorted(part for parts in self.ranks.gather(own) for part in parts)
        self._hold_weights()
        self.ranks.assemble(self._loss)
        said = None
        if self.saver.directory is not None:
            parts = [MicroBatch(*part) for part in found]
            failed = FailedStep(
                self.step + 1, step.epoch, step.index, parts, self._grad_norm, self._counts
            )
            said = describe_failure(
                failed, self.draft, self.head, self.stream, self.config, self.saver
            )
        raise RunError(self.ranks.gather(said)[0])

    def _log(self, step: Step) -> str:
        """Write a line of metrics over the steps since the last one; gives it in short."""
        sums, tokens = self._figures()
        now, waited = time.perf_counter(), self.stream.waited
        seconds = max(1e-9, now - self._clock[0])
        figures = self.draft.summarise(sums)
        self.tokens += tokens
        speed = tokens / seconds
        self.saver.metrics(
            {
                "step": self.step,
                "split": "train",
                "epoch": round(step.epoch + step.share, 4),
                "tokens": self.tokens,
                **figures,
                "lr": self._lr,
                "grad_norm": self._grad_norm,
                "tokens_per_second": round(speed, 1),
                "data_wait": round((waited - self._clock[1]) / seconds, 4),
            }
        )
        self._pending, self._pending_tokens, self._clock = {}, 0, (now, waited)
        return (
            f"loss {figures['loss']:.3f}, acceptance "
            f"{shown(figures['acceptance_length'], 2)}, {speed:,.0f} tok/s"
        )

    # -- validation -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Measure the held-out documents; keep the draft if none before did better."""
        started = time.perf_counter()
        figures: dict[str, Any] = {}
        if len(self.validation_plan.rows):
            figures = summarise_parts(self._held_out_sums(), self.draft.summarise)
            self.saver.metrics(
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
        if self.best is None or not figures or better(figures, self.best):
            kept = ("acceptance_length", "product_limit_length", "loss")
            self.best = {"step": self.step} | {name: figures.get(name) for name in kept}
            self._hold_weights()
            self.saver.best(self.step, figures)
        # validation is no part of training speed
        self._clock = self._clock[0] + time.perf_counter() - started, self._clock[1]

    @torch.no_grad()
    def _held_out_sums(self) -> dict[str, Sums]:
        """Sums over the parts of the validation split: always the same batches and random
        numbers."""
        total: dict[str, Sums] = {}
        plan = self.validation_plan
        self._held_out.load_state_dict(plan.state(0, 0))
        self.draft.eval()
        steps = self._held_out.take(len(plan.batches(0)))
        with contextlib.closing(steps), self._arithmetic():
            for step in steps:
                counts = self._slot_counts("validation", step)  # of the loss, which nobody looks at
                part = plan.part_of(step.index)
                for i, batch in enumerate(step.batches):
                    self._seed("validation", step, i)
                    moved = batch.to(self.device, self.dtype)
                    sums = self._loss(moved, self.head, counts)[1]
                    total[part] = add_sums([total.get(part, {}), sums])
        self.ranks.release(self._loss)
        self.draft.train()
        return {part: self.ranks.sum_all(sums) for part, sums in total.items()}

    # -- state ------------------------------------------------------------------------------------

    def _figures(self) -> tuple[Sums, int]:
        """Sums and tokens of all ranks since the last line of metrics, on every rank."""
        tokens = torch.tensor(self._pending_tokens, dtype=torch.float64)
        return self.ranks.sum_all(self._pending), int(self.ranks.sum(tokens))

    def _hold_weights(self) -> None:
        """Copy the weights of this step to the host, once, for the writer."""
        if self._held_step == self.step:
            return
        self.saver.wait()  # what is held is still being written
        self._held = self.saver.hold(self.masters.weights())
        self._held_step = self.step

    def save(self) -> None:
        """Write a checkpoint of this very step, unless there is one."""
        if self._saved_step == self.step:
            return
        self._hold_weights()
        sums, tokens = self._figures()
        mine = 1 if self.ranks.is_main else 0  # from here on in rank 0's, as after a resume
        self._pending = {name: value * mine for name, value in sums.items()}
        self._pending_tokens = tokens * mine
        pending = ((f"pending.{name}", value) for name, value in sums.items())
        # no write still needs what this overwrites: the weights have waited for all of them
        held = self.saver.hold(itertools.chain(pending, self.masters.moments()))
        state = {
            "tokens": self.tokens,
            "pending_tokens": tokens,
            "best": self.best,
            "stream": self.stream.state_dict(),
        }
        used = self.release.take(self.stream.batches_done)
        then = functools.partial(self.release.delete, used)
        self.saver.checkpoint(self.step, self._held | held, state, then)
        self._saved_step = self.step

    def restore(self, saved: Saved) -> None:
        """Take up a checkpoint: weights, optimizer, stream, figures.

        One of a release that kept states of generators is as good: they are not looked at.
        """
        tensors, state = saved.tensors, saved.state
        self.stream.load_state_dict(state["stream"])
        if lacking := self.masters.load(tensors):
            raise DraftError(f"{saved.path}: no weights for {', '.join(lacking)}")
        mine = 1 if self.ranks.is_main else 0
        self._pending = {
            name.removeprefix("pending."): value.to(self.device) * mine
            for name, value in tensors.items()
            if name.startswith("pending.")
        }
        self._pending_tokens, self.tokens = state["pending_tokens"] * mine, state["tokens"]
        self.best, self.step = state["best"], saved.step
        self._saved_step = saved.step
        log.info("going on from %s", saved.path)
