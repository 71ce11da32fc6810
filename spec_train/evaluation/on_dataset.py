"""Acceptance of a draft on a dataset, without its target: teacher-forced and serving-like.

Teacher-forced metrics use the documents' own tokens at every depth, as training does. Serving-like
metrics let the draft continue with its own tokens and states (see simulation/simulated_decoding.py,
also for documents that the target did not write). Documents are read whole.

Shapes: B packs, T tokens of a pack of documents, S draft depths, V vocabulary.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.packing import even_sample, pack_documents
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.terminal.progress import progress
from spec_train.data.mixture import open_with_mask
from spec_train.data.order import SPLIT_BY_TOKENS, SPLIT_RULE, shared
from spec_train.data.splits import select
from spec_train.data.stream import read_packs
from spec_train.drafts import Draft
from spec_train.evaluation.run_record import RunRecord
from spec_train.formats.origin import origin_warnings, require_same_embedding
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import add_sums, shown, summarise_parts
from spec_train.simulation.breakdown import Breakdown
from spec_train.simulation.modes import DocumentModes
from spec_train.simulation.samples import token_texts, tokenizer_of
from spec_train.simulation.simulated_decoding import documents_of

log = logging.getLogger(__name__)

PACK_TOKENS = 2048
SAMPLES = 8
"""Documents, evenly spread, that are returned with every drafted token."""


def choose_documents(
    dataset: HiddenStatesDataset,
    split: str,
    run: RunRecord | None,
    limit: int = 0,
    trained_on: str | None = None,
) -> tuple[list[int], str]:
    """Return the numbers of the documents to measure, and their split.

    The split is "validation", "train" or "all". `run` is None without a run; then `trained_on`
    is the fingerprint that the draft itself names. Documents without a supervised token that could
    be drafted are left out. A document whose prompt is in no data of the runs is new, and measured
    with those held out. What any of the runs has learned is not held out, nor another answer to a
    prompt of it.

    Raises:
        ConfigError: a split is requested, but no run records how the documents were split.
        DatasetError: no document is left.
    """
    runs = _runs(run)
    run, auto = run_on(dataset, run), split == "auto"
    if auto:
        same = run is not None and _overlaps(dataset, run)
        split = "validation" if same else "all"
        if run is None and trained_on == dataset.manifest.fingerprint:
            log.warning(
                "warning[eval]: the draft was trained on this dataset, and only its run records "
                "which documents it held out: all are measured. Pass --draft RUN"
            )
    usable = (dataset.supervised > 0) & (dataset.lengths > 2)
    chosen = usable
    if split != "all":
        if run is None:
            raise ConfigError(
                f"--split {split}: only a run directory (with fit.json) records which documents "
                "were held out; pass --draft RUN, or --split all"
            )
        here = [one for one in runs if one is run or _overlaps(dataset, one)]
        sides = [_sides(dataset, one, split) for one in here]
        held_out = np.any([side for side, _ in sides], axis=0)
        learned = np.any([side for _, side in sides], axis=0)
        new = ~np.any([_had(dataset, one) for one in runs], axis=0)
        chosen = usable & ((held_out | new) & ~learned if split == "validation" else learned)
        nothing = not run.split_border or (held_out & learned).any()
        if auto and nothing and not chosen.any():
            split, chosen = "all", usable
            log.warning("warning[eval]: nothing is held out: the draft has learned these documents")
    numbers = np.flatnonzero(chosen).tolist()
    if not numbers:
        raise DatasetError(
            f"{dataset.path}: no document to measure in split {split!r} of {len(dataset)}; "
            "try --split all"
        )
    return (numbers[:limit] if limit else numbers), split


def _sides(
    dataset: HiddenStatesDataset, run: RunRecord, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Return which documents a run held out, and which it learned, bool [N] each.

    Raises:
        ConfigError: it held out documents by another rule; `split` is what was asked for.
    """
    if run.split_rule not in (SPLIT_RULE, SPLIT_BY_TOKENS):
        raise ConfigError(
            f"--split {split}: the run held out documents by rule {run.split_rule!r}, this "
            f"release uses {SPLIT_RULE!r} and cannot tell which they were; use --split all"
        )
    # The run selected documents by its own masks, which may not be those to measure with.
    trained = dataset
    if run.mask != getattr(dataset, "policy", None):
        trained = open_with_mask(dataset.location, run.mask)
    usable = select(trained, run.seq_len).usable
    held_out = usable & run.held_out.below(dataset, run.split_seed)
    return held_out, usable & ~held_out & _had(dataset, run)


def _had(dataset: HiddenStatesDataset, run: RunRecord) -> np.ndarray:
    """Return which documents the data of a run have, bool [N], as `_known`.

    All, if some of the data is not readable.
    """
    readable = 0 < len(run.ids) == len(run.datasets)
    return _known(dataset, run) if readable else np.ones(len(dataset), dtype=bool)


def _known(dataset: HiddenStatesDataset, run: RunRecord) -> np.ndarray:
    """Return which documents the readable data of a run have, bool [N], by the run's own rule.

    Those are answers to a prompt of the data; in runs of earlier releases the documents themselves.
    """
    if run.split_rule != SPLIT_RULE or not run.parts:
        return shared(dataset.id_array, run.ids)
    rule = run.held_out
    return np.isin(rule.keys(dataset), np.concatenate([rule.keys(p) for p in run.parts]))


def run_on(dataset: HiddenStatesDataset, run: RunRecord | None) -> RunRecord | None:
    """Return the run whose data a dataset is, of a run and of those that it began from."""
    return next((one for one in _runs(run) if _overlaps(dataset, one)), run)


def _runs(run: RunRecord | None) -> list[RunRecord]:
    return [] if run is None else [run, *run.earlier]


def _overlaps(dataset: HiddenStatesDataset, run: RunRecord) -> bool:
    """Return whether a dataset is one of the run's, or has prompts of one, also captured anew."""
    of_run = {*run.datasets, *run.made_of}
    own = {recorded_fingerprint(dataset, run), *dataset.manifest.ancestors()}
    if not of_run.isdisjoint(own):
        return True
    return bool(_known(dataset, run).any())


def measured_mask(
    dataset: HiddenStatesDataset, run: RunRecord | None, mask: str | None
) -> str | None:
    """Return the mask policy to measure with: `mask`, or the run's on its own data; None: stored.

    `run` is as for `choose_documents`.
    """
    run = run_on(dataset, run)
    if mask is not None or run is None or run.mask is None:
        return mask
    same = recorded_fingerprint(dataset, run) in run.datasets
    return str(run.mask) if same else None


def recorded_fingerprint(dataset: HiddenStatesDataset, run: RunRecord) -> str:
    """Return the fingerprint that a run recorded: of the generation plan if it used --follow.

    A view and a remote dataset have no plan, so they are other data than such a run's.
    """
    planned = run.follow and dataset.view is None and dataset.mirror is None
    return (FollowedDataset(dataset.path) if planned else dataset).manifest.fingerprint


def check_fit(draft: Draft, dataset: HiddenStatesDataset) -> list[str]:
    """Refuse a dataset of another target; return warnings about another version of the target.

    Raises:
        DraftError: sizes or embeddings differ, or a layer that the draft reads was not captured.
        DatasetError: it lacks the supervision that the draft needs.
    """
    manifest, config = dataset.manifest, draft.config
    if manifest.supervision.startswith("topk") and getattr(draft.options, "penalty_weight", False):
        # of LiLiCorr's loss in training; it decides no token
        draft.use_options(dataclasses.replace(draft.options, penalty_weight=0.0))
    type(draft).check_data(draft.options, manifest)
    missing = sorted(set(config.layers) - set(manifest.layers))
    if missing:
        raise DraftError(
            f"the draft reads layers {list(config.layers)}; {dataset.path} holds "
            f"{list(manifest.layers)}, without {missing}: generate the dataset with those layers"
        )
    check_sizes(draft, manifest.vocab_size, manifest.hidden_size, str(dataset.path))
    if not config.train_embeddings:
        embedding = load_head_tensors(dataset)["embed_tokens"]
        require_same_embedding(draft.embed_tokens.weight, embedding, "--draft", str(dataset.path))
    return origin_warnings(config.origin, manifest)


def check_sizes(draft: Draft, vocabulary: int, hidden_size: int, where: str) -> None:
    """Refuse a target, that of `where`, with other sizes than the draft's.

    Raises:
        DraftError: the vocabulary or the hidden size differs.
    """
    for name, size, other in (
        ("vocabulary", draft.config.vocab_size, vocabulary),
        ("hidden size", draft.config.target_hidden_size, hidden_size),
    ):
        if size != other:
            raise DraftError(
                f"the draft is for a target of {name} {size}, {where} has {other}: it was fitted "
                "to another target"
            )


def read_pack(
    dataset: HiddenStatesDataset,
    documents: Sequence[int],
    columns: Sequence[str],
    dtype: torch.dtype,
) -> DraftBatch:
    """Read one pack of complete documents, as `read_packs`: B = 1, T the sum of their lengths."""
    width = int(dataset.lengths[list(documents)].sum())
    return read_packs(dataset, [list(documents)], columns, width, dtype)


def packs_of(dataset: HiddenStatesDataset, documents: Sequence[int]) -> Iterator[list[int]]:
    """Yield packs of complete documents, of at most PACK_TOKENS tokens or of one document."""
    lengths = dataset.lengths[list(documents)].tolist()
    for pack in pack_documents(lengths, max(PACK_TOKENS, max(lengths))):
        yield [documents[i] for i in pack]


@dataclasses.dataclass(frozen=True)
class Sample:
    """The documents of a dataset, with its masks, that are measured."""

    dataset: HiddenStatesDataset
    documents: list[int]
    split: str
    mask: str | None


def sample_of(
    draft: Draft,
    path: Path,
    *,
    split: str,
    run: RunRecord | None,
    limit: int = 0,
    mask: str | None = None,
) -> Sample:
    """Return what is to be measured of the dataset at `path`.

    `mask` is a mask policy; None: that of the run on the run's own data, otherwise the stored
    masks. Errors are those of `choose_documents` and `open_with_mask`.
    """
    dataset = HiddenStatesDataset(path)
    policy = measured_mask(dataset, run, mask)
    dataset = open_with_mask(path, policy, draft.columns(dataset.manifest.supervision))
    trained_on = (draft.config.origin or {}).get("dataset_fingerprint")
    documents, split = choose_documents(dataset, split, run, limit, trained_on)
    return Sample(dataset, documents, split, policy or dataset.manifest.mask)


@torch.no_grad()  # not inference_mode, in which chains are not compiled (`attention.fused`)
def evaluate_data(draft: Draft, sample: Sample, depth: int) -> dict[str, Any]:
    """Return the metrics of `draft` on a sample, on the draft's device and dtype.

    `check_fit` must have accepted the two before.
    """
    dataset, documents = sample.dataset, sample.documents
    columns = draft.columns(dataset.manifest.supervision)
    weight = draft.embed_tokens.weight
    head = TargetHead.from_dataset(dataset, weight.dtype, weight.device)
    teacher_forced: dict[str, Tensor] = {}
    breakdown = Breakdown(depth, even_sample(documents, SAMPLES))
    tokenizer = tokenizer_of(dataset.target_dir)
    modes = DocumentModes(dataset, tokenizer)
    with (
        torch.random.fork_rng(devices=[]),  # block drafts draw anchors: the same in every call
        progress(total=len(documents), unit="documents", desc="data", leave=False) as bar,
    ):
        for number, pack in enumerate(packs_of(dataset, documents)):
            batch = read_pack(dataset, pack, columns, weight.dtype).to(weight.device)
            torch.manual_seed(number)
            counts = draft.slot_counts(batch)
            torch.manual_seed(number)
            forced = draft.scored(batch, head, counts).sums
            teacher_forced = add_sums([teacher_forced, forced])
            chains = draft.chains(batch, head, depth, scored_only=True)
            for document, arrays in documents_of(batch, chains):
                breakdown.add(
                    document, dataset.source_of(document), arrays, modes.of(document, arrays)
                )
            bar.update(len(pack))
            length = shown(breakdown.acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
    simulated = breakdown.figures()
    return {
        "path": dataset.location,
        "split": sample.split,
        "mask": sample.mask,
        "teacher_forced": summarise_parts({"": teacher_forced}, draft.summarise),
        **simulated,
        "texts": token_texts(simulated["samples"], tokenizer),
    }
