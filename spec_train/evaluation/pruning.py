"""`spec-train export --draft-vocab-size`: a trained draft with a smaller vocabulary, and its cost.

Rows of the draft's head, and of what else has a row per draft token, are kept or dropped; none
changes, and nothing is trained. What it costs is measured on a dataset: the supervised tokens that
the smaller draft can never propose, and the simulated acceptance of both on the same documents.

V / Vd target / draft vocabulary, H hidden size.
"""

import copy
import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_data.models.devices import compute_dtype, use_device
from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.given import changed
from spec_train.data.mixture import count_dataset, open_with_mask
from spec_train.drafts import Draft
from spec_train.drafts.vocabulary import choose_draft_vocabulary, smallest_vocabulary
from spec_train.evaluation.on_dataset import check_fit, evaluate_data, measured_mask, sample_of
from spec_train.evaluation.run_record import read_run
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import shown

log = logging.getLogger(__name__)

DOCUMENTS = 512
"""Most documents on which the acceptance of the two drafts is simulated."""
_HEAD = "lm_head.weight"


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
    acceptance_before: float | None
    """Simulated acceptance length on `documents` documents of the dataset (its `split`)."""
    acceptance: float | None
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
    require_vocabulary(draft)
    dataset = HiddenStatesDataset(vocabulary.data)
    for warning in check_fit(draft, dataset):
        log.warning("warning[eval]: %s", warning)
    run = read_run(path, folder)
    masked = open_with_mask(dataset.location, measured_mask(dataset, run, None))
    counts = torch.from_numpy(count_dataset(masked))
    ids = _chosen(draft, vocabulary, counts)
    if len(ids) == draft.config.draft_vocab_size:
        raise ConfigError(
            f"--draft {path}: the vocabulary asked for is all of its {len(ids)} tokens; there is "
            "nothing to prune"
        )
    smaller = prune(draft, ids, TargetHead.from_dataset(dataset))
    total = max(int(counts.sum()), 1)
    shares = [int(counts[d.draft_ids.cpu()].sum()) / total for d in (draft, smaller)]
    sample = sample_of(draft, Path(vocabulary.data), split="auto", run=run, limit=DOCUMENTS)
    device, lengths = use_device("auto"), []
    for one in (draft, smaller):
        # a copy: the files keep the dtype of the draft
        measured = copy.deepcopy(one).to(device, compute_dtype("auto", device)).eval()
        found = evaluate_data(measured, sample, one.depth)
        lengths.append(found["simulated"]["acceptance_length"])
    return smaller, PruningCost(
        tokens_before=draft.config.draft_vocab_size,
        tokens=len(ids),
        coverage_before=shares[0],
        coverage=shares[1],
        acceptance_before=lengths[0],
        acceptance=lengths[1],
        documents=len(sample.documents),
        split=sample.split,
    )


def require_vocabulary(draft: Draft) -> None:
    """Refuse a draft that has no vocabulary of its own.

    Raises:
        DraftError: it is one of EAGLE-1/2 or MTP.
    """
    if "draft_vocab_size" not in draft.options.values():
        raise DraftError(
            f"{draft.name} drafts use the target's head and propose every token; they have no "
            "vocabulary to prune. Leave --draft-vocab-size and --draft-vocab-coverage out"
        )


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
            f"{part / max(total, 1):.2%} of the supervised tokens of {vocabulary.data}"
        )
    return own[smallest_vocabulary(held, share, rows)]


@torch.no_grad()
def prune(draft: Any, ids: Tensor, head: TargetHead) -> Any:
    """Return a copy of a draft that can propose only the tokens `ids`.

    The logits of its head are those of the draft at these tokens, bit for bit.

    Args:
        draft: of any kind that has a vocabulary.
        ids: target ids, int64 [Vd], ascending.
        head: the target's, which block drafts of the whole vocabulary use.

    Raises:
        DraftError: the draft cannot propose all of `ids`, or parts of it cannot lose rows.
    """
    require_vocabulary(draft)
    rows = draft.draft_index[ids.to(draft.draft_index.device)].cpu()
    if unknown := int((rows < 0).sum()):
        raise DraftError(
            f"{unknown} of the {len(ids)} tokens are not among the {draft.config.draft_vocab_size} "
            "that the draft can propose; a trained draft can only lose tokens"
        )
    config = dataclasses.replace(draft.config, draft_vocab_size=len(ids))
    unset = dict.fromkeys(("draft_vocab", "draft_vocab_coverage"))
    options = changed(draft.options, draft_vocab_size=len(ids), **unset)
    smaller = type(draft)(config, options)
    tensors = {name: value.cpu() for name, value in draft.state_dict().items()}
    if _HEAD not in tensors:
        rows_of_all = head.head_weight.cpu() * draft.head_scale(head)
        tensors[_HEAD] = rows_of_all.to(draft.fc.weight.dtype)
    kept = {
        name: _rows(tensors[name], tuple(value.shape), rows, name)
        for name, value in smaller.state_dict().items()
    }
    smaller.to(draft.fc.weight.device, draft.fc.weight.dtype)
    smaller.load_state_dict(kept)
    if not smaller.full_vocabulary:
        smaller.set_vocabulary(ids)
    return smaller.train(draft.training)


def _rows(value: Tensor, wanted: tuple[int, ...], rows: Tensor, name: str) -> Tensor:
    """Return a tensor as it is, or the part of its draft tokens `rows`, of the shape `wanted`."""
    differing = [d for d, (a, b) in enumerate(zip(value.shape, wanted, strict=True)) if a != b]
    if not differing:
        return value
    if len(differing) > 1 or wanted[differing[0]] != len(rows):
        raise DraftError(
            f"{name}: its shape {list(value.shape)} follows from the vocabulary in "
            "another way than a row per token; such a draft cannot be pruned"
        )
    return value.index_select(differing[0], rows).contiguous()
