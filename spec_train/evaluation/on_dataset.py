"""Acceptance of a draft on a dataset, without its target: teacher-forced and serving-like.

Teacher-forced figures feed the documents' own tokens at every depth, as training does. Serving-like
ones let the draft go on with its own tokens and states (see serving.py, which also says what is
knowable in documents that the target did not write). Documents are read whole, never cut.

Shapes: T tokens of a pack of documents, S draft depths.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.progress import progress
from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.packing import pack_documents, row_layout
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_train.data.batch import DraftBatch
from spec_train.data.order import SPLIT_RULE, below_border, select_documents, split_border
from spec_train.drafts import Draft
from spec_train.evaluation.walk import ServingSums, document_sums
from spec_train.head import TargetHead
from spec_train.metrics import add_sums, shown
from spec_train.origin import require_same_embedding, weights_warning

log = logging.getLogger(__name__)

_PACK_TOKENS = 2048


def choose_documents(
    dataset: HiddenStatesDataset, split: str, run: dict[str, Any] | None, limit: int = 0
) -> tuple[list[int], str]:
    """Dataset rows to measure and the split they are, "validation", "train" or "all".

    `run` is what a run's fit.json and run.json say (see evaluate.read_run), None without a run.
    Documents without a supervised token that could be drafted are left out.

    Raises:
        ConfigError: a split is asked for and no run says how the documents were split.
        DatasetError: no document is left.
    """
    if split == "auto":
        same = run is not None and _fingerprint(dataset, run) in run["datasets"]
        split = "validation" if same else "all"
    chosen = (dataset.supervised > 0) & (dataset.lengths > 2)
    if split != "all":
        if run is None:
            raise ConfigError(
                f"--split {split}: only a run directory (with fit.json) says which documents were "
                "held out; give --draft RUN, or --split all"
            )
        if run["split_rule"] != SPLIT_RULE:
            raise ConfigError(
                f"--split {split}: the run held out documents by rule {run['split_rule']!r}, this "
                f"release by {SPLIT_RULE!r}, so which they were is not known; use --split all"
            )
        usable = select_documents(
            dataset.lengths, dataset.supervised, dataset.first_supervised, run["seq_len"]
        ).usable
        rows = np.flatnonzero(usable)
        held_out = np.zeros(len(dataset), dtype=bool)
        ids, seed, border = dataset.id_array, run["seed"], run["split_border"]
        if border is None:  # a run from before it was recorded, on one dataset
            border = split_border(ids, run["validation"], seed, among=rows)
        held_out[rows] = below_border(ids, border, seed, among=rows)
        chosen &= held_out if split == "validation" else usable & ~held_out
    found = np.flatnonzero(chosen).tolist()
    if not found:
        raise DatasetError(
            f"{dataset.path}: no document to measure in split {split!r} of {len(dataset)}; "
            "try --split all"
        )
    return (found[:limit] if limit else found), split


def _fingerprint(dataset: HiddenStatesDataset, run: dict[str, Any]) -> str:
    """The fingerprint by which a run knew a dataset: while it was made, that of its plan."""
    followed = run.get("follow", False)
    return (FollowedDataset(dataset.path) if followed else dataset).manifest.fingerprint


def check_fit(draft: Draft, dataset: HiddenStatesDataset) -> list[str]:
    """Refuse a dataset of another target; give warnings about one of another version of it.

    Raises:
        DraftError: sizes or embeddings differ, or a layer that the draft reads was not captured.
        DatasetError: there is no teacher for the draft in it.
    """
    manifest, config = dataset.manifest, draft.config
    type(draft).check_data(draft.options, manifest)
    missing = sorted(set(config.layers) - set(manifest.layers))
    if missing:
        raise DraftError(
            f"the draft reads layers {list(config.layers)}; {dataset.path} holds "
            f"{list(manifest.layers)}, without {missing}: generate it with those layers"
        )
    for name, own, theirs in (
        ("vocabulary", config.vocab_size, manifest.vocab_size),
        ("hidden size", config.target_hidden_size, manifest.hidden_size),
    ):
        if own != theirs:
            raise DraftError(
                f"the draft is for a target of {name} {own}, {dataset.path} has {theirs}: it was "
                "made from another target"
            )
    embedding = load_head_tensors(dataset.path)["embed_tokens"]
    require_same_embedding(draft.embed_tokens.weight, embedding, "--draft", str(dataset.path))
    return weights_warning(config.origin, manifest)


def read_pack(
    dataset: HiddenStatesDataset, rows: Sequence[int], columns: Sequence[str], dtype: torch.dtype
) -> DraftBatch:
    """One pack of whole documents, B = 1; columns that are not asked for are zero."""
    lengths = [int(dataset.lengths[row]) for row in rows]
    width = sum(lengths)
    stored = {c.name: c.width for c in dataset.manifest.columns}
    out: dict[str, Tensor] = {
        "input_ids": torch.zeros(width, dtype=torch.long),
        "loss_mask": torch.zeros(width, dtype=torch.bool),
        "target_argmax": torch.zeros(width, dtype=torch.long),
    }
    for name in columns:
        if name not in out:
            size = stored[name]
            out[name] = torch.zeros(width if size is None else (width, size), dtype=dtype)
    start = 0
    for row in rows:
        start += dataset.read_into(row, out, start)
    document_ids, position_ids = row_layout([lengths], width)
    return DraftBatch(
        input_ids=out.pop("input_ids")[None],
        loss_mask=out.pop("loss_mask")[None],
        target_argmax=out.pop("target_argmax")[None],
        target_logsumexp=torch.zeros(1, width),
        position_ids=position_ids,
        document_ids=document_ids,
        hidden={name: values[None] for name, values in out.items()},
        rows=[list(rows)],
    )


def serving_sums(batch: DraftBatch, chains: Tensor) -> ServingSums:
    """Sums of every document of a batch, given the chains [B, T, S] drafted at its slots."""
    ids, mask, best, documents = (
        t.cpu().numpy()
        for t in (batch.input_ids, batch.loss_mask, batch.target_argmax, batch.document_ids)
    )
    drafted = chains.cpu().numpy()
    total = ServingSums.zero(drafted.shape[-1])
    for b in range(len(ids)):
        for document in range(documents[b].max() + 1):
            own = documents[b] == document
            total += document_sums(drafted[b, own], ids[b, own], best[b, own], mask[b, own])
    return total


def _packs(dataset: HiddenStatesDataset, rows: Sequence[int]) -> Iterator[list[int]]:
    lengths = [int(dataset.lengths[row]) for row in rows]
    for pack in pack_documents(lengths, max(_PACK_TOKENS, max(lengths))):
        yield [rows[i] for i in pack]


@torch.inference_mode()
def evaluate_data(
    draft: Draft,
    path: Path,
    *,
    split: str,
    run: dict[str, Any] | None,
    depth: int,
    limit: int = 0,
) -> dict[str, Any]:
    """Figures of `draft` on the dataset at `path`, on the draft's device and in its dtype.

    The two go together, as `check_fit` says.
    """
    dataset = HiddenStatesDataset(path)
    columns = draft.columns(dataset.manifest.supervision)
    dataset = HiddenStatesDataset(path, columns=columns)
    rows, split = choose_documents(dataset, split, run, limit)
    weight = draft.embed_tokens.weight
    head = TargetHead.from_dataset(path, weight.dtype, weight.device)
    teacher_forced: dict[str, Tensor] = {}
    serving = ServingSums.zero(depth)
    with progress(total=len(rows), unit="documents", desc="data", leave=False) as bar:
        for pack in _packs(dataset, rows):
            batch = read_pack(dataset, pack, columns, weight.dtype).to(weight.device)
            sums = draft.loss(batch, head, draft.slot_counts(batch)).sums
            teacher_forced = add_sums([teacher_forced, sums])
            serving += serving_sums(batch, draft.chains(batch, head, depth))
            bar.update(len(pack))
            length = shown(serving.walk_figures().acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
    return {
        "path": str(path),
        "split": split,
        "documents": len(rows),
        "supervised_tokens": serving.tokens,
        "on_policy": serving.on_policy / max(serving.tokens, 1),
        "teacher_forced": draft.summarise(teacher_forced),
        "slots": asdict(serving.slot_figures()),
        "walk": asdict(serving.walk_figures()),
    }
