"""From options to a run: which documents, which draft, which steps; new or resumed.

Everything here happens once, before the first step; `trainer` has the loop. Nothing opens the
target: its config, embeddings and head are part of the dataset.
"""

import contextlib
import dataclasses
import heapq
import logging
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.config import differing_fields, to_dict
from spec_data.shards.checksums import string_views
from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.plan import (
    SPLIT_RULE,
    BatchPlan,
    Selection,
    rank_slice,
    select_documents,
    split_documents,
)
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.checkpoint import RunDirectory, Saved, read_checkpoint, resolve_draft_dir
from spec_train.config import FitConfig, default_lr
from spec_train.drafts import DRAFTS, load_draft
from spec_train.exports.target import TargetFacts, block_count
from spec_train.head import TargetHead
from spec_train.ranks import Ranks
from spec_train.result import FitResult
from spec_train.trainer import Trainer

log = logging.getLogger(__name__)

DEFAULT_EPOCHS = 3
FIRST_STEPS = 64
"""How far the announcement looks into an epoch; planning all of it would delay the first step."""
MAY_CHANGE = (
    *("data", "out", "device", "log_every", "eval_every", "save_every", "keep", "track"),
    *("batch_size", "accumulation"),  # their product with the processes may not: packs_per_step
    "sharding",
)
"""Options a resumed run may change: they decide where things are and how often they are written."""


def fit(draft_name: str, config: FitConfig, options: Any) -> FitResult:
    """Fit the draft `draft_name` as `config` and its own `options` say, or go on with that run.

    Raises:
        ConfigError: the run directory holds a run with other settings.
        DatasetError, MissingError: the dataset cannot be read. RunError: training failed, here or
        on another rank.
    """
    device = usable_device(config.device)
    with Ranks(device, config.sharding) as ranks, contextlib.ExitStack() as stack:
        dataset = HiddenStatesDataset(config.data)
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
    dataset: HiddenStatesDataset,
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
    dtype = torch.bfloat16 if config.dtype == "bf16" else torch.float32
    head = TargetHead.from_dataset(dataset.path, dtype, ranks.device)
    draft = _make_draft(draft_name, config, options, dataset, splits, head, saved, ranks)
    ranks.gather(None)  # whoever could not come so far has said why
    trainer = Trainer(
        draft, head, config, dataset, splits.train, splits.validation, run, total, ranks
    )
    if saved is not None:
        trainer.restore(saved)
    if run is not None:
        run.begin() if saved is None else run.truncate_metrics(saved.step)
        _announce(trainer, splits)
    return trainer.run()


def _record(
    run: RunDirectory,
    draft_name: str,
    dataset: HiddenStatesDataset,
    table: dict[str, Any],
    config: FitConfig,
    splits: "Splits",
    world_size: int,
) -> int:
    """Write what the run is, or check that it is still the same; gives its steps in all."""
    identity = {
        "draft": draft_name,
        "dataset": dataset.manifest.fingerprint,
        "packs_per_step": config.packs_per_step(world_size),
        "split_rule": SPLIT_RULE,
        **{name: value for name, value in table.items() if name not in MAY_CHANGE},
    }
    total = run.record(table, identity).get("total_steps")
    if total is None:
        total = _total_steps(config, splits)
        run.note(total_steps=total)
    return total


def usable_device(device: str) -> str:
    """The device meant by --device; raises ConfigError for one that cannot be used here."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(device)
        if device != "cuda":  # several processes: each makes a context on its own GPU alone
            torch.empty(0, device=device)
        elif not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {device}: not usable here ({error})") from None
    return device


def resolve_config(config: FitConfig, dataset: HiddenStatesDataset) -> FitConfig:
    """Replace every automatic option by its value, so that fit.json alone repeats the run."""
    device = usable_device(config.device)
    kind = torch.device(device).type
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bf16" if kind == "cuda" else "fp32"
    return dataclasses.replace(
        config,
        data=str(Path(config.data).absolute()),  # fit.json is read from anywhere
        device=device,
        dtype=dtype,
        lr=config.lr if config.lr is not None else default_lr(dataset.manifest.hidden_size),
        epochs=DEFAULT_EPOCHS if config.steps is None and config.epochs is None else config.epochs,
    )


@dataclass(frozen=True, kw_only=True)
class Splits:
    """What a run trains on and what it measures on, both decided by document ids and seed."""

    selection: Selection
    train: BatchPlan
    validation: BatchPlan
    held_out: int  # documents kept from training; `validation` may measure fewer


def make_splits(dataset: HiddenStatesDataset, config: FitConfig, world_size: int = 1) -> Splits:
    """Select, split and plan the documents of a dataset for that many processes.

    Raises:
        DatasetError: nothing is left to train on; the message says why.
    """
    selection = select_documents(
        dataset.lengths, dataset.supervised, dataset.first_supervised, config.seq_len
    )
    usable = np.flatnonzero(selection.usable)
    ids = dataset.id_array
    side = split_documents(ids, config.validation, config.seed, among=usable)
    if side.all():
        reasons = [f"{count} {reason}" for reason, count in selection.left_out.items()]
        raise DatasetError(
            f"{dataset.path}: no document to train on, of {len(dataset)}"
            + (f" ({'; '.join(reasons)})" if reasons else "")
            + (f"; {len(usable)} held out by --validation" if len(usable) else "")
        )
    measured = np.flatnonzero(side)
    if 0 < config.validation_documents < len(measured):
        # the lowest ids: ids are content hashes, so this is a fair and lasting choice
        bounds, text = string_views(ids)
        rows, letters = usable[measured], text.data
        spans = zip(bounds[rows].tolist(), bounds[rows + 1].tolist(), strict=True)
        names = [bytes(letters[a:b]) for a, b in spans]
        lowest = heapq.nsmallest(
            config.validation_documents, range(len(names)), key=names.__getitem__
        )
        measured = measured[lowest]

    def plan(rows: np.ndarray, packs: int) -> BatchPlan:
        mask = np.zeros(len(dataset), dtype=bool)
        mask[rows] = True
        return BatchPlan(
            dataset.lengths,
            mask,
            seq_len=config.seq_len,
            rows_per_batch=packs,
            seed=config.seed,
            window_tokens=config.window_tokens,
            fingerprint=dataset.manifest.fingerprint,
        )

    return Splits(
        selection=selection,
        train=plan(usable[~side], config.packs_per_step(world_size)),
        validation=plan(usable[measured], config.batch_size * world_size),
        held_out=int(side.sum()),
    )


def count_supervised_tokens(
    dataset: HiddenStatesDataset, plan: BatchPlan, ranks: Ranks | None = None
) -> Tensor:
    """How often each token id is a supervised token of the plan's documents, int64 [V].

    Reads ids and masks only, one document at a time; each of several ranks its part of them.
    """
    ranks = ranks or Ranks()
    counts = np.zeros(dataset.manifest.vocab_size, dtype=np.int64)
    ids = torch.zeros(plan.seq_len, dtype=torch.int64)
    mask = torch.zeros(plan.seq_len, dtype=torch.bool)
    out = {"input_ids": ids, "loss_mask": mask}
    for row in rank_slice(plan.rows.tolist(), ranks.rank, ranks.world_size):
        tokens = dataset.read_into(row, out, 0, int(plan.lengths[row]))
        np.add.at(counts, ids[:tokens][mask[:tokens]].numpy(), 1)
    return ranks.sum(torch.from_numpy(counts))


def _total_steps(config: FitConfig, splits: Splits) -> int:
    if config.steps is not None:
        return config.steps
    epochs = config.epochs or 0
    return sum(splits.train.count_batches(epoch) for epoch in range(epochs))


def _make_draft(
    name: str,
    config: FitConfig,
    options: Any,
    dataset: HiddenStatesDataset,
    splits: Splits,
    head: TargetHead,
    saved: Saved | None,
    ranks: Ranks,
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
    loaded.config = dataclasses.replace(loaded.config, **_unlearned(loaded.config, fresh.config))
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


def _unlearned(own: Any, fresh: Any) -> dict[str, Any]:
    """What decides nothing that a draft computes, and published files lack or shorten."""
    found = {"token_ids": fresh.token_ids}
    if own.rope_parameters["rope_type"] in ("default", "linear", "llama3"):
        found["max_position_embeddings"] = fresh.max_position_embeddings
    return found


def _target_facts(dataset: HiddenStatesDataset, head: TargetHead) -> TargetFacts:
    """What a foreign draft may leave to the dataset's target."""
    return TargetFacts(
        num_layers=block_count(dataset.target_config()),
        embedding=head.embed_weight,
        head=head.head_weight,
    )


def _announce(trainer: Trainer, splits: Splits) -> None:
    """Say what will be trained on what."""
    dataset, config, plan, stream = trainer.dataset, trainer.config, splits.train, trainer.stream
    ranks = trainer.ranks
    log.info(
        "dataset    %s: %s documents, %s tokens, %s supervised",
        dataset.path,
        *(f"{n:,}" for n in (len(dataset), dataset.lengths.sum(), dataset.supervised.sum())),
    )
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
    width = {column.name: column.bytes_per_token for column in dataset.manifest.columns}
    log.info(
        "columns    %s: %d of %d bytes per token are read",
        *(", ".join(stream.columns), sum(width[c] for c in stream.columns), sum(width.values())),
    )
    log.info(
        "training   %s parameters, steps %d to %d, learning rate %g, %s on %s%s, into %s",
        *(
            f"{sum(p.numel() for p in trainer.masters.params):,}",
            trainer.step,
            trainer.total,
            config.lr,
        ),
        *(config.dtype, config.device),
        "" if ranks.alone else f" in {ranks.world_size} processes ({config.sharding})",
        config.out,
    )
