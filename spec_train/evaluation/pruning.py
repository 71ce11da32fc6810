"""`spec-train export --draft-vocab-size`: a trained draft with a smaller vocabulary, and its cost.

The rows of the draft's head are selected, so nothing is trained and no row changes. What it costs
is measured on a dataset: the supervised tokens that the smaller draft can never propose, and the
simulated acceptance of both drafts on the same documents.

V / Vd target / draft vocabulary.
"""

import copy
import dataclasses
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.models.devices import compute_dtype, usable_device
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.policy_masks import open_with_mask
from spec_train.data.token_counts import count_dataset, counts_from
from spec_train.drafts import Draft
from spec_train.drafts.vocabulary import choose_vocabulary, prune, require_vocabulary
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, measured_mask
from spec_train.evaluation.run_record import read_run
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import shown
from spec_train.options.command_options import ExportConfig

log = logging.getLogger(__name__)

DOCUMENTS = 512
"""Most documents on which the acceptance of the two drafts is simulated."""


@dataclass(frozen=True, kw_only=True)
class PruningCost:
    """What a smaller vocabulary costs; None: not measured, for want of --data."""

    tokens_before: int
    tokens: int
    coverage_before: float | None = None
    """Share of the supervised tokens of --data that the draft could propose."""
    coverage: float | None = None
    acceptance_before: float | None = None
    """Simulated acceptance length on `documents` documents of --data (its `split`)."""
    acceptance: float | None = None
    documents: int = 0
    split: str = ""

    def facts(self) -> dict[str, Any]:
        """Return the figures as plain values."""
        return asdict(self)

    def text(self) -> str:
        """Say what the smaller vocabulary costs."""
        lines = [f"vocabulary {self.tokens_before:,} -> {self.tokens:,} tokens"]
        if self.coverage is None or self.coverage_before is None:
            return f"{lines[0]}; pass --data DIR to measure what it costs"
        lost = self.coverage_before - self.coverage
        lines.append(
            f"supervised tokens that it holds: {self.coverage_before:.3%} -> {self.coverage:.3%} "
            f"({lost:.3%} lost)"
        )
        lines.append(
            f"simulated acceptance length: {shown(self.acceptance_before)} -> "
            f"{shown(self.acceptance)} ({self.documents:,} documents, {self.split})"
        )
        return "\n".join(lines)


def pruned(
    draft: Draft, config: ExportConfig, folder: Path, target: TargetFacts
) -> tuple[Draft, PruningCost]:
    """Return `draft`, read from `folder`, with the vocabulary that `config` asks for, and its cost.

    Raises:
        ConfigError: the draft has no more tokens than asked for.
        DraftError, DatasetError: draft, vocabulary and dataset do not fit together.
    """
    dataset = None if config.data is None else HiddenStatesDataset(config.data)
    if dataset is not None:
        for warning in check_fit(draft, dataset):
            log.warning("warning: %s", warning)
        run = read_run(Path(config.draft), folder)
        dataset = open_with_mask(dataset.path, measured_mask(dataset, run, None))
    counts = None if dataset is None else torch.from_numpy(count_dataset(dataset))
    require_vocabulary(draft)
    ids = _chosen(draft, config, _counts(draft, config, counts))
    if len(ids) == draft.config.draft_vocab_size:
        raise ConfigError(
            f"--draft {config.draft}: the vocabulary asked for is all of its {len(ids)} tokens; "
            "there is nothing to prune"
        )
    smaller = prune(draft, ids, _target_head(target, dataset))
    cost = PruningCost(tokens_before=draft.config.draft_vocab_size, tokens=len(ids))
    if counts is not None and dataset is not None:
        cost = _measured(cost, draft, smaller, counts, dataset, config, folder)
    return smaller, cost


def _counts(draft: Any, config: ExportConfig, counts: Tensor | None) -> Tensor | None:
    """Return the token counts to choose by, int64 [V]: of --draft-vocab-from, or of --data."""
    if config.draft_vocab_from is None:
        return counts
    tokenizer = draft.config.origin.get("tokenizer_hash")
    found = counts_from(config.draft_vocab_from, draft.config.vocab_size, tokenizer)
    return torch.from_numpy(found)


def _chosen(draft: Any, config: ExportConfig, counts: Tensor | None) -> Tensor:
    """Return the target ids to keep, int64 [Vd], ascending."""
    own, vocab = draft.draft_ids.cpu(), draft.config.vocab_size
    listed = draft.config.token_ids.values()
    special = [i for v in listed for i in (v if isinstance(v, list) else [v]) if 0 <= i < vocab]
    if config.draft_vocab is not None or counts is None:
        found = choose_vocabulary(config, vocab, None, special)
        return torch.arange(vocab) if found is None else found
    held = counts[own]  # rows that the draft does not have cannot be chosen
    if config.draft_vocab_coverage is not None:
        whole, part = int(counts.sum()), int(held.sum())
        share = config.draft_vocab_coverage * whole / max(part, 1)
        if share > 1:
            raise DraftError(
                f"--draft-vocab-coverage {config.draft_vocab_coverage:g}: the draft itself holds "
                f"only {part / max(whole, 1):.2%} of the supervised tokens"
            )
        config = dataclasses.replace(config, draft_vocab_coverage=share)
    rows = draft.draft_index.cpu()[special]
    found = choose_vocabulary(config, len(own), held, rows[rows >= 0].tolist())
    return own if found is None else own[found]


def _target_head(target: TargetFacts, dataset: HiddenStatesDataset | None) -> Tensor | None:
    """Return the target's LM head [V, H], from the dataset or the target, if one is known."""
    if dataset is not None:
        return TargetHead.from_dataset(dataset.path, manifest=dataset.manifest).head_weight
    return target.head


def _measured(
    cost: PruningCost,
    draft: Any,
    smaller: Any,
    counts: Tensor,
    dataset: HiddenStatesDataset,
    config: ExportConfig,
    folder: Path,
) -> PruningCost:
    """Return the cost with coverage and acceptance of both drafts on a dataset."""
    total = max(int(counts.sum()), 1)
    shares = [int(counts[d.draft_ids.cpu()].sum()) / total for d in (draft, smaller)]
    run = read_run(Path(config.draft), folder)
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
    lengths = [found["walk"]["acceptance_length"] for found in figures]
    return dataclasses.replace(
        cost,
        coverage_before=shares[0],
        coverage=shares[1],
        acceptance_before=lengths[0],
        acceptance=lengths[1],
        documents=figures[0]["documents"],
        split=figures[0]["split"],
    )
