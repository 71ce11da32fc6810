"""Fit a draft, from its options to the last step: what `spec-train fit` does, top to bottom.

The target is never opened: its config, embeddings and head are part of the dataset. Everything here
happens once, before the first step; the loop is in `trainer`.
"""

import contextlib
import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from spec_data.models.devices import compute_dtype, compute_dtype_name, usable_device
from spec_data.models.families import block_count
from spec_data.shards.errors import ConfigError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.position_data import UNKNOWN, load_positions
from spec_data.terminal.config import to_dict
from spec_data.terminal.paths import check_directory_to_write
from spec_train.data.mixture import Documents, Mixture, count_tokens, open_documents
from spec_train.data.order import SPLIT_RULE, BatchPlan, rank_slice
from spec_train.data.splits import Splits, make_splits
from spec_train.drafts import Draft, draft_class
from spec_train.losses.head import TargetHead
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from spec_train.training.announce import announce, announce_vocabulary
from spec_train.training.ranks import Ranks
from spec_train.training.result import FitResult
from spec_train.training.run_directory import RunDirectory, read_checkpoint
from spec_train.training.run_size import sized, with_intervals
from spec_train.training.start_draft import start_from, with_shape_of_start
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "preset",  # the options that it sets are still compared
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    "accept_edited",  # about the files of --init-from, which is compared
    *("follow", "follow_timeout"),  # their effect on the order is compared instead
    *("batch_size", "accumulation"),  # packs_per_step, their product with the ranks, is compared
    "sharding",
    "gradient_checkpointing",
)
"""Options that a resumed run may change: locations, how often files are written, memory use."""


def fit(draft_name: str, config: Training, options: Any) -> FitResult:
    """Fit the draft `draft_name` with `config` and its own `options`, or resume that run.

    Raises:
        DraftError: there is no draft `draft_name`.
        ConfigError: the run directory holds a run with other settings.
        DatasetError, MissingError: the dataset cannot be read.
        RunError: training failed, on this rank or on another one.
    """
    check_directory_to_write("--out", config.out)
    with (
        Ranks(usable_device(config.device), config.sharding) as ranks,
        contextlib.ExitStack() as at_end,
    ):
        kind, dataset, config = open_for(draft_name, config, options)

        # a new run, or one to resume: rank 0 knows, and is the only one that writes
        run = started = None
        if ranks.is_main:
            run = at_end.enter_context(contextlib.closing(RunDirectory(config.out, config.keep)))
            started = run.started()
        started = ranks.gather(started)[0]
        config, options, splits = settle(kind, config, options, dataset, ranks.world_size, started)
        total, saved = 0, None
        if run is not None:
            identity = run_identity(kind.name, dataset, config, options, splits, ranks.world_size)
            total = run.record(identity, lambda: total_steps(config, splits))
            run.write_options({**to_dict(with_intervals(config, total)), **to_dict(options)})
            saved = run.load_newest()
        total, newest = ranks.gather([total, None if saved is None else str(saved.path)])[0]
        config = with_intervals(config, total)
        if newest is not None and saved is None:
            saved = read_checkpoint(Path(newest))
        if saved is not None and saved.step >= total:
            result = FitResult(Path(config.out), saved.step, True, best=saved.state["best"])
            log.info("%s: nothing to do, %s", result.directory, result)
            return result

        # the draft: new, of --init-from, or of the checkpoint, which also holds the vocabulary
        head = target_head(config, dataset, ranks)
        counts = None
        if saved is None:
            counts = count_supervised_tokens(dataset, splits.train, ranks)
            draft = new_draft(kind, config, options, dataset, head, counts)
        else:
            draft = kind.from_pretrained(saved.path)
            draft.use_options(options)  # a few of them may change when a run resumes
            draft.join(head, dataset.manifest, str(saved.path))
        ranks.gather(None)  # raises if another rank failed before this point

        # the loop, from step 0 or from the checkpoint
        trainer = Trainer(draft, head, config, dataset, splits, total, run, ranks)
        if isinstance(dataset, FollowedDataset):  # its validation documents come first
            dataset.wait_for(splits.measured.tolist(), threading.Event())
        if saved is not None:
            trainer.restore(saved)
        if run is not None:
            run.begin() if saved is None else run.truncate_metrics(saved.step)
            announce(trainer, splits)
            if counts is not None:
                announce_vocabulary(draft, counts, dataset)
        return trainer.run()


# -- data ------------------------------------------------------------------------------------------


def open_for(
    draft_name: str, config: Training, options: Any
) -> tuple[type[Draft], Documents, Training]:
    """Return the class of a draft, its data, and the options with each "auto" replaced."""
    dataset = open_data(config)
    kind = draft_class(draft_name)
    kind.check_data(options, dataset.manifest)
    return kind, dataset, resolve_config(config, dataset)


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


def count_supervised_tokens(
    dataset: Documents, plan: BatchPlan, ranks: Ranks | None = None
) -> Tensor:
    """Count how often each token id is a supervised token of the documents in `plan`.

    With several datasets, each document counts as often as an epoch repeats it on average, times
    a common factor. Only ids and masks are read, one document at a time. Each rank reads its part.

    Returns:
        Counts over all ranks, int64 [V].
    """
    ranks = ranks or Ranks()
    repeats = list(zip(plan.rows.tolist(), plan.repeats().tolist(), strict=True))
    mine = rank_slice(repeats, ranks.rank, ranks.world_size)
    documents = ((row, int(plan.lengths[row]), times) for row, times in mine)
    return ranks.sum(torch.from_numpy(count_tokens(dataset, documents, plan.seq_len)))


# -- settings --------------------------------------------------------------------------------------


def resolve_config(config: Training, dataset: Documents) -> Training:
    """Replace each automatic option by its value, so that fit.json alone repeats the run."""
    device = usable_device(config.device)
    sources = parse_sources(config.data)
    return dataclasses.replace(
        config,
        data=tuple(str(source.absolute()) for source in sources),  # fit.json is read from anywhere
        device=str(device),
        dtype=cast(Any, compute_dtype_name(config.dtype, device)),
        lr=config.lr if config.lr is not None else default_lr(dataset.manifest.hidden_size),
    )


def default_lr(hidden_size: int) -> float:
    """Peak learning rate by draft width, to two digits: 1e-4 at 4096, 4e-4 at 1024, at most 4e-3.

    1e-4 is what public trainers use for targets of 4096 and more; the rate of a matrix under Adam
    goes with 1/width (maximal-update parametrisation, arXiv 2203.03466).
    """
    return float(f"{min(4e-3, 1e-4 * 4096 / hidden_size):.1e}")


def settle(
    kind: type[Draft],
    config: Training,
    options: Any,
    dataset: Documents,
    world_size: int,
    started: dict[str, Any] | None,
) -> tuple[Training, Any, Splits]:
    """Return the settings that depend on the dataset and on a started run, and the splits."""
    options = with_shape_of_start(kind.name, config, options, dataset, started)
    layers = block_count(dataset.target_config()) or 0
    options = options.sized(dataset.manifest.hidden_size, layers)
    config = sized(config, dataset, world_size, started)
    border = None if started is None else started["split_border"]
    return config, options, make_splits(dataset, config, world_size, border)


def total_steps(config: Training, splits: Splits) -> int:
    """Return the number of steps of a run."""
    if config.steps is not None:
        return config.steps
    return sum(splits.train.count_batches(epoch) for epoch in range(config.epochs or 0))


def run_identity(
    draft_name: str,
    dataset: Documents,
    config: Training,
    options: Any,
    splits: Splits,
    world_size: int,
) -> dict[str, Any]:
    """Return what may not change when a run resumes: run.json holds it."""
    data: dict[str, Any] = {"dataset": dataset.manifest.fingerprint}
    if isinstance(dataset, Mixture):
        data["dataset"] = [share.fingerprint for share in dataset.shares]
        data["weights"] = [str(share.weight) for share in dataset.shares]
    table = {**to_dict(config), **to_dict(options)}
    return {
        "draft": draft_name,
        **data,
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        "split_border": splits.border,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }


# -- draft -----------------------------------------------------------------------------------------


def target_head(config: Training, dataset: Documents, ranks: Ranks) -> TargetHead:
    """Return the head of the target on the device and in the dtype of the run."""
    dtype = compute_dtype(config.dtype, ranks.device)
    first = dataset.datasets[0] if isinstance(dataset, Mixture) else dataset
    return TargetHead.from_dataset(first, dtype, ranks.device)


def new_draft(
    kind: type[Draft],
    config: Training,
    options: Any,
    dataset: Documents,
    head: TargetHead,
    counts: Tensor,
) -> Draft:
    """Return a draft that `config.seed` initialises, or the one of --init-from.

    `counts` are the supervised tokens of the training documents, int64 [V].
    """
    torch.manual_seed(config.seed)
    parts = dataset.datasets if isinstance(dataset, Mixture) else (dataset,)
    recorded = [load_positions(part) for part in parts]
    fresh = kind.build(
        options,
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
        positions=next((p for p in recorded if p.kind != UNKNOWN), recorded[0]),
    )
    if config.init_from is None:
        return fresh
    return start_from(kind.name, config, options, dataset, head, fresh)
