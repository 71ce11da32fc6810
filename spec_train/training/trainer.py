"""The training loop: steps, validations, checkpoints.

One optimizer step uses one global batch, split into micro-batches that are distributed over the
ranks. The supervised slots of the whole batch are counted first, and the loss of each micro-batch
is divided by that count. So k micro-batches on any number of ranks produce the gradient of one
batch. Weights and optimizer state are fp32; bf16 is used only in the forward pass. A resumed run
equals an uninterrupted one bit for bit on the CPU.

Every rank executes the same calls in the same order. `Saver` writes files on rank 0 only.
"""

import contextlib
import itertools
import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from spec_data.models.devices import compute_dtype
from spec_data.shards.batch import padding_batch
from spec_data.shards.errors import ConfigError, DraftError, RunError
from spec_data.terminal import NOTICE
from spec_data.terminal.console import STOP_SIGNALS, handled_signals
from spec_data.terminal.progress import progress
from spec_train.data.mixture import Documents, parts_of
from spec_train.data.order import BatchPlan, FollowingPlan, bytes_together
from spec_train.data.splits import Splits
from spec_train.data.stream import BatchStream, BufferOptions, Step
from spec_train.data.upload import Uploads
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import Sums, add_sums, shown
from spec_train.losses.own import OwnLoss
from spec_train.options.loss_function import loss_function
from spec_train.options.training import Training
from spec_train.training.callbacks import Callbacks
from spec_train.training.compiling import compiling_shown
from spec_train.training.failure import describe_failure, explained_memory
from spec_train.training.loss import (
    LossOnRanks,
    arithmetic,
    cast_draft,
    seed_micro_batch,
    slot_counts,
)
from spec_train.training.optimizer import Masters, learning_rate
from spec_train.training.ranks import Ranks
from spec_train.training.result import BEST_FIGURES, FitResult, better, headline
from spec_train.training.run_directory import RunDirectory, Saved
from spec_train.training.saving import Saver, Tracking
from spec_train.training.validation import Validation

log = logging.getLogger(__name__)


@contextlib.contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list that receives these signals; a second Ctrl-C interrupts at once."""
    caught: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if caught and number == signal.SIGINT:
            raise KeyboardInterrupt
        caught.append(number)
        log.log(NOTICE, "%s: finishing this step, then saving", signal.Signals(number).name)

    with handled_signals((*STOP_SIGNALS, signal.SIGINT), handle):
        yield caught


class Trainer:
    """One run in memory: draft, optimizer, stream, and the metrics so far."""

    def __init__(
        self,
        draft: Draft,
        head: TargetHead,
        config: Training,
        dataset: Documents,
        splits: Splits,
        total: int,
        run: RunDirectory | None,
        ranks: Ranks,
        callbacks: Callbacks | None = None,
        *,
        until: int | None = None,
        goes_on: bool = False,
    ) -> None:
        """Prepare a run of `total` steps at step 0. `config` is resolved: no option is "auto".

        The draft moves to the rank's device. Trained parameters become fp32, frozen ones get the
        dtype of the forward pass, with the values that files will have. `run` is None on every rank
        except rank 0. The run stops after step `until`, not given: its last one; with `goes_on` a
        search continues it later.
        """
        self.head, self.config, self.dataset, self.ranks = head, config, dataset, ranks
        self.total, self.step, self.tokens = total, 0, 0
        self.until, self._goes_on = total if until is None else until, goes_on
        self.best: dict[str, Any] | None = None
        self.device = ranks.device
        self.dtype = compute_dtype(config.dtype, self.device)
        self.draft: Draft = draft.to(self.device)
        with safe_open(dataset.target_dir / "head.safetensors", "pt") as file:
            dtype = file.get_slice("embed_tokens")[:1].dtype
        cast_draft(self.draft, self.dtype, dtype)
        tracking = None
        if run is not None and config.track:
            tracking = Tracking(config.track, run.path, self.device.type == "cpu")
        self.saver = Saver(run, self.draft, dtype, tracking)
        if config.loss_fn is not None:
            self.draft.loss_fn = self.saver.draft.loss_fn = OwnLoss(
                loss_function(str(config.loss_fn))
            )
        self._callbacks = callbacks or Callbacks()
        self._called = any(ranks.gather(bool(self._callbacks)))
        # the forward pass has the target's weights rounded, as bfloat16 has those of float16
        if run is not None and torch.promote_types(dtype, self.dtype) != self.dtype:
            self.saver.keep_exact(TargetHead.from_dataset(parts_of(dataset)[0], dtype))
        low = config.exchange == "bf16"
        units = self.draft.units
        self._loss = ranks.prepare(LossOnRanks(self.draft), self.dtype, low, units)
        self.masters = Masters(self.draft, config)
        self._uploads = Uploads(self.device, self.dtype)
        self.stream = self._make_stream(splits.train)
        held_out = self._make_stream(next(iter(splits.validation.values())))
        self._validation = Validation(
            self.draft, self._loss, head, splits, held_out, ranks, config.seed
        )
        self._pending: Sums = {}  # sums since the last line of metrics
        self._pending_tokens = 0
        self._earlier_tokens = 0  # of them, those of an earlier process
        self._clock = time.perf_counter(), 0.0  # time of that line, and `stream.waited` then
        self._grad_norm = self._lr = 0.0
        self._trained, self._validated = "", "-"  # loss and acceptance length, for the bar
        self._held_step = self._saved_step = -1
        self._epoch = 0.0
        self._spans: np.ndarray | None = None  # of the units, where shards are passed on
        self._passed = 0  # the units before it are in a checkpoint
        self._signals: list[int] = []
        self._held: dict[str, Tensor] = {}
        self._counts = torch.zeros(0)  # slot counts of the current step, over all ranks
        self._in_work: Step | None = None  # the step whose micro-batches are in memory

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

    def end_by(self, step: int) -> None:
        """End this run after `step` at the latest."""
        self.until = min(self.until, step)

    def run(
        self, after_step: Callable[[], object] = lambda: None, *, trial: bool = False
    ) -> FitResult:
        """Train to `until`, or until any rank receives Ctrl-C or a stop signal, and save.

        `after_step` is called after every step, with its validation and before its checkpoint. A
        `trial`, of which only the costs count, does not measure the untrained draft.
        """
        steps = self.stream.take(self.until - self.step, self._stopping)
        bar = progress(
            total=self.until, initial=self.step, desc="fit", disable=not self.ranks.is_main
        )
        with (
            explained_memory(self.config, self.draft.options, self._doing),
            contextlib.closing(self.saver),
            stop_signals() as self._signals,
            contextlib.closing(steps),
            bar,
            compiling_shown(bar, self.device) if self.ranks.is_main else contextlib.nullcontext(),
        ):
            self._call("on_train_begin")
            self._stop_if_asked()
            stopped_after_it = self._saved_step >= 0
            if self.step == 0 and not stopped_after_it and not trial:
                self.validate()
                bar.unpause()  # it is no step: the time left would be many times too long
            if self.total == 0:
                self.save()
            self._clock = time.perf_counter(), self.stream.waited
            while self.step < self.until:
                step = self._next_step(steps)
                if step is None:
                    self.save()
                    break
                self._call("on_step_begin")
                self._train_step(step)
                self._epoch = step.epoch + step.share
                self._call("on_step_end")
                self._stop_if_asked()
                if self._due(self.config.log_every, "should_log"):
                    self._log(step)
                if self._due(self.config.eval_every, "should_evaluate"):
                    self.validate()
                self._stop_if_asked()
                bar.set_postfix_str(f"{self._trained}held out {self._validated}", refresh=False)
                after_step()
                due = self._due(self.config.save_every, "should_save")
                if due or self._passable() > self._passed:
                    self.save()
                self._stop_if_asked()
                bar.update()
            self.saver.check(wait=True)
            self._call("on_train_end")
        finished = self.step >= self.total
        stopped_by: int | None = None
        if self.step < self.until or (self._signals and self._goes_on):
            stopped_by = (self._signals or [signal.SIGTERM])[0]
        return FitResult(Path(self.config.out), self.step, finished, stopped_by, self.best)

    def _next_step(self, steps: Generator[Step, None, None]) -> Step | None:
        """Return the next step and set its slot counts; return None if any rank must stop.

        A rank stopped while waiting for data has no micro-batches, so all ranks skip this step.
        An error of the reader or of the writer is raised on all ranks.
        """
        try:
            self.saver.check()
            step = None if self._signals else next(steps, None)
        except Exception as error:
            self.ranks.agree(self._no_counts(), error=error)
            raise
        if step is None:
            self.ranks.call_stop()
            mine = self._no_counts()
        else:
            mine = slot_counts(self.draft, step, "train", self.config.seed, self._uploads)
        self._counts, stopped = self.ranks.agree(
            mine, stop=step is None, stopping=lambda: self._signals
        )
        if stopped and step is not None:
            self.stream.untake(step)
        return None if stopped else step

    def _doing(self) -> str:
        """Say what is in work, and of which shape."""
        if self._in_work is None:
            shape = f"{self.config.batch_size} packs of up to {self.stream.plan.seq_len:,} tokens"
            return f"the validation or the checkpoint at step {self.step} ({shape} at a time)"
        shapes = {tuple(batch.input_ids.shape) for batch in self._in_work.batches}
        packs, slots = max(shapes, key=math.prod)
        return f"step {self.step + 1}, with micro-batches of {packs} x {slots:,} tokens"

    def _stopping(self) -> bool:
        return bool(self._signals) or self.ranks.stop_called()

    def _no_counts(self) -> Tensor:
        return self.draft.slot_counts(padding_batch(self.device))

    def _due(self, every: int | None, asked: str) -> bool:  # None: only after the last step
        wanted = self._callbacks.take(asked)
        if self._called:  # validations and checkpoints are collective
            wanted = any(self.ranks.gather(wanted))
        return wanted or (every is not None and self.step % every == 0) or self.step == self.until

    def _call(self, event: str, **more: Any) -> None:
        """Tell the callbacks what has happened."""
        if not self._callbacks:
            return
        state = self._callbacks.state
        state.global_step, state.max_steps, state.epoch = self.step, self.total, self._epoch
        state.is_world_process_zero = state.is_local_process_zero = self.ranks.is_main
        state.best = self.best
        if line := more.get("logs") or more.get("metrics"):
            state.log_history.append(line)
        self._callbacks.call(event, self.config, model=self.draft, **more)

    def _stop_if_asked(self) -> None:
        """End the run with this step, on all ranks, if a callback of any has asked for it."""
        if not self._called:
            return
        stop = self._callbacks.control.should_training_stop
        if any(self.ranks.gather(stop)) and self.until > self.step:
            log.log(
                NOTICE,
                "stopping at step %d of %d: a callback asks for it",
                *(self.step, self.total),
            )
            self.until = self.step

    def _train_step(self, step: Step) -> None:
        self._in_work, self.draft.progress = step, self.step / self.total
        losses: list[Tensor] = []
        batches = self._uploads.batches(step, self.stream.peek)
        for i, number in enumerate(step.numbers):
            batch = next(batches)
            self._pending_tokens += step.batches[i].tokens
            seed_micro_batch(self.config.seed, "train", step.epoch, number)
            last = i == len(step.numbers) - 1
            with self.ranks.gradients(self._loss, last):
                earlier = losses if last and not self.ranks.alone else None
                with arithmetic(self.device, self.dtype):
                    loss, sums = self._loss(batch, self.head, self._counts, earlier)
                (loss * self.ranks.world_size).backward()  # the ranks' gradients are averaged
            losses.append(loss.detach())
            self._pending = add_sums([self._pending, sums])
            del batch, loss, sums
            step.release(i)
        norm, some = self.masters.clip(), self._counts.any()
        *values, self._grad_norm, counted = torch.stack([*losses, norm, some.to(norm)]).tolist()
        self._refuse_non_finite(step, values)
        self._lr = learning_rate(self.step, self.total, self.config)
        if counted:
            self.masters.step(self._lr)
        else:  # momentum would still move the weights
            log.warning(
                "warning[empty-step]: step %d has no slot to train on; weights stay", self.step + 1
            )
        self.step += 1
        self._in_work = None

    def _refuse_non_finite(self, step: Step, losses: list[float]) -> None:
        """Raise on all ranks: one non-finite loss makes the gradient norm non-finite on each."""
        if all(map(math.isfinite, (*losses, self._grad_norm))):
            return
        packs = [batch.rows for batch in step.batches]
        mine = [part for part in zip(step.numbers, packs, losses, strict=True) if any(part[1])]
        parts = sorted(tuple(part) for parts in self.ranks.gather(mine) for part in parts)
        self._hold_weights()
        cause = None
        if self.ranks.is_main:  # it alone has all weights; sharded ones would wait for other ranks
            whole = self.saver.draft.to(self.device)
            whole.progress = self.draft.progress
            of_run = whole, self.head, self.stream, self.config.seed
            cause = describe_failure(parts, step.epoch, self._grad_norm, self._counts, *of_run)
        cause = self.ranks.gather(cause)[0]
        raise RunError(f"step {self.step + 1} (epoch {step.epoch}, batch {step.index}): {cause}")

    def _log(self, step: Step) -> None:
        """Write a line of metrics for the steps since the last one."""
        sums, tokens = self._figures()
        now, waited = time.perf_counter(), self.stream.waited
        seconds = max(1e-9, now - self._clock[0])
        figures = self.draft.summarise(sums)
        self.tokens += tokens
        speed = (tokens - self._earlier_tokens) / seconds
        line = {
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
        self.saver.metrics(line)
        self._call("on_log", logs=line)
        self._pending, self._pending_tokens, self._clock = {}, 0, (now, waited)
        self._earlier_tokens = 0
        self._trained = (
            f"loss {shown(figures['loss'])}, acceptance {shown(figures['acceptance_length'], 2)}, "
            f"{speed:,.0f} tok/s, "
        )

    # -- validation -------------------------------------------------------------------------------

    def validate(self) -> None:
        """Measure the held-out documents; save the draft as `best` if it is the best so far.

        What step 0 measures is compared with later steps, and never `best`: nothing is trained.
        """
        started = time.perf_counter()
        figures, simulated = self._validation.measure()
        tokens = self.tokens + self._tokens_since()  # of all ranks, since the last line
        line: dict[str, Any] = {}
        if figures:
            line = {"step": self.step, "split": "validation", "tokens": tokens, **figures}
            self.saver.metrics(line)
            log.info("validation at step %d: %s", self.step, headline(figures))
            length = figures["serving_like_length"]
            self._validated = f"{shown(figures['loss'])} and {shown(length, 2)}"
        # without held-out documents the newest draft counts as the best
        if self.step and (self.best is None or not figures or better(figures, self.best)):
            self.best = {"step": self.step} | {name: figures.get(name) for name in BEST_FIGURES}
            self._hold_weights()
            self.saver.best(self.step, figures, simulated)
        self._call("on_evaluate", metrics=line)
        # the training speed excludes validation
        self._clock = self._clock[0] + time.perf_counter() - started, self._clock[1]

    # -- state ------------------------------------------------------------------------------------

    def _figures(self) -> tuple[Sums, int]:
        """Return sums and tokens of all ranks since the last line of metrics, on every rank."""
        return self.ranks.sum_all(self._pending), self._tokens_since()

    def _tokens_since(self) -> int:
        return int(self.ranks.sum(torch.tensor(self._pending_tokens, dtype=torch.float64)))

    def _hold_weights(self) -> None:
        """Copy the weights of this step to the host, once, for the writer."""
        if self._held_step == self.step:
            return
        self.saver.check(wait=True)  # the writer may still read the host buffers
        self._held = self.saver.hold(self.masters.weights())
        self._held_step = self.step

    def save(self) -> None:
        """Write a checkpoint of this step unless it exists already."""
        if self._saved_step == self.step:
            return
        self._hold_weights()
        sums, tokens = self._figures()
        mine = 1 if self.ranks.is_main else 0  # rank 0 holds the total now, as after a resume
        self._pending = {name: value * mine for name, value in sums.items()}
        self._pending_tokens = tokens * mine
        pending = ((f"pending.{name}", value) for name, value in sums.items())
        # safe to overwrite: `_hold_weights` waited for all writes
        held = self.saver.hold(itertools.chain(pending, self.masters.moments()))
        state = {
            "tokens": self.tokens,
            "pending_tokens": tokens,
            "best": self.best,
            "stream": self.stream.state_dict(),
        }
        self._passed, then = self._passable(), None
        if self._passed and (growing := self.dataset.growing) is not None:
            growing.forget(self._passed)
            then = partial(growing.free, self._passed)
        self.saver.checkpoint(self.step, self._held | held, state, then)
        self._saved_step = self.step
        self._call("on_save")

    def pass_on(self, run: RunDirectory | None, splits: Splits) -> None:
        """From now on, delete the shards that a checkpoint contains; call it after `restore`.

        Raises:
            ConfigError: a second pass is asked for, the shards that are needed together are too
                many, or another run uses them.
        """
        dataset, plan = self.dataset.growing, splits.train
        assert dataset is not None and isinstance(plan, FollowingPlan)
        spans = plan.unit_spans()
        if self.total != len(spans) - 1:
            raise ConfigError(
                f"{dataset.path} passes its shards on (--pass-on), and each is trained on once: in "
                f"{len(spans) - 1} steps, not {self.total}. Leave --steps, --epochs and --preset "
                "out, or generate without --pass-on"
            )
        ring, kept = dataset.ring(), sorted({dataset.unit_of(row) for row in splits.measured})
        needed = bytes_together(spans, ring.units, kept)
        if needed > ring.most:
            raise ConfigError(
                f"{dataset.path}: --pass-on holds {ring.most:,} bytes of shards, and this run "
                f"needs {needed:,} at a time: windows are shuffled, and documents of validation "
                f"stay. Run the same `spec-data generate` with --pass-on {needed}, or this with "
                f"fewer --window-tokens than {self.config.window_tokens:,}"
            )
        self._spans = spans[:, 0]
        self._passed = self._passable()
        dataset.pass_on(None if run is None else run.path, kept, self._passed, needed)

    def _passable(self) -> int:
        """Return before which unit none is needed again; 0 where nothing is passed on."""
        return 0 if self._spans is None else int(self._spans[self.stream.batches_done])

    def restore(self, saved: Saved) -> None:
        """Load a checkpoint: weights, optimizer, stream position, metrics."""
        tensors, state = saved.tensors, saved.state
        self.stream.load_state_dict(state["stream"])
        if lacking := self.masters.load(tensors):
            raise DraftError(f"{saved.path}: weights are missing: {', '.join(lacking)}")
        mine = 1 if self.ranks.is_main else 0
        self._pending = {
            name.removeprefix("pending."): value.to(self.device) * mine
            for name, value in tensors.items()
            if name.startswith("pending.")
        }
        self._earlier_tokens, self.tokens = state["pending_tokens"], state["tokens"]
        self._pending_tokens = self._earlier_tokens * mine
        self.best, self.step = state["best"], saved.step
        self._saved_step = saved.step
        log.info("resuming from %s", saved.path)
