"""From options to a run: which documents, which draft, which steps; new or resumed.

Everything here happens once, before the first step; `trainer` has the loop. Nothing opens the
target: its config, embeddings and head are part of the dataset.
"""

import dataclasses
import logging
import threading
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.config import differing_fields, to_dict
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.following import FollowingPlan
from spec_data.shards.mixing import MixedPlan
from spec_data.shards.plan import SPLIT_RULE, BatchPlan
from spec_train.checkpoint import RunDirectory, Saved, resolve_draft_dir
from spec_train.config import FitConfig, default_lr
from spec_train.drafts import DRAFTS
from spec_train.head import TargetHead
from spec_train.mixture import Documents, Mixture, open_documents
from spec_train.release import UnitRelease
from spec_train.sources import parse_sources
from spec_train.splits import Splits, make_splits
from spec_train.trainer import FitResult, Trainer

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3
FIRST_STEPS = 64
"""How far the announcement looks into an epoch; planning all of it would delay the first step."""
MAY_CHANGE = (
    "preset",  # what it set may not
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep"),
    *("follow", "follow_timeout", "follow_keep"),  # the order says how far they may not
    *("batch_size", "accumulation"),  # their product may not: packs_per_step
)
"""Options a resumed run may change: they decide where things are and how often they are written."""


def fit(draft_name: str, config: FitConfig, options: Any) -> FitResult:
    """Fit the draft `draft_name` as `config` and its own `options` say, or go on with that run.

    Raises:
        ConfigError: the run directory holds a run with other settings.
        DatasetError, MissingError: the dataset cannot be read. RunError: training failed.
    """
    dataset = open_data(config)
    DRAFTS[draft_name].check_data(options, dataset.manifest)
    config = resolve_config(config, dataset)
    splits = make_splits(dataset, config)
    run = RunDirectory(config.out, config.keep)
    try:
        table = {**to_dict(config), **to_dict(options)}
        identity = {
            "draft": draft_name,
            **_identity(dataset),
            **({"follow": True} if config.follow else {}),
            "packs_per_step": config.packs_per_step,
            "split_rule": SPLIT_RULE,
            **{name: value for name, value in table.items() if name not in MAY_CHANGE},
        }
        total = run.record(table, identity).get("total_steps")
        if total is None:
            total = _total_steps(config, splits)
            run.note(total_steps=total, split_border=splits.border)
        saved = run.load_newest()
        if saved is not None and saved.step >= total:
            result = FitResult(run.path, saved.step, True, best=saved.state["best"])
            log.info("%s: nothing to do, %s", run.path, result)
            return result
        torch.manual_seed(config.seed)
        dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
        head = TargetHead.from_dataset(dataset.path, dtype, config.device, dataset.manifest)
        draft = _make_draft(draft_name, config, options, dataset, splits, head, saved)
        trainer = Trainer(draft, head, config, dataset, splits.train, splits.validation, run, total)
        if isinstance(dataset, FollowedDataset):
            _follow(trainer, dataset, splits)
        if saved is not None:
            trainer.restore(saved)
            run.truncate_metrics(saved.step)
        else:
            run.begin()
        _announce(trainer, splits)
        return trainer.run()
    finally:
        run.close()


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
        len(splits.train.units) - 1 if isinstance(splits.train, FollowingPlan) else 0,
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
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.empty(0, device=device).device.type
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {device}: not usable here ({error})") from None
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bf16" if kind == "cuda" else "fp32"
    return dataclasses.replace(
        config,
        data=tuple(  # fit.json is read from anywhere
            str(dataclasses.replace(source, path=source.path.absolute()))
            for source in parse_sources(config.data)
        ),
        device=device,
        dtype=dtype,
        lr=config.lr if config.lr is not None else default_lr(dataset.manifest.hidden_size),
        epochs=DEFAULT_EPOCHS if config.steps is None and config.epochs is None else config.epochs,
    )


def count_supervised_tokens(dataset: Documents, plan: BatchPlan) -> Tensor:
    """How often each token id is a supervised token of the plan's documents, int64 [V].

    Of several datasets: of what an epoch of them shows on average, times a common factor. Reads
    ids and masks only, one document at a time.
    """
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(plan.seq_len, dtype=torch.int64)
    mask = torch.zeros(plan.seq_len, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    for row, times in zip(plan.rows.tolist(), plan.repeats().tolist(), strict=True):
        tokens = dataset.read_into(row, out, 0, int(plan.lengths[row]))
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), times)
    return torch.from_numpy(counts)


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
) -> Any:
    """The draft to train: of the checkpoint, of --init-from, or fresh."""
    kind = DRAFTS[name]
    if saved is not None:  # its vocabulary too comes from there: no data is read for it
        draft = kind.from_pretrained(saved.path)
        draft.join(head, dataset.manifest, str(saved.path))
        return draft
    fresh = kind.build(
        options,
        target_config=dataset.target_config(),
        manifest=dataset.manifest,
        head=head,
        token_counts=count_supervised_tokens(dataset, splits.train),
    )
    if config.init_from is None:
        return fresh
    folder = resolve_draft_dir(config.init_from)
    loaded = kind.from_pretrained(folder)
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
    loaded.options = options
    return loaded


def _announce(trainer: Trainer, splits: Splits) -> None:
    """Say what will be trained on what."""
    dataset, config, plan, stream = trainer.dataset, trainer.config, splits.train, trainer.stream
    for part in dataset.datasets if isinstance(dataset, Mixture) else (dataset,):
        log.info(
            "dataset    %s: %s documents, %s tokens, %s supervised",
            part.path,
            *(f"{n:,}" for n in (len(part), part.lengths.sum(), part.supervised.sum())),
        )
        width = {column.name: column.bytes_per_token for column in part.manifest.columns}
        log.info(
            "columns    %s: %d of %d bytes per token are read",
            *(", ".join(stream.columns), sum(width[c] for c in stream.columns)),
            sum(width.values()),
        )
    if isinstance(plan, MixedPlan):
        _announce_shares(plan)
    reasons = [f"{count:,} with {reason}" for reason, count in splits.selection.left_out.items()]
    log.info(
        "documents  %s for training, %s held out (%s measured); %s cut to %d tokens; %s",
        *(f"{n:,}" for n in (len(plan.rows), splits.held_out, len(splits.validation.rows))),
        *(f"{splits.selection.cut:,}", config.seq_len),
        "left out: " + "; ".join(reasons) if reasons else "none left out",
    )
    some = [p for batch in islice(plan.iter_batches(stream.epoch), FIRST_STEPS) for p in batch]
    filled = sum(int(plan.lengths[pack].sum()) for pack in some)
    log.info(
        "an epoch   %s tokens in packs of %d (%.1f %% full): about %s steps of %d packs",
        *(f"{plan.tokens:,}", plan.seq_len, 100 * filled / (len(some) * plan.seq_len)),
        f"{-(-plan.tokens * len(some) // (filled * plan.rows_per_batch)):,}",
        plan.rows_per_batch,
    )
    log.info(
        "training   %s parameters, steps %d to %d, learning rate %g, %s on %s, into %s",
        *(f"{sum(p.numel() for p in trainer.params):,}", trainer.step, trainer.total, config.lr),
        *(config.dtype, config.device, config.out),
    )


def _announce_shares(plan: MixedPlan) -> None:
    """Say how much of the first epoch comes from each dataset."""
    for share, rows in zip(plan.shares, plan.draw(0), strict=True):
        log.info(
            "share      %s, weight %g: %s documents and %.1f %% of the tokens of an epoch",
            *(share.name, float(share.weight), f"{len(rows):,}"),
            100 * int(plan.lengths[rows].sum()) / max(1, plan.tokens),
        )
