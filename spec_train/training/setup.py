"""From options to a run: which documents, which draft, which steps; new or resumed.

Everything here happens once, before the first step; `trainer` has the loop. Nothing opens the
target: its config, embeddings and head are part of the dataset.
"""

import contextlib
import dataclasses
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.config import differing_fields, to_dict
from spec_data.devices import compute_dtype, compute_dtype_name, usable_device
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.follow import FollowedDataset
from spec_train.data.following import FollowingPlan
from spec_train.data.mixture import Documents, Mixture, open_documents
from spec_train.data.order import SPLIT_RULE, BatchPlan, rank_slice
from spec_train.data.release import UnitRelease
from spec_train.data.splits import Splits, make_splits
from spec_train.data_option import parse_sources
from spec_train.draft_options import draft_options
from spec_train.drafts import DRAFTS, Draft, load_draft
from spec_train.formats.target_facts import TargetFacts, block_count
from spec_train.head import TargetHead
from spec_train.options import FitConfig, default_lr
from spec_train.training.announce import announce
from spec_train.training.checkpoint import RunDirectory, Saved, read_checkpoint, resolve_draft_dir
from spec_train.training.ranks import Ranks
from spec_train.training.result import FitResult
from spec_train.training.trainer import Trainer

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3
FORMERLY_HELD = ("gradient_checkpointing",)  # the identity of older runs may name it
MAY_CHANGE = (
    "preset",  # what it set may not
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    *("follow", "follow_timeout", "follow_keep"),  # the order says how far they may not
    *("batch_size", "accumulation"),  # their product with the processes may not: packs_per_step
    "sharding",
    *FORMERLY_HELD,
)
"""Options a resumed run may change: they decide where things are, how often they are written, and
what memory holds."""


def fit(draft_name: str, config: FitConfig, options: Any) -> FitResult:
    """Fit the draft `draft_name` as `config` and its own `options` say, or go on with that run.

    Raises:
        DraftError: there is no draft `draft_name`.
        ConfigError: the run directory holds a run with other settings, or `options` are those of
            another draft.
        DatasetError, MissingError: the dataset cannot be read. RunError: training failed, here or
        on another rank.
    """
    expected = draft_options(draft_name)
    if type(options) is not expected:
        raise ConfigError(
            f"{draft_name} takes {expected.__name__}, not {type(options).__name__}: its options "
            "come from spec_train.draft_options"
        )
    device = usable_device(config.device)
    with Ranks(device, config.sharding) as ranks, contextlib.ExitStack() as stack:
        if config.follow_keep and not ranks.alone:
            raise ConfigError(
                f"--follow-keep {config.follow_keep} with {ranks.world_size} processes: a unit "
                "that one of them deletes may still be read by another; use one process, or "
                "--follow alone"
            )
        dataset = open_data(config)
        DRAFTS[draft_name].check_data(options, dataset.manifest)
        config = resolve_config(config, dataset)
        run = None
        if ranks.is_main:
            run = RunDirectory(config.out, config.keep)
            stack.callback(run.close)
        return _fit(draft_name, config, options, dataset, run, ranks)


def _fit(
    draft_name: str,
    config: FitConfig,
    options: Any,
    dataset: Documents,
    run: RunDirectory | None,
    ranks: Ranks,
) -> FitResult:
    """One rank's part; `run` is the first one's."""
    splits = make_splits(dataset, config, ranks.world_size)
    total, saved = 0, None
    if run is not None:
        table = {**to_dict(config), **to_dict(options)}
        total = _record(run, draft_name, dataset, table, config, splits, ranks.world_size)
        saved = run.load_newest()
    newest = None if saved is None else str(saved.path)
    total, newest = ranks.gather([total, newest])[0]
    if newest is not None and saved is None:
        saved = read_checkpoint(Path(newest))
    if saved is not None and saved.step >= total:
        result = FitResult(Path(config.out), saved.step, True, best=saved.state["best"])
        log.info("%s: nothing to do, %s", result.directory, result)
        return result
    torch.manual_seed(config.seed)
    dtype = compute_dtype(config.dtype, ranks.device)
    head = TargetHead.from_dataset(dataset.path, dtype, ranks.device, dataset.manifest)
    draft = _make_draft(draft_name, config, options, dataset, splits, head, saved, ranks)
    ranks.gather(None)  # whoever could not come so far has said why
    trainer = Trainer(
        draft, head, config, dataset, splits.train, splits.validation, run, total, ranks
    )
    if isinstance(dataset, FollowedDataset):
        _follow(trainer, dataset, splits)
    if saved is not None:
        trainer.restore(saved)
    if run is not None:
        run.begin() if saved is None else run.truncate_metrics(saved.step)
        announce(trainer, splits)
    return trainer.run()


def _record(
    run: RunDirectory,
    draft_name: str,
    dataset: Documents,
    table: dict[str, Any],
    config: FitConfig,
    splits: Splits,
    world_size: int,
) -> int:
    """Write what the run is, or check that it is still the same; gives its steps in all."""
    identity = {
        "draft": draft_name,
        **_identity(dataset),
        **({"follow": True} if config.follow else {}),
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }
    total = run.record(table, identity, FORMERLY_HELD).get("total_steps")
    if total is None:
        total = _total_steps(config, splits)
        run.note(total_steps=total, split_border=splits.border)
    return total


def open_data(config: FitConfig) -> Documents:
    """Open what a run trains on: one dataset, several, or one in the making."""
    if config.follow:
        return FollowedDataset(parse_sources(config.data)[0].path, config.follow_timeout)
    return open_documents(parse_sources(config.data))


def _follow(trainer: Trainer, dataset: FollowedDataset, splits: Splits) -> None:
    """Prepare a run on a dataset in the making: what is measured must be there first."""
    keep = trainer.config.follow_keep
    if keep and isinstance(splits.train, FollowingPlan):
        trainer.release = UnitRelease(dataset, splits.train, splits.validation, keep)
    log.info(
        "following  %d units in windows of %s; measured documents are of the first %d",
        len(dataset.planned.units) - 1,
        f"{trainer.config.window_tokens:,} tokens",
        len({dataset.unit_of(row) for row in splits.validation.rows.tolist()}),
    )
    dataset.wait_for(splits.validation.rows.tolist(), threading.Event())


def _identity(dataset: Documents) -> dict[str, Any]:
    """What a run may not change about its data: the datasets themselves and their weights."""
    if not isinstance(dataset, Mixture):
        return {"dataset": dataset.manifest.fingerprint}
    return {
        "dataset": [share.fingerprint for share in dataset.shares],
        "weights": [str(share.weight) for share in dataset.shares],
    }


def resolve_config(config: FitConfig, dataset: Documents) -> FitConfig:
    """Replace every automatic option by its value, so that fit.json alone repeats the run."""
    device = usable_device(config.device)
    return dataclasses.replace(
        config,
        data=tuple(  # fit.json is read from anywhere
            str(dataclasses.replace(source, path=source.path.absolute()))
            for source in parse_sources(config.data)
        ),
        device=str(device),
        dtype=compute_dtype_name(config.dtype, device),
        lr=config.lr if config.lr is not None else default_lr(dataset.manifest.hidden_size),
        epochs=DEFAULT_EPOCHS if config.steps is None and config.epochs is None else config.epochs,
    )


def count_supervised_tokens(
    dataset: Documents, plan: BatchPlan, ranks: Ranks | None = None
) -> Tensor:
    """How often each token id is a supervised token of the plan's documents, int64 [V].

    Of several datasets: of what an epoch of them shows on average, times a common factor. Reads
    ids and masks only, one document at a time; each of several ranks its part of them.
    """
    ranks = ranks or Ranks()
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(plan.seq_len, dtype=torch.int64)
    mask = torch.zeros(plan.seq_len, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    shown = list(zip(plan.rows.tolist(), plan.repeats().tolist(), strict=True))
    for row, times in rank_slice(shown, ranks.rank, ranks.world_size):
        tokens = dataset.read_into(row, out, 0, int(plan.lengths[row]))
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), times)
    return ranks.sum(torch.from_numpy(counts))


def _total_steps(config: FitConfig, splits: Splits) -> int:
    if config.steps is not None:
        return config.steps
    epochs = 1 if config.follow_keep else config.epochs or 0
    return sum(splits.train.count_batches(epoch) for epoch in range(epochs))


def _make_draft(
    name: str,
    config: FitConfig,
    options: Any,
    dataset: Documents,
    splits: Splits,
    head: TargetHead,
    saved: Saved | None,
    ranks: Ranks,
) -> Draft:
    """The draft to train: of the checkpoint, of --init-from, or fresh."""
    kind = DRAFTS[name]
    if saved is not None:  # its vocabulary too comes from there: no data is read for it
        draft = kind.from_pretrained(saved.path)
        draft.use_options(options)  # those that may change
        draft.join(head, dataset.manifest, str(saved.path))
        return draft
    fresh = kind.build(
        options,
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=count_supervised_tokens(dataset, splits.train, ranks),
    )
    if config.init_from is None:
        return fresh
    folder = resolve_draft_dir(config.init_from)
    loaded = load_draft(folder, _target_facts(dataset, head))
    if loaded.name != name:
        raise DraftError(
            f"--init-from {folder}: a draft of the kind {loaded.name}; fit it with "
            f"`spec-train fit {loaded.name}`"
        )
    loaded.update_config(**_unlearned(loaded.config, fresh.config))
    ignored = {"dtype": "", "origin": {}}  # of the file alone; compared below
    old, new = to_dict(loaded.config), to_dict(fresh.config)
    differing = differing_fields(old | ignored, new | ignored)
    if differing:
        raise DraftError(
            f"--init-from {folder}: a draft of another shape or target:\n  "
            + "\n  ".join(differing)
        )
    for warning in loaded.join(head, dataset.manifest, f"--init-from {folder}"):
        log.warning("warning: %s", warning)
    loaded.use_options(options)
    return loaded


def _unlearned(own: Any, fresh: Any) -> dict[str, Any]:
    """What decides nothing that a draft computes, and published files lack or shorten."""
    found = {"token_ids": fresh.token_ids}
    if own.rope_parameters["rope_type"] in ("default", "linear", "llama3"):
        found["max_position_embeddings"] = fresh.max_position_embeddings
    return found


def _target_facts(dataset: Documents, head: TargetHead) -> TargetFacts:
    """What a foreign draft may leave to the dataset's target."""
    return TargetFacts(
        num_layers=block_count(dataset.target_config()),
        embedding=head.embed_weight,
        head=head.head_weight,
    )
