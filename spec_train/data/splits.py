"""Which documents a run trains on and which it only measures, of one dataset or several.

The split depends on the prompt of a document (see `shards.prompt_keys`), so all answers to a prompt
in all datasets, also under other templates and loss masks, are held out or all trained on. It
depends on split_seed and not on --seed, so runs of different seeds are measured on the same
documents. Validation measures each of several datasets separately and counts every document once. A
run that follows generation measures only held-out documents of its first window: they exist when
the run starts.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow.compute as pc
import torch

from spec_data.shards.errors import DatasetError
from spec_train.data.mixture import Documents, MixedPlan, Mixture
from spec_train.data.order import (
    SPLIT_BY_TOKENS,
    SPLIT_RULE,
    BatchPlan,
    FollowingPlan,
    below_border,
    hash_ids,
    hash_prompts,
    split_border,
)
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
    lost: float  # the share of all tokens that these, and documents supervised later only, lose
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
    kept = np.where(beyond, 0, np.minimum(dataset.lengths, seq_len))[~nothing]
    total = int(dataset.lengths[~nothing].sum())
    return Selection(
        usable=usable,
        lost=1 - int(kept.sum()) / max(1, total),
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


@dataclass(frozen=True)
class HeldOut:
    """What a run holds out: documents whose hash by `rule` is below `border`, in every dataset.

    `common` is the prompt of more than half of the documents, None: there is none. All of them on
    one side would be no split, so these are held out by their tokens.
    """

    rule: str
    border: int
    common: int | None = None

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> "HeldOut":
        """Return what run.json says."""
        common = identity.get("split_common")
        number = None if common is None else int(common, 16)
        return cls(str(identity["split_rule"]), int(identity["split_border"]), number)

    def to_json(self) -> dict[str, Any]:
        """Return what run.json says of it."""
        found: dict[str, Any] = {"split_rule": self.rule, "split_border": self.border}
        return found | ({} if self.common is None else {"split_common": f"{self.common:016x}"})

    def keys(self, dataset: Documents) -> np.ndarray:
        """Return the numbers that documents share if they are held out together, uint64 [N]."""
        if self.rule == SPLIT_BY_TOKENS:
            return hash_ids(dataset.id_array, 0)
        if self.common is None:
            return dataset.prompts
        alone = dataset.prompts == np.uint64(self.common)
        return np.where(alone, hash_ids(dataset.id_array, 0), dataset.prompts)

    def hashes(self, dataset: Documents, seed: int) -> np.ndarray:
        """Return what is compared with the border, uint64 [N]."""
        if self.rule == SPLIT_BY_TOKENS:
            return hash_ids(dataset.id_array, seed)
        return hash_prompts(self.keys(dataset), seed)

    def below(self, dataset: Documents, seed: int) -> np.ndarray:
        """Return which documents of a dataset are held out, bool [N]."""
        return below_border(self.hashes(dataset, seed), self.border)


def common_prompt(prompts: np.ndarray) -> int | None:
    """Return the number that more than half of the documents have, uint64 [N]; None: no one has."""
    values, counts = np.unique(prompts, return_counts=True)
    often = len(prompts) > 1 and 2 * int(counts.max()) > len(prompts)
    return int(values[counts.argmax()]) if often else None


@dataclass(frozen=True, kw_only=True)
class Splits:
    """What a run trains on and what it measures; prompts and split_seed decide."""

    selection: Selection
    train: BatchPlan
    validation: dict[str, BatchPlan]  # by name of the dataset; "" for one alone
    held_out: int  # documents kept from training; `validation` may measure fewer
    held_prompts: int  # that these documents answer
    common: int  # usable documents of the one prompt that is split by tokens
    rule: HeldOut

    @property
    def measured(self) -> np.ndarray:
        """Documents of `validation`, int64 [n]."""
        return np.concatenate([plan.rows for plan in self.validation.values()])


def make_splits(
    dataset: Documents,
    config: Training,
    world_size: int = 1,
    rule: HeldOut | None = None,
    start: HeldOut | None = None,
) -> Splits:
    """Select, split and plan the documents of a dataset (or of several as one).

    `world_size` is the number of processes, which decides the packs of a global batch. `rule` is
    what the run holds out; None: --validation decides. `start` is what the run of --init-from held
    out: it trained on the rest, which is not measured then.

    Raises:
        DatasetError: no document is left to train on; the message says why.
    """
    selection = select(dataset, config.seq_len)
    usable = np.flatnonzero(selection.usable)
    rule = rule or _new_rule(dataset, config, usable, start)
    hashes = rule.hashes(dataset, config.split_seed)[usable]
    side = below_border(hashes, rule.border)
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
        validation=validation_plans(dataset, config, measured, world_size),
        held_out=int(side.sum()),
        held_prompts=len(np.unique(hashes[side])),
        common=0 if rule.common is None else int((dataset.prompts[usable] == rule.common).sum()),
        rule=rule,
    )


def _new_rule(
    dataset: Documents, config: Training, usable: np.ndarray, start: HeldOut | None
) -> HeldOut:
    """Decide what a new run holds out of the documents `usable`, int64 [n]."""
    rule = start or HeldOut(SPLIT_RULE, 0, common_prompt(dataset.prompts[usable]))
    hashes = rule.hashes(dataset, config.split_seed)[usable]
    border = split_border(hashes, config.validation, LEAST_HELD_OUT)
    if start is None or (start.rule == SPLIT_RULE and start.border >= border):
        return replace(rule, border=border)
    lower = min(border, start.border)
    if start.border < border and not _are_enough(below_border(hashes, lower)):
        if start.rule == SPLIT_RULE:
            return replace(rule, border=border)
        return _new_rule(dataset, config, usable, None)
    if start.rule != SPLIT_RULE:
        log.warning(
            "warning[init-from]: the run of --init-from is of an earlier release, and held out "
            "documents, not prompts; so does this run. Other answers to a held-out prompt may be "
            "trained on, and lengths are too good then"
        )
    return replace(rule, border=lower)


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
    if (growing := dataset.growing) is not None:
        return FollowingPlan(dataset.lengths, rows, growing.units, **options)
    return BatchPlan(dataset.lengths, rows, **options)


def validation_plans(
    dataset: Documents, config: Training, held_out: np.ndarray, world_size: int
) -> dict[str, BatchPlan]:
    """Plan what is measured of documents `held_out`, int64 [n]: each of several datasets alone."""
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
