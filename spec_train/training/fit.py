"""`spec-train fit`, top to bottom: from the options to the last step.

The target is never opened: its config, embeddings and head are part of the dataset. Everything here
happens once, before the first step; the loop is in `trainer`.
"""

import contextlib
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.models.accelerate_settings import check_accelerate
from spec_data.models.devices import compute_dtype, compute_dtype_name, use_device
from spec_data.models.families import target_architectures
from spec_data.shards.errors import BusyError, ConfigError, DraftError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.identity import CONTEXTS
from spec_data.terminal import NOTICE
from spec_data.terminal.config import options_text
from spec_data.terminal.paths import check_directory_to_write
from spec_train.data.mixture import Documents, count_tokens, open_documents, parts_of
from spec_train.data.order import BatchPlan
from spec_train.data.splits import HeldOut, Splits, make_splits
from spec_train.drafts import Draft, draft_class
from spec_train.drafts.config import target_shape
from spec_train.drafts.kinds import kind_of_options
from spec_train.formats.stated_shape import stated_shape
from spec_train.losses.head import TargetHead
from spec_train.options.data_option import parse_sources
from spec_train.options.draft_options import DraftOptions
from spec_train.options.training import Training
from spec_train.simulation.ranges import contexts_of, joined_contexts
from spec_train.training.announce import announce, announce_places, announce_vocabulary
from spec_train.training.callbacks import Callbacks
from spec_train.training.failure import explained_memory
from spec_train.training.machine import machine_facts
from spec_train.training.ranks import Ranks
from spec_train.training.result import FitResult, log_result
from spec_train.training.run_directory import RunDirectory, read_checkpoint
from spec_train.training.settings import (
    filled,
    packs_of_epoch,
    repeatable,
    resolve_config,
    run_identity,
    sized,
    total_steps,
    with_absolute_paths,
    with_intervals,
    with_rate,
)
from spec_train.training.start_draft import (
    load_start,
    new_draft,
    recorded_positions,
    with_shape,
    with_sizes,
)
from spec_train.training.start_fc import start_fc, with_start_of_fc
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)
_RUNNING = threading.Lock()


def fit(
    draft_name: str,
    config: Training,
    options: DraftOptions,
    until: int | None = None,
    callbacks: Iterable[Any] = (),
) -> FitResult:
    """Fit the draft `draft_name` with `config` and its own `options`, or resume that run.

    It stops after the step `until`, if one is given; another call goes on from there. `callbacks`
    are told what happens, see there.

    Raises:
        DraftError: there is no draft `draft_name`.
        ConfigError: the run directory holds a run with other settings.
        DatasetError, MissingError: the dataset cannot be read.
        RunError: training failed, on this rank or on another one.
    """
    check_directory_to_write("--out", config.out)
    called = Callbacks(callbacks)
    if config.loss_fn is not None and "loss" in options.given:
        raise ConfigError(
            f"--loss {getattr(options, 'loss', '')} and --loss-fn {config.loss_fn}: give one of "
            "them"
        )
    with (
        _alone(),
        torch.random.fork_rng(devices=[]),  # the caller's own numbers go on as without this run
        Ranks(use_device(config.device), config.sharding, config.follow) as ranks,
        contextlib.ExitStack() as at_end,
        explained_memory(config, options, lambda: "the set-up, before the first step"),
    ):
        dtype_name = compute_dtype_name(config.dtype, ranks.device)
        check_accelerate(dtype_name, ranks.device, "--sharding fsdp2", config.accumulation)
        dataset = open_data(config)
        kind = draft_class(draft_name, target_architectures(dataset.target_config()))
        kind.check_data(options, dataset.manifest)
        options = with_absolute_paths(options)

        # a new run, or one to resume: rank 0 knows, and is the only one that writes
        run = started = None
        if ranks.is_main:
            run = at_end.enter_context(contextlib.closing(RunDirectory(config.out, config.keep)))
            started = run.started()
        started = ranks.gather(started)[0]
        start = start_rule = None
        if config.init_from is not None and started is None:
            start, start_rule = load_start(kind, config, dataset)
        elif started is None:
            kind.check_fresh(parts_of(dataset)[0])
        level = NOTICE if until is None else logging.INFO  # of many runs, `search` tells one story
        config, options = settle(config, options, dataset, start, started, ranks.world_size, level)
        rule = None if started is None else HeldOut.of(started)
        splits = make_splits(dataset, config, ranks.world_size, rule, start_rule)
        total, saved = 0, None
        if run is not None:
            identity = run_identity(kind.name, dataset, config, options, splits, ranks.world_size)
            parts = set[str]().union(*(part.manifest.parts() for part in parts_of(dataset)))
            total = run.record(identity, lambda: total_steps(config, splits), parts)
            run.write_options(repeatable(with_intervals(config, total), options))
            saved = run.load_newest()
            run.write_machine(machine_facts(ranks.device), 0 if saved is None else saved.step)
        found = (None, None) if saved is None else (str(saved.path), saved.state["best"])
        total, newest, best = ranks.gather([total, *found])[0]
        config = with_intervals(config, total)
        goes_on, until = until is not None, total if until is None else min(total, until)
        if newest is not None and saved is None:
            saved = read_checkpoint(Path(newest))
            saved.state["best"] = best
        if saved is not None and saved.step >= until:
            done = saved.step >= total
            if done and run is not None and dataset.growing is not None:
                dataset.growing.pass_all_on(run.path)
            result = FitResult(Path(config.out), saved.step, done, best=saved.state["best"])
            log.info("%s: nothing to do, %s", result.directory, result)
            return result

        # the draft: new, of --init-from, or of the checkpoint, which also holds the vocabulary
        dtype = compute_dtype(config.dtype, ranks.device)
        head = TargetHead.from_dataset(parts_of(dataset)[0], dtype, ranks.device)
        counts, spans = None, torch.zeros(config.seq_len + 1, dtype=torch.int64)
        if saved is None:
            counts = count_supervised_tokens(dataset, splits.train, ranks, spans)
            before = [] if start is None else [start.config.origin.get(CONTEXTS)]
            draft = new_draft(kind, config, options, dataset, head, counts, start)
            start_fc(draft, dataset, splits.train, head, ranks)
            draft.update_config(origin=with_contexts(draft.config.origin, before, dataset, splits))
        else:
            draft = kind.from_pretrained(saved.path)
            contexts = draft.config.origin.get(CONTEXTS)
            draft.use_options(options)  # a few of them may change when a run resumes
            draft.join(head, dataset.manifest, str(saved.path))
            if contexts is not None:
                draft.update_config(origin=draft.config.origin | {CONTEXTS: contexts})
        ranks.gather(None)  # raises if another rank failed before this point

        # the loop, from step 0 or from the checkpoint
        trainer = Trainer(
            *(draft, head, config, dataset, splits, total, run, ranks, called),
            until=until,
            goes_on=goes_on,
        )
        if saved is not None:
            trainer.restore(saved)
        if dataset.growing is not None and dataset.growing.passed_on:
            trainer.pass_on(run, splits)
            ranks.gather(None)
        dataset.wait_for(splits.measured.tolist(), threading.Event())  # they come first
        if run is not None:
            run.begin() if saved is None else run.truncate_metrics(saved.step)
            announce(trainer, splits)
            if counts is not None:
                announce_vocabulary(draft, counts, dataset)
                announce_places(draft, spans.numpy())
        result = trainer.run()
        log_result(result)  # not of a dry run, whose draft is nobody's
        return result


def settle(
    config: Training,
    options: DraftOptions,
    dataset: Documents,
    start: Draft | None = None,
    started: dict[str, Any] | None = None,
    world_size: int = 1,
    level: int = NOTICE,
) -> tuple[Training, DraftOptions]:
    """Return both sets of options with a value for all that was not given; log who filled what.

    `start` is the draft of --init-from; `started` the identity of the run to resume, None for a new
    run.
    """

    def tell(by: str, why: str, filled: dict[str, Any], more: str = "") -> None:
        if filled:
            log.log(level, "%-10s %s: %s%s", by, why, options_text(filled), more)

    if config.shape_of is not None:
        kind = kind_of_options(options).name
        stated = stated_shape(config.shape_of, kind, options)
        target = target_shape(kind, dataset.target_config(), recorded_positions(dataset))
        stated.check_target(target, dataset.manifest.vocab_size)
        options, shape = stated.fill(options)
        unused = f"; not used: {', '.join(stated.unused)}" if stated.unused else ""
        tell("shape", config.shape_of, shape, unused)
    shaped = with_shape(options, start, started)
    shaped = with_start_of_fc(shaped, start, started)
    tell("init-from", str(config.init_from), filled(options, shaped))
    if started is None:
        shaped.check_needless()  # beside what a shape has filled in, too
    if started is None and start is None and shaped.untrained:
        raise DraftError(
            f"{shaped.untrained}, but it chooses the drafts: it would choose by random weights. "
            "Raise a weight, or start with --init-from a draft that has it trained"
        )
    resolved, whole = resolve_config(config, dataset), with_sizes(shaped, dataset)
    why = f"hidden size {dataset.manifest.hidden_size}"
    tell("target", why, filled(config, resolved) | filled(shaped, whole))
    fitted = sized(resolved, dataset, world_size, started)
    packs, size = packs_of_epoch(resolved, dataset), fitted.packs_per_step(world_size)
    steps = fitted.steps or (fitted.epochs or 0) * packs / size
    paced = with_rate(fitted, whole, steps, started)
    why, more = "as the run began", ""
    if started is None:
        passed_on = dataset.growing is not None and dataset.growing.passed_on
        about = "documents are used once" if passed_on else "small dataset"
        why = f"{about}, about {packs:,.0f} packs per epoch"
        more = f"; about {steps:,.0f} steps of {size} pack{'s' * (size > 1)}"
    tell("size", why, filled(resolved, fitted), more)
    why = f"about {steps:,.0f} steps from random weights" if started is None else why
    tell("rate", why, filled(fitted, paced))
    return paced, whole


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Refuse a second run in this process: both would draw from torch's one generator."""
    if not _RUNNING.acquire(blocking=False):
        raise BusyError(
            "another fit runs in this process, and two would change each other's random numbers; "
            "start each in a process of its own"
        )
    try:
        yield
    finally:
        _RUNNING.release()


def open_data(config: Training) -> Documents:
    """Open the data of a run: one dataset, several, or one that is still being generated."""
    sources = parse_sources(config.data)
    if not config.follow:
        return open_documents(sources, config.mask)
    if sources[0].remote:
        raise ConfigError(
            f"--follow --data {sources[0]}: a dataset on remote storage can be trained on once "
            "it is sealed; leave --follow out then, or generate into a local directory"
        )
    return FollowedDataset(sources[0].path, config.follow_timeout, await_start=True)


def with_contexts(
    origin: Mapping[str, Any],
    before: Sequence[Mapping[str, int] | None],
    dataset: Documents,
    splits: Splits,
) -> dict[str, Any]:
    """Return the origin of a draft with the contexts of its training, as `contexts_of`.

    `before` are those of the draft that it began as; None: not known, and so the whole is not.
    """
    plan = splits.train
    first = dataset.first_supervised[plan.rows]
    own = contexts_of(first, np.minimum(dataset.lengths[plan.rows], plan.seq_len))
    known = [part for part in before if part is not None]
    whole = joined_contexts([own, *known]) if len(known) == len(before) else None
    return dict(origin) | ({} if whole is None else {CONTEXTS: whole})


def count_supervised_tokens(
    dataset: Documents, plan: BatchPlan, ranks: Ranks | None = None, spans: Tensor | None = None
) -> Tensor:
    """Count how often each token id is a supervised token of the documents in `plan`.

    With several datasets, each document counts as often as an epoch repeats it on average, times
    a common factor. Only ids and masks are read, one document at a time. Each rank reads its part.
    `spans`, int64 [seq_len + 1], receives the runs of supervised tokens by length, see there.

    Returns:
        Counts over all ranks, int64 [V].
    """
    ranks = ranks or Ranks()
    repeats = list(zip(plan.rows.tolist(), plan.repeats().tolist(), strict=True))
    mine = repeats[ranks.rank :: ranks.world_size]
    documents = ((row, int(plan.lengths[row]), times) for row, times in mine)
    own = np.zeros(plan.seq_len + 1, np.int64)
    counts = ranks.sum(torch.from_numpy(count_tokens(dataset, documents, plan.seq_len, own)))
    if spans is not None:
        spans.copy_(ranks.sum(torch.from_numpy(own)))
    return counts
