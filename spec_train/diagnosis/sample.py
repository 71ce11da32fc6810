"""The documents that a draft is tried on, with every state that a convention may ask for.

In: a dataset, and the target if it is given. Out: packs whose states can be read in another way.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_data.capture.evidence import target_states
from spec_data.models.families import block_count
from spec_data.shards.batch import DraftBatch
from spec_data.shards.errors import DatasetError, SpecDataError
from spec_data.shards.packing import shift_left
from spec_data.shards.pictures import images_of
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, layer_column
from spec_train.data.mixture import open_with_mask
from spec_train.drafts import Draft
from spec_train.drafts.teacher import LOGITS, TOPK
from spec_train.evaluation.on_dataset import choose_documents, measured_mask, packs_of, read_pack
from spec_train.evaluation.run_record import RunRecord
from spec_train.losses.head import TargetHead

LEAST_DOCUMENTS = 12
"""With fewer, no permutation test of some twenty conventions can be clear."""
LOGSUMEXP = "target_logsumexp"
_TOKEN_COLUMNS = ("input_ids", "loss_mask", "target_argmax")


class TooFewDocuments(SpecDataError):
    """A dataset has too few documents that can be measured."""


@dataclass(frozen=True)
class Reading:
    """How the states of a dataset are read: the column of each state of the draft, and the shift.

    Row t of a document has the states of token t + `shift`, those of layers times `factor`.
    """

    columns: tuple[str, ...]
    shift: int = 0
    factor: float = 1.0


@dataclass(frozen=True)
class Sample:
    """Some documents of a dataset, read once.

    Attributes:
        blocks: decoder blocks of the target; None: not known.
        columns: of states that can be read.
        teachers: columns of the batches that a loss reads beside the states; empty: none can be
            computed.
    """

    batches: tuple[DraftBatch, ...]
    head: TargetHead
    documents: int
    blocks: int | None
    columns: frozenset[str]
    teachers: tuple[str, ...] = ()

    def read(self, batch: DraftBatch, reading: Reading, draft: Draft) -> DraftBatch:
        """Return a batch whose states are those of `reading`, under the names of the draft."""
        hidden = {
            name: _scaled(
                _moved(batch.hidden[source], batch.document_ids, reading.shift),
                1.0 if source == FINAL else reading.factor,
            )
            for name, source in zip(draft.state_columns, reading.columns, strict=True)
        }
        taught = {name: batch.hidden[name] for name in self.teachers if name not in hidden}
        return dataclasses.replace(batch, hidden=hidden | taught)

    def shuffled(self) -> "Sample":
        """Return the same documents with the states of other tokens, by chance: a control."""
        generator = torch.Generator().manual_seed(0)

        def mixed(batch: DraftBatch) -> DraftBatch:
            order = torch.randperm(batch.input_ids.shape[1], generator=generator)
            hidden = {k: v[:, order.to(v.device)] for k, v in batch.hidden.items()}
            return dataclasses.replace(batch, hidden=hidden)

        return dataclasses.replace(self, batches=tuple(map(mixed, self.batches)))


def _scaled(states: Tensor, factor: float) -> Tensor:
    return states if factor == 1 else states * factor


def _moved(states: Tensor, document_ids: Tensor, shift: int) -> Tensor:
    """Return states [B, T, H] of the token `shift` later in the same document, zero without one."""
    back = shift < 0
    states, document_ids = (x.flip(1) if back else x for x in (states, document_ids))
    for _ in range(abs(shift)):
        states = shift_left(states, document_ids)
    return states.flip(1) if back else states


def read_sample(
    draft: Draft,
    dataset: HiddenStatesDataset,
    *,
    run: RunRecord | None,
    documents: int,
    target: Path | None,
    trust: bool = False,
) -> Sample:
    """Read documents with all captured states, on the device and in the dtype of the draft.

    Layers that the dataset lacks are computed with the target, if its directory is given.

    Raises:
        TooFewDocuments: they can decide nothing; none was read.
        DatasetError: there is nothing to measure.
        MissingError, TargetError: the target cannot be run.
    """
    policy = measured_mask(dataset, run, None)
    stored = [c.name for c in dataset.manifest.columns]
    layers = {layer_column(k) for k in dataset.manifest.layers}
    states = [name for name in stored if name in layers or name == FINAL]
    needed = draft.columns(dataset.manifest.supervision)
    inputs = (*_TOKEN_COLUMNS, *draft.state_columns, LOGSUMEXP)
    teachers = tuple(name for name in needed if name not in inputs)
    if FINAL in draft.state_columns:  # the teachers of an EAGLE-1/2 draft are what it reads
        teachers = ()
    columns = [*_TOKEN_COLUMNS, *dict.fromkeys((*states, *teachers))]
    columns += [LOGSUMEXP] if LOGSUMEXP in needed else []
    opened = open_with_mask(dataset.location, policy, columns)
    chosen = _chosen(opened, run, documents)
    if target is not None and (pictured := images_of(dataset)):  # the target would need the pixels
        chosen = [d for d in chosen if dataset.doc_ids[d] not in pictured]
    if len(chosen) < LEAST_DOCUMENTS:
        raise TooFewDocuments(f"{len(chosen)} can decide nothing")
    weight = draft.embed_tokens.weight
    batches = [
        read_pack(opened, pack, columns, weight.dtype).to(weight.device)
        for pack in packs_of(opened, chosen)
    ]
    blocks = block_count(dataset.target_config())
    if target is not None and blocks is not None:
        batches = _with_target_states(batches, target, blocks, trust)
    return Sample(
        batches=tuple(batches),
        head=TargetHead.from_dataset(dataset, weight.dtype, weight.device),
        documents=len(chosen),
        blocks=blocks,
        columns=frozenset(batches[0].hidden) - set(TOPK) - {LOGITS},
        teachers=teachers,
    )


def _chosen(dataset: HiddenStatesDataset, run: RunRecord | None, wanted: int) -> list[int]:
    """Return at most `wanted` documents: those that the run held out, on the data that it used.

    If these are too few, others are taken too: a wrong convention shows on them as well.
    """
    held_out = list[int]()
    with contextlib.suppress(DatasetError):  # none is held out
        held_out, _ = choose_documents(dataset, "auto", run)
    if len(held_out) >= LEAST_DOCUMENTS:
        return held_out[:wanted]
    others = set(choose_documents(dataset, "all", run)[0]) - set(held_out)
    return sorted(held_out + sorted(others)[: wanted - len(held_out)])


def _with_target_states(
    batches: Sequence[DraftBatch], target: Path, blocks: int, trust: bool
) -> list[DraftBatch]:
    """Add the states that a dataset does not have, computed by the target in float32."""
    spans = [
        (batch, batch.document_ids[0] == document)
        for batch in batches
        for document in range(int(batch.document_ids.max()) + 1)
    ]
    ids = [batch.input_ids[0, span].cpu() for batch, span in spans]
    hidden = {id(batch): dict(batch.hidden) for batch in batches}
    computed = target_states(target, ids, blocks, dtype="float32", trust=trust)
    for (batch, span), states in zip(spans, computed, strict=True):
        like = next(iter(batch.hidden.values()))
        found = {layer_column(layer): values for layer, values in states.layers.items()}
        for name, values in (found | {FINAL: states.final}).items():
            if name not in batch.hidden:
                column = hidden[id(batch)].setdefault(name, torch.zeros_like(like))
                column[0, span] = values.to(like)
    return [dataclasses.replace(batch, hidden=hidden[id(batch)]) for batch in batches]
