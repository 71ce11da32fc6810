"""`spec-train export --draft-vocab-size`: a trained draft with a smaller vocabulary, and its cost.

The rows of the draft's head are selected, so nothing is trained and no row changes. What it costs
is measured on a dataset: the supervised tokens that the smaller draft can never propose, and the
simulated acceptance of both drafts on the same documents.

V / Vd target / draft vocabulary.
"""

import copy
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.models.devices import compute_dtype, usable_device
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.policy_masks import open_with_mask
from spec_train.data.token_counts import count_dataset
from spec_train.drafts import Draft
from spec_train.drafts.vocabulary import (
    choose_draft_vocabulary,
    prune,
    require_vocabulary,
    smallest_vocabulary,
)
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, measured_mask
from spec_train.evaluation.run_record import read_run
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import shown

log = logging.getLogger(__name__)

DOCUMENTS = 512
"""Most documents on which the acceptance of the two drafts is simulated."""


@dataclass(frozen=True)
class SmallerVocabulary:
    """How a smaller vocabulary is chosen: by size or by coverage, with counts of a dataset."""

    data: str
    size: int | None = None
    coverage: float | None = None

    def words(self) -> list[str]:
        """Return the options of `export` that say so."""
        words = [] if self.size is None else ["--draft-vocab-size", str(self.size)]
        words += [] if self.coverage is None else ["--draft-vocab-coverage", str(self.coverage)]
        return [*words, "--data", self.data]


@dataclass(frozen=True, kw_only=True)
class PruningCost:
    """What a smaller vocabulary costs."""

    tokens_before: int
    tokens: int
    coverage_before: float
    """Share of the supervised tokens of the dataset that the draft could propose."""
    coverage: float
    acceptance_before: float
    """Simulated acceptance length on `documents` documents of the dataset (its `split`)."""
    acceptance: float
    documents: int
    split: str

    def text(self) -> str:
        """Say what the smaller vocabulary costs."""
        lost = self.coverage_before - self.coverage
        return (
            f"vocabulary {self.tokens_before:,} -> {self.tokens:,} tokens\n"
            f"supervised tokens that it holds: {self.coverage_before:.3%} -> {self.coverage:.3%} "
            f"({lost:.3%} lost)\n"
            f"simulated acceptance length: {shown(self.acceptance_before)} -> "
            f"{shown(self.acceptance)} ({self.documents:,} documents, {self.split})"
        )


def pruned(
    draft: Draft, path: Path, folder: Path, vocabulary: SmallerVocabulary
) -> tuple[Draft, PruningCost]:
    """Return a draft with a smaller vocabulary, and its cost.

    Args:
        draft: it was read from `folder`, to which `path` led.
        path: a run, or the same folder.
        folder: a draft directory.
        vocabulary: how it is chosen.

    Raises:
        ConfigError: the draft has no more tokens than asked for.
        DraftError, DatasetError: draft, vocabulary and dataset do not fit together.
    """
    dataset = HiddenStatesDataset(vocabulary.data)
    for warning in check_fit(draft, dataset):
        log.warning("warning: %s", warning)
    run = read_run(path, folder)
    dataset = open_with_mask(dataset.path, measured_mask(dataset, run, None))
    counts = torch.from_numpy(count_dataset(dataset))
    require_vocabulary(draft)
    ids = _chosen(draft, vocabulary, counts)
    if len(ids) == draft.config.draft_vocab_size:
        raise ConfigError(
            f"--draft {path}: the vocabulary asked for is all of its {len(ids)} tokens; there is "
            "nothing to prune"
        )
    head = TargetHead.from_dataset(dataset.path, manifest=dataset.manifest).head_weight
    smaller = prune(draft, ids, head)
    return smaller, _measured(draft, smaller, counts, dataset, run)


def _chosen(draft: Any, vocabulary: SmallerVocabulary, counts: Tensor) -> Tensor:
    """Return the target ids to keep, int64 [Vd], ascending; `counts` int64 [V]."""
    own, vocab = draft.draft_ids.cpu(), draft.config.vocab_size
    listed = draft.config.token_ids.values()
    special = [i for v in listed for i in (v if isinstance(v, list) else [v]) if 0 <= i < vocab]
    rows = draft.draft_index.cpu()[special]
    rows = rows[rows >= 0].tolist()
    held = counts[own]  # rows that the draft does not have cannot be chosen
    if vocabulary.coverage is None:
        size = vocabulary.size or 0
        return own if size >= len(own) else own[choose_draft_vocabulary(held, size, rows)]
    total, part = int(counts.sum()), int(held.sum())
    share = vocabulary.coverage * total / max(part, 1)
    if share > 1:
        raise DraftError(
            f"--draft-vocab-coverage {vocabulary.coverage:g}: the draft itself holds only "
            f"{part / max(total, 1):.2%} of the supervised tokens"
        )
    return own[smallest_vocabulary(held, share, rows)]


def _measured(
    draft: Any, smaller: Any, counts: Tensor, dataset: HiddenStatesDataset, run: Any
) -> PruningCost:
    """Return the cost: coverage and acceptance of both drafts on a dataset."""
    total = max(int(counts.sum()), 1)
    shares = [int(counts[d.draft_ids.cpu()].sum()) / total for d in (draft, smaller)]
    device = usable_device("auto")
    figures = []
    for one in (draft, smaller):
        # a copy: the files keep the dtype of the draft
        measured = copy.deepcopy(one).to(device, compute_dtype("auto", device)).eval()
        figures.append(
            evaluate_data(
                measured, dataset.path, split="auto", run=run, depth=one.depth, limit=DOCUMENTS
            )
        )
    lengths = [found["simulated"]["acceptance_length"] for found in figures]
    return PruningCost(
        tokens_before=draft.config.draft_vocab_size,
        tokens=smaller.config.draft_vocab_size,
        coverage_before=shares[0],
        coverage=shares[1],
        acceptance_before=lengths[0],
        acceptance=lengths[1],
        documents=figures[0]["documents"],
        split=figures[0]["split"],
    )
