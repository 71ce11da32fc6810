"""`fit --dry-run`: what a run will cost, from a few of its steps. Nothing is written."""

import itertools
import logging
import signal
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from spec_data.models.accelerate_settings import check_accelerate
from spec_data.models.devices import compute_dtype, compute_dtype_name, peak_memory, use_device
from spec_data.models.families import target_architectures
from spec_data.shards.errors import ConfigError
from spec_data.terminal import NOTICE
from spec_data.terminal.command import Result
from spec_data.terminal.given import changed
from spec_data.terminal.parts import part, parts
from spec_data.terminal.progress import bars, duration, size
from spec_data.terminal.text_table import text_table
from spec_train.data.mixture import Documents, parts_of
from spec_train.data.splits import Splits, make_splits, validation_plans
from spec_train.drafts import draft_class
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DraftOptions
from spec_train.options.training import Training
from spec_train.training.announce import announce, announce_places, announce_vocabulary
from spec_train.training.failure import explained_memory
from spec_train.training.fit import count_supervised_tokens, open_data, settle
from spec_train.training.ranks import Ranks
from spec_train.training.settings import total_steps, with_intervals
from spec_train.training.start_draft import load_start, new_draft
from spec_train.training.trainer import Trainer

STEPS = 6
"""Optimizer steps that are run; the first ones are slower and are not counted."""

_WARM = 2
_LEAST, _ENOUGH_SECONDS = 3, 60.0  # steps at least, however long they take; then no more after this
_FEW_BATCHES, _FEW_DOCUMENTS = 4, 8  # of held-out documents, whose time stands for that of all


@dataclass(frozen=True, kw_only=True)
class DryRun(Result):
    """The expected cost of a run.

    Attributes:
        steps: optimizer steps in all.
        seconds: of all steps and validations; None if the run has too few steps to measure it.
        step_seconds: median of the steps that were run; None likewise.
        validation_seconds: of one validation; None likewise.
        validations: how often the run validates.
        peak_bytes: the most memory that this process held, of the GPU if it trains on one.
        device: where it trained.
        draft_bytes: of a saved draft: the trained weights and those that stay as they are.
        checkpoint_bytes: of one checkpoint: a draft, the weights in float32, and the optimizer.
        checkpoints: how many are kept.
        batch_size, accumulation: packs of a micro-batch, and micro-batches of a step.
    """

    again = "next"

    steps: int
    seconds: float | None
    step_seconds: float | None
    validation_seconds: float | None
    validations: int
    peak_bytes: int
    device: str
    draft_bytes: int
    checkpoint_bytes: int
    checkpoints: int
    batch_size: int
    accumulation: int

    def __str__(self) -> str:
        rate = "not measured: the run has too few steps"
        if self.seconds is not None:
            rate = (
                f"about {duration(self.seconds)}: {self.steps:,} steps of {self.step_seconds:.3g} "
                f"s and {self.validations:,} validations of {self.validation_seconds:.3g} s"
            )
        where = "on the GPU" if self.device.startswith("cuda") else "of this process"
        peak, checkpoint = size(self.peak_bytes), size(self.checkpoint_bytes)
        best = f"{size(self.draft_bytes)} for the best draft"
        rows = (
            ("time", rate),
            ("memory", f"{peak} at most {where}; checkpoints add {checkpoint} on the host"),
            ("disk", f"{checkpoint} per checkpoint, {self.checkpoints} are kept; {best}"),
        )
        return text_table(rows, "<<")


def dry_run(draft_name: str, config: Training, options: DraftOptions) -> DryRun:
    """Prepare a new run with `config`, run a few of its steps, and return what it will cost.

    A run that --out already holds is ignored. One process, no --follow.

    Raises:
        ConfigError: --follow, or several processes; and what `fit` raises.
    """
    if config.follow:
        raise ConfigError("--dry-run with --follow: its data are not there yet; leave one out")
    with (
        Ranks(use_device(config.device), config.sharding) as ranks,
        explained_memory(config, options, lambda: "the set-up, before the first step"),
    ):
        if not ranks.alone:
            raise ConfigError("--dry-run runs in one process; start it without torchrun")
        dtype_name = compute_dtype_name(config.dtype, ranks.device)
        check_accelerate(dtype_name, ranks.device, "--sharding fsdp2", config.accumulation)
        dataset = open_data(config)
        kind = draft_class(draft_name, target_architectures(dataset.target_config()))
        kind.check_data(options, dataset.manifest)
        start = start_rule = None
        if config.init_from is not None:
            start, start_rule = load_start(kind, config, dataset)
        else:
            kind.check_fresh(parts_of(dataset)[0])
        config, options = settle(config, options, dataset, start)
        splits = make_splits(dataset, config, start=start_rule)
        total = total_steps(config, splits)
        config = with_intervals(config, total)
        dtype = compute_dtype(config.dtype, ranks.device)
        head = TargetHead.from_dataset(parts_of(dataset)[0], dtype, ranks.device)
        spans = torch.zeros(config.seq_len + 1, dtype=torch.int64)
        counts = count_supervised_tokens(dataset, splits.train, ranks, spans)
        draft = new_draft(kind, config, options, dataset, head, counts, start)
        short = changed(config, eval_every=None, save_every=None)
        few, times = _few_held_out(splits, config, dataset)
        trainer = Trainer(draft, head, short, dataset, few, min(total, STEPS), None, ranks)
        announce(trainer, splits, total)
        announce_vocabulary(draft, counts, dataset)
        announce_places(draft, spans.numpy())
        return _measure(trainer, config, total, times)


def _few_held_out(splits: Splits, config: Training, dataset: Documents) -> tuple[Splits, float]:
    """Return splits that measure a few documents, and how many times the tokens all of them have.

    A validation measures some thousand documents, which on a CPU takes longer than all steps here.
    """
    lengths = np.minimum(dataset.lengths, config.seq_len)
    tokens = int(lengths[splits.measured].sum())
    wanted = _FEW_BATCHES * config.batch_size * config.seq_len
    if tokens <= wanted:
        return splits, 1.0
    documents = -(-wanted * len(splits.measured) // tokens)
    documents = max(_FEW_DOCUMENTS, len(splits.validation), documents)
    limited = changed(config, validation_documents=documents)
    few = replace(splits, validation=validation_plans(dataset, limited, splits.measured, 1))
    return few, tokens / int(lengths[few.measured].sum())


def _measure(trainer: Trainer, config: Training, total: int, held_out: float) -> DryRun:
    """Run the few steps of `trainer`; `config` and `total` steps are those of the whole run.

    A validation of that run takes `held_out` times as long as one of `trainer`.
    """
    times: list[float] = []
    if trainer.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(trainer.device)

    def stepped() -> None:
        times.append(time.perf_counter())
        if len(times) >= _LEAST - 1 and times[-1] - begun > _ENOUGH_SECONDS:
            trainer.end_by(trainer.step + 1)
        part("step", len(times), trainer.until)

    begun = time.perf_counter()
    with parts("measure"):
        part("the first step")
        before = logging.root.manager.disable
        logging.disable(NOTICE)  # only its warnings: a few steps are no run
        try:
            with bars(quiet=True):
                result = trainer.run(stepped, trial=True)
        finally:
            logging.disable(before)
    if result.stopped_by is not None:  # nothing is saved, so the command ends
        signal.raise_signal(result.stopped_by)
    peak = peak_memory(trainer.device)
    gaps = [b - a for a, b in itertools.pairwise(times)]
    validations = 1 + -(-total // (config.eval_every or max(1, total)))
    step = validation = seconds = None
    if len(times) >= _LEAST:
        warm = min(_WARM - 1, len(gaps) - 2)
        step = statistics.median(gaps[warm:-1])  # the last gap has the validation
        validation = max(0.0, gaps[-1] - step) * held_out
        seconds = total * step + validations * validation
    weights = sum(4 * p.numel() for p in trainer.masters.params)
    moments = sum(value.nbytes for _, value in trainer.masters.moments())
    draft = trainer.saver.draft_bytes()
    return DryRun(
        steps=total,
        seconds=seconds,
        step_seconds=step,
        validation_seconds=validation,
        validations=validations,
        peak_bytes=peak,
        device=str(trainer.device),
        draft_bytes=draft,
        checkpoint_bytes=draft + weights + moments,
        checkpoints=config.keep,
        batch_size=config.batch_size,
        accumulation=config.accumulation,
    )
