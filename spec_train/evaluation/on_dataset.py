"""Acceptance of a draft on a dataset, without its target: teacher-forced and serving-like.

Teacher-forced metrics use the documents' own tokens at every depth, as training does. Serving-like
metrics let the draft continue with its own tokens and states (see simulation/simulated_decoding.py,
also for documents that the target did not write). Documents are read whole.

Shapes: B packs, T tokens of a pack of documents, S draft depths, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.even_sample import even_sample
from spec_data.shards.follow import FollowedDataset
from spec_data.shards.packing import pack_documents, row_layout, shift_left
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors
from spec_data.terminal.progress import progress
from spec_train.data.batch import DraftBatch
from spec_train.data.order import SPLIT_RULE, below_border
from spec_train.data.policy_masks import open_with_mask
from spec_train.data.splits import select
from spec_train.drafts import Draft
from spec_train.drafts.teacher import TOPK, missing_mass
from spec_train.formats.origin import origin_warnings, require_same_embedding
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import add_sums, shown, summarise_parts
from spec_train.simulation.breakdown import Breakdown
from spec_train.simulation.samples import token_texts, tokenizer_of
from spec_train.simulation.simulated_decoding import documents_of

_PACK_TOKENS = 2048
SAMPLES = 8
"""Documents, evenly spread, that are returned with every drafted token."""


def choose_documents(
    dataset: HiddenStatesDataset, split: str, run: dict[str, Any] | None, limit: int = 0
) -> tuple[list[int], str]:
    """Return the numbers of the documents to measure, and their split.

    The split is "validation", "train" or "all". `run` holds the facts of a run's fit.json and
    run.json (see run_record.py), None without a run. Documents without a supervised token that
    could be drafted are left out.

    Raises:
        ConfigError: a split is requested, but no run records how the documents were split.
        DatasetError: no document is left.
    """
    if split == "auto":
        same = run is not None and recorded_fingerprint(dataset, run) in run["datasets"]
        split = "validation" if same else "all"
    chosen = (dataset.supervised > 0) & (dataset.lengths > 2)
    if split != "all":
        if run is None:
            raise ConfigError(
                f"--split {split}: only a run directory (with fit.json) records which documents "
                "were held out; pass --draft RUN, or --split all"
            )
        if run["split_rule"] != SPLIT_RULE:
            raise ConfigError(
                f"--split {split}: the run held out documents by rule {run['split_rule']!r}, this "
                f"release uses {SPLIT_RULE!r} and cannot tell which they were; use --split all"
            )
        # The run selected documents by its own masks, which may not be those to measure with.
        own = dataset
        if run.get("mask") != getattr(dataset, "policy", None):
            own = open_with_mask(dataset.path, run.get("mask"))
        usable = select(own, run["seq_len"]).usable
        documents = np.flatnonzero(usable)
        held_out = np.zeros(len(dataset), dtype=bool)
        border, seed = run["split_border"], run["split_seed"]
        held_out[documents] = below_border(dataset.id_array, border, seed, among=documents)
        chosen &= held_out if split == "validation" else usable & ~held_out
    found = np.flatnonzero(chosen).tolist()
    if not found:
        raise DatasetError(
            f"{dataset.path}: no document to measure in split {split!r} of {len(dataset)}; "
            "try --split all"
        )
    return (found[:limit] if limit else found), split


def measured_mask(
    dataset: HiddenStatesDataset, run: dict[str, Any] | None, mask: str | None
) -> str | None:
    """Return the mask policy to measure with: `mask`, or the run's on its own data; None: stored.

    `run` is as for `choose_documents`.
    """
    if mask is not None or run is None or run.get("mask") is None:
        return mask
    same = recorded_fingerprint(dataset, run) in run["datasets"]
    return str(run["mask"]) if same else None


def recorded_fingerprint(dataset: HiddenStatesDataset, run: dict[str, Any]) -> str:
    """Return the fingerprint that a run recorded: of the generation plan if it used --follow."""
    followed = run.get("follow", False)
    return (FollowedDataset(dataset.path) if followed else dataset).manifest.fingerprint


def check_fit(draft: Draft, dataset: HiddenStatesDataset) -> list[str]:
    """Refuse a dataset of another target; return warnings about another version of the target.

    Raises:
        DraftError: sizes or embeddings differ, or a layer that the draft reads was not captured.
        DatasetError: it lacks the supervision that the draft needs.
    """
    manifest, config = dataset.manifest, draft.config
    type(draft).check_data(draft.options, manifest)
    missing = sorted(set(config.layers) - set(manifest.layers))
    if missing:
        raise DraftError(
            f"the draft reads layers {list(config.layers)}; {dataset.path} holds "
            f"{list(manifest.layers)}, without {missing}: generate the dataset with those layers"
        )
    check_sizes(draft, dataset)
    if not config.train_embeddings:
        embedding = load_head_tensors(dataset.path)["embed_tokens"]
        require_same_embedding(draft.embed_tokens.weight, embedding, "--draft", str(dataset.path))
    return origin_warnings(config.origin, manifest)


def check_sizes(draft: Draft, dataset: HiddenStatesDataset) -> None:
    """Refuse a dataset of a target with other sizes than the draft's.

    Raises:
        DraftError: the vocabulary or the hidden size differs.
    """
    manifest, config = dataset.manifest, draft.config
    for name, own, theirs in (
        ("vocabulary", config.vocab_size, manifest.vocab_size),
        ("hidden size", config.target_hidden_size, manifest.hidden_size),
    ):
        if own != theirs:
            raise DraftError(
                f"the draft is for a target of {name} {own}, {dataset.path} has {theirs}: the "
                "dataset was made with another target"
            )


def read_pack(
    dataset: HiddenStatesDataset,
    documents: Sequence[int],
    columns: Sequence[str],
    dtype: torch.dtype,
) -> DraftBatch:
    """Read one pack of complete documents, B = 1, T the sum of their lengths.

    Hidden states [1, T, H] have `dtype`. `loss_mask` (bool), `input_ids` and `target_argmax`
    (int64), all [1, T], are zero unless they are among `columns`. `target_logsumexp`, float32 [1,
    T], is None unless it is. The K logits of a top-k dataset and their ids keep their dtype.
    """
    lengths = [int(dataset.lengths[document]) for document in documents]
    width = sum(lengths)
    stored = {c.name: c for c in dataset.manifest.columns}
    out: dict[str, Tensor] = {
        "input_ids": torch.zeros(width, dtype=torch.long),
        "loss_mask": torch.zeros(width, dtype=torch.bool),
        "target_argmax": torch.zeros(width, dtype=torch.long),
    }
    for name in columns:
        if name not in out:
            size = stored[name].width
            exact = name in TOPK or name == "target_logsumexp"
            kind = stored[name].coder.logical if exact else dtype
            out[name] = torch.zeros(width if size is None else (width, size), dtype=kind)
    start = 0
    for document in documents:
        start += dataset.read_into(document, out, start)
    document_ids, position_ids = row_layout([lengths], width)
    logsumexp = out.pop("target_logsumexp", None)
    return DraftBatch(
        input_ids=out.pop("input_ids")[None],
        loss_mask=out.pop("loss_mask")[None],
        target_argmax=out.pop("target_argmax")[None],
        target_logsumexp=None if logsumexp is None else logsumexp[None],
        position_ids=position_ids,
        document_ids=document_ids,
        hidden={name: values[None] for name, values in out.items()},
        rows=[list(documents)],
    )


def _missing(batch: DraftBatch) -> Tensor:
    """Return the sum of the probability that K logits miss, and the number of slots, float64 [2].

    The slots are those whose next token is supervised. Both are 0 if the batch has other teachers.
    """
    if TOPK[1] not in batch.hidden or batch.target_logsumexp is None:
        return torch.zeros(2, dtype=torch.float64)
    slots = shift_left(batch.loss_mask, batch.document_ids)
    found = missing_mass(batch.hidden[TOPK[1]][slots], batch.target_logsumexp[slots])
    return torch.tensor([float(found.double().sum()), len(found)], dtype=torch.float64)


def _packs(dataset: HiddenStatesDataset, documents: Sequence[int]) -> Iterator[list[int]]:
    lengths = [int(dataset.lengths[document]) for document in documents]
    for pack in pack_documents(lengths, max(_PACK_TOKENS, max(lengths))):
        yield [documents[i] for i in pack]


@torch.inference_mode()
def evaluate_data(
    draft: Draft,
    path: Path,
    *,
    split: str,
    run: dict[str, Any] | None,
    depth: int,
    limit: int = 0,
    mask: str | None = None,
) -> dict[str, Any]:
    """Return the metrics of `draft` on the dataset at `path`, on the draft's device and dtype.

    `check_fit` must have accepted the two before. `mask` is a mask policy; None: that of the run on
    the run's own data, otherwise the stored masks.
    """
    dataset = HiddenStatesDataset(path)
    policy = measured_mask(dataset, run, mask)
    columns = draft.columns(dataset.manifest.supervision)
    dataset = open_with_mask(path, policy, columns)
    documents, split = choose_documents(dataset, split, run, limit)
    weight = draft.embed_tokens.weight
    head = TargetHead.from_dataset(dataset.path, weight.dtype, weight.device)
    teacher_forced: dict[str, Tensor] = {}
    missing = torch.zeros(2, dtype=torch.float64)  # sum over supervised slots, and their number
    breakdown = Breakdown(depth, even_sample(documents, SAMPLES))
    with progress(total=len(documents), unit="documents", desc="data", leave=False) as bar:
        for pack in _packs(dataset, documents):
            batch = read_pack(dataset, pack, columns, weight.dtype).to(weight.device)
            forced = draft.loss(batch, head, draft.slot_counts(batch)).sums
            teacher_forced = add_sums([teacher_forced, forced])
            missing += _missing(batch)
            chains = draft.chains(batch, head, depth, scored_only=True)
            for document, arrays in documents_of(batch, chains):
                breakdown.add(document, dataset.source_of(document), arrays)
            bar.update(len(pack))
            length = shown(breakdown.acceptance_length)
            bar.set_postfix_str(f"acceptance {length}", refresh=False)
    simulated = breakdown.figures()
    tokenizer = tokenizer_of(dataset.target_dir) if simulated["samples"] else None
    return {
        "path": dataset.place,
        "split": split,
        "mask": policy or dataset.manifest.mask,
        "teacher_forced": summarise_parts({"": teacher_forced}, draft.summarise),
        "missing_mass": float(missing[0] / missing[1]) if missing[1] else None,
        **simulated,
        "texts": token_texts(simulated["samples"], tokenizer),
    }
