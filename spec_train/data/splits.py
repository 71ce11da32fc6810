"""Which documents a run trains on and which it only measures, of one dataset or several.

The split depends on the tokens of a document, so its copies in several datasets, also with another
loss mask, are all held out or all trained on. It depends on split_seed and not on --seed, so runs
of different seeds are measured on the same documents. Validation measures each of several datasets
separately and counts every document once. A run that follows generation measures only held-out
documents of its first window: they exist when the run starts.
"""

import logging
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from spec_data.shards.errors import DatasetError
from spec_data.shards.follow import FollowedDataset
from spec_train.data.mixture import Documents, MixedPlan, Mixture
from spec_train.data.order import BatchPlan, FollowingPlan, below_border, split_border
from spec_train.options.training import Training

log = logging.getLogger(__name__)

# -- selection -------------------------------------------------------------------------------------
# A slot of a draft is a known token i >= 1 and the token after it, both supervised. A document
# without a slot has no loss: it would make batches smaller than they look. The index of a dataset
# tells for nearly every document whether it has a slot; the loss masks of the few others are read.


NO_SLOT = "supervised tokens, but never two in a row: no slot to train on"


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which documents a trainer can use at a given pack length, and why it leaves others out."""

    usable: np.ndarray  # bool [N]
    cut: int  # usable documents cut to the pack length
    left_out: dict[str, int] = field(default_factory=dict)  # reason -> documents


def select(dataset: Documents, seq_len: int) -> Selection:
    """Leave out documents that have nothing to train on once they are cut to `seq_len` tokens."""
    nothing = dataset.supervised == 0
    beyond = ~nothing & (dataset.first_supervised >= seq_len)
    usable = ~(nothing | beyond)
    without = _without_slot(dataset, seq_len, usable)
    usable[without] = False
    reasons = {
        "no supervised token": int(nothing.sum()),
        f"first supervised token past --seq-len {seq_len}": int(beyond.sum()),
        NO_SLOT: len(without),
    }
    return Selection(
        usable=usable,
        cut=int((usable & (dataset.lengths > seq_len)).sum()),
        left_out={reason: count for reason, count in reasons.items() if count},
    )


def has_slot(mask: np.ndarray) -> bool:
    """Return whether a document with loss mask bool [T] has a slot."""
    return bool((mask[1:-1] & mask[2:]).any())


def _without_slot(dataset: Documents, seq_len: int, usable: np.ndarray) -> np.ndarray:
    """Return the documents without a slot, int64 [M], of those that are `usable`, bool [N]."""
    lengths, first = dataset.lengths, dataset.first_supervised
    inside = dataset.supervised - (first == 0)  # supervised tokens that can be known
    room = np.minimum(lengths, seq_len) - np.maximum(first, 1)  # places for them
    most = np.minimum(inside, room)
    least = np.maximum(inside - (lengths - seq_len).clip(0), first > 0)
    # without neighbours, at most every second place is supervised
    sure, never = least > (room + 1) // 2, most < 2
    mask = torch.zeros(seq_len, dtype=torch.bool)
    without = []
    for row in np.flatnonzero(usable & ~sure & ~never).tolist():
        count = dataset.read_into(row, {"loss_mask": mask}, 0, seq_len)
        if not has_slot(mask[:count].numpy()):
            without.append(row)
    return np.union1d(np.flatnonzero(usable & never), np.array(without, np.int64))


# -- splits ----------------------------------------------------------------------------------------


LEAST_HELD_OUT = 8
"""Fewer documents would choose the best draft by luck."""


@dataclass(frozen=True, kw_only=True)
class Splits:
    """What a run trains on and what it measures; document ids and split_seed decide."""

    selection: Selection
    train: BatchPlan
    validation: dict[str, BatchPlan]  # by name of the dataset; "" for one alone
    held_out: int  # documents kept from training; `validation` may measure fewer
    border: int  # documents whose hashed id is below it are held out, in every dataset

    @property
    def measured(self) -> np.ndarray:
        """Documents of `validation`, int64 [n]."""
        return np.concatenate([plan.rows for plan in self.validation.values()])


def make_splits(
    dataset: Documents,
    config: Training,
    world_size: int = 1,
    border: int | None = None,
    start_border: int | None = None,
) -> Splits:
    """Select, split and plan the documents of a dataset (or of several as one).

    `world_size` is the number of processes, which decides the packs of a global batch. Documents
    whose hashed id is below `border` are held out; None: --validation decides. `start_border` is
    that of the run of --init-from: it trained on what is not below it, which is not measured then.

    Raises:
        DatasetError: no document is left to train on; the message says why.
    """
    selection = select(dataset, config.seq_len)
    usable = np.flatnonzero(selection.usable)
    ids, seed = dataset.id_array, config.split_seed
    if border is None:
        border = split_border(ids.take(usable), config.validation, seed, LEAST_HELD_OUT)
        if start_border is not None and start_border < border:
            side = below_border(ids, start_border, seed)[usable]
            border = start_border if _are_enough(side) else border
    side = below_border(ids, border, seed)[usable]
    if side.all():
        reasons = [f"{count} with {reason}" for reason, count in selection.left_out.items()]
        reasons += [f"{len(usable)} held out by --validation"] if len(usable) else []
        raise DatasetError(
            f"{dataset.path}: nothing to train on: of {len(dataset)} documents, "
            + "; ".join(reasons)
        )
    train = _train_plan(dataset, config, usable[~side], world_size)
    held_out = usable[side]
    measured = held_out
    if isinstance(train, FollowingPlan):  # those of the first window exist before the first step
        early = held_out[held_out < train.units[train.bounds[1]]]
        measured = early if len(early) else held_out[:1]
    return Splits(
        selection=selection,
        train=train,
        validation=_validation_plans(dataset, config, measured, world_size),
        held_out=int(side.sum()),
        border=border,
    )


def _are_enough(side: np.ndarray) -> bool:
    """Return whether the documents that the run of --init-from held out, bool [N], are enough."""
    count = int(side.sum())
    enough = count >= max(1, min(LEAST_HELD_OUT, len(side) // 10))
    log.warning(
        "warning[init-from]: %d documents are held out, fewer than --validation asks for: the run "
        "of --init-from held out no others, so its draft may know them"
        if enough
        else "warning[init-from]: the run of --init-from held out %d of these documents: if it was "
        "trained on this data, its draft knows what is measured, and lengths are too good",
        count,
    )
    return enough


def _plan_options(config: Training, packs: int) -> dict[str, Any]:
    return {
        "seq_len": config.seq_len,
        "packs_per_batch": packs,
        "seed": config.seed,
        "window_tokens": config.window_tokens,
    }


def _train_plan(
    dataset: Documents, config: Training, rows: np.ndarray, world_size: int
) -> BatchPlan:
    """Plan the training on documents `rows`, int64 [n]."""
    options = _plan_options(config, config.packs_per_step(world_size))
    if isinstance(dataset, Mixture):
        return MixedPlan(dataset.lengths, rows, dataset.shares, **options)
    options["fingerprint"] = dataset.manifest.fingerprint
    if isinstance(dataset, FollowedDataset):
        return FollowingPlan(dataset.lengths, rows, dataset.units, **options)
    return BatchPlan(dataset.lengths, rows, **options)


def _validation_plans(
    dataset: Documents, config: Training, held_out: np.ndarray, world_size: int
) -> dict[str, BatchPlan]:
    """Plan what is measured: each of several datasets by itself."""
    options = _plan_options(config, config.batch_size * world_size)
    parts = {"": (0, len(dataset))}
    if isinstance(dataset, Mixture) and len(dataset.shares) > 1:
        parts = {share.name: (share.first, share.last) for share in dataset.shares}
    groups = [held_out[(held_out >= first) & (held_out < last)] for first, last in parts.values()]
    allowed = even_shares([len(group) for group in groups], config.validation_documents)
    plans: dict[str, BatchPlan] = {}
    packs = 0
    for name, group, count in zip(parts, groups, allowed, strict=True):
        rows = _lowest_ids(dataset, group, count)
        plans[name] = BatchPlan(dataset.lengths, rows, first_pack=packs, **options)
        packs += sum(map(len, plans[name].batches(0)))
    return plans


def even_shares(counts: list[int], limit: int) -> list[int]:
    """Share `limit` (0: no limit) between groups: equally many of each, as far as it has them."""
    if not limit:
        return counts
    taken = [0] * len(counts)
    left = limit
    for done, i in enumerate(sorted(range(len(counts)), key=lambda i: counts[i])):
        taken[i] = min(counts[i], left // (len(counts) - done))
        left -= taken[i]
    return taken


def _lowest_ids(dataset: Documents, rows: np.ndarray, count: int) -> np.ndarray:
    """Return the `count` documents of `rows` (int64, ascending) with the lowest ids.

    Ids are content hashes, so this is an unbiased choice that stays the same.
    """
    if count >= len(rows):
        return rows
    order = pc.array_sort_indices(dataset.id_array.take(rows))
    return rows[np.sort(order.to_numpy()[:count])]
