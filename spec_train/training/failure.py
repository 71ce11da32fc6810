"""The record of a step whose loss or gradient is not finite; `spec-train replay` runs it again.

    RUN/failed-step-<n>/config.json, model.safetensors   the draft before that step, in float32
    RUN/failed-step-<n>/batch.safetensors                the micro-batch, and the counts that divide
                                                         its loss
    RUN/failed-step-<n>/failure.json                     its documents, every option, the seed of
                                                         its random numbers, the head's checksum

The directory is written completely or not at all. When a step's loss is read, its buffers already
hold other documents, so the micro-batch is read from the dataset again. If only the gradient of
the whole step is not finite, its micro-batches run again one by one to find the responsible one.
With several ranks, rank 0 does this for all: a micro-batch is the same on every rank.
"""

import hashlib
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from spec_data.shards.errors import SpecDataError
from spec_data.shards.files import dump_json
from spec_data.shards.schema import Manifest
from spec_data.terminal.config import to_dict
from spec_train.data.batch import DraftBatch
from spec_train.data.mixture import Documents
from spec_train.data.order import Pack
from spec_train.data.stream import BatchStream
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead
from spec_train.options.training import Training
from spec_train.training.saving import Saver

# -- seeds -----------------------------------------------------------------------------------------
# Random seeds of a run. A seed depends on the micro-batch's place, not on earlier draws.
#
# So no generator state is saved, and a micro-batch draws the same numbers on any rank.


def place_seed(seed: int, kind: str, epoch: int, number: int) -> int:
    """Return the seed of a micro-batch of the split `kind` with `number` packs before it in the
    epoch."""
    text = repr((seed, kind, epoch, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_place(seed: int, kind: str, epoch: int, number: int) -> None:
    """Seed torch for a micro-batch; arguments as for `place_seed`."""
    torch.manual_seed(place_seed(seed, kind, epoch, number))


# -- failure ---------------------------------------------------------------------------------------


FORMAT = 2  # since 2, target_logsumexp is there only where it was read
FAILURE, BATCH = "failure.json", "batch.safetensors"
HEAD_FILE = "target/head.safetensors"
_SHOWN = 8


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a failed step: the number of packs of its epoch before it, its packs, its
    loss."""

    number: int
    packs: list[Pack]
    loss: float


@dataclass(frozen=True)
class FailedStep:
    """A step of all ranks whose loss or gradient norm is not finite."""

    number: int  # of the step, from 1
    epoch: int
    index: int  # of the batch in the epoch
    parts: list[MicroBatch]
    grad_norm: float
    counts: Tensor  # slot counts of the whole step, float64 [S]

    @property
    def losses(self) -> list[float]:
        """Return the losses of the micro-batches."""
        return [part.loss for part in self.parts]

    def random_seed(self, part: int, seed: int) -> int:
        """Return the random seed of micro-batch `part` in a run with this `seed`."""
        return place_seed(seed, "train", self.epoch, self.parts[part].number)


def arithmetic(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the autocast context of a run in `dtype`; weights keep their dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def cast_draft(draft: Draft, dtype: torch.dtype) -> list[nn.Parameter]:
    """Cast trained parameters to fp32 and frozen ones to `dtype`; return the trained ones."""
    params = draft.trainable_parameters()
    trained = {id(p) for p in params}
    for parameter in draft.parameters():
        parameter.data = parameter.data.to(torch.float32 if id(parameter) in trained else dtype)
    return params


def describe_failure(
    failed: FailedStep,
    draft: Draft,
    head: TargetHead,
    stream: BatchStream,
    config: Training,
    saver: Saver,
) -> str:
    """Save the responsible micro-batch; return the message of the error to raise.

    `draft` and the draft of `saver` hold the complete weights from before the step.
    """
    dataset = stream.dataset
    index = _to_blame(failed, draft, head, stream, config.seed)
    batch = stream.read(failed.parts[index].packs)
    bad = [i for i, value in enumerate(failed.losses) if not math.isfinite(value)]
    what = f"loss is {failed.losses[bad[0]]}" if bad else f"gradient norm is {failed.grad_norm}"
    documents = document_table(batch, dataset)
    message = (
        f"step {failed.number} (epoch {failed.epoch}, batch {failed.index}): the {what}; "
        f"the step was not applied. Documents of micro-batch {index + 1} of "
        f"{len(failed.losses)}: {_named(documents)}. {_stored(batch, documents)}"
    )
    state = _state(failed, index, draft, config, dataset) | {"documents": documents}

    def write(folder: Path) -> None:
        saver.draft.save_pretrained(folder, torch.float32)
        save_file(_tensors(batch, failed.counts), folder / BATCH)
        (folder / FAILURE).write_text(dump_json(state), encoding="utf-8")

    try:
        folder = saver.failure(failed.number, write)
    except (SpecDataError, OSError) as error:  # report the cause even if the record fails
        return f"{message}. It could not be saved for `spec-train replay`: {error}"
    return (
        f"{message}. Run it again with `spec-train replay {folder}`; check the data with "
        f"`spec-data verify {dataset.path}`; if the data is correct, lower --lr"
    )


def _state(
    failed: FailedStep, index: int, draft: Draft, config: Training, dataset: Documents
) -> dict[str, Any]:
    """Return the contents of failure.json for micro-batch `index`, except its documents."""
    return {
        "format": FORMAT,
        "draft": draft.name,
        "step": failed.number,
        "epoch": failed.epoch,
        "batch": failed.index,
        "micro_batch": index,
        "losses": [str(value) for value in failed.losses],  # JSON has no nan
        "grad_norm": str(failed.grad_norm),
        "seed": config.seed,
        "random_seed": failed.random_seed(index, config.seed),
        "dtype": config.dtype,
        "config": to_dict(config),
        "options": to_dict(draft.options),
        "dataset": str(Path(dataset.path).absolute()),
        "fingerprint": dataset.manifest.fingerprint,
        "head": head_hash(dataset.manifest),
    }


def head_hash(manifest: Manifest) -> str | None:
    """Return the checksum of the target's head in a dataset; None if none is recorded."""
    record = manifest.files.get(HEAD_FILE)
    return None if record is None else record.sha256


def _to_blame(
    failed: FailedStep, draft: Draft, head: TargetHead, stream: BatchStream, seed: int
) -> int:
    """Return the index of the first micro-batch whose loss or own gradient is not finite.

    If there is none (only the sum overflows), return the one with the largest gradient.
    """
    for i, loss in enumerate(failed.losses):
        if not math.isfinite(loss):
            return i
    norms = []
    for i, part in enumerate(failed.parts):
        torch.manual_seed(failed.random_seed(i, seed))
        norm = gradient_norm(draft, head, stream.read(part.packs), failed.counts)
        norms.append(norm)
        if not math.isfinite(norm):
            break
    return max(range(len(norms)), key=lambda i: math.inf if norms[i] != norms[i] else norms[i])


def gradient_norm(draft: Draft, head: TargetHead, batch: DraftBatch, counts: Tensor) -> float:
    """Return the gradient norm of one micro-batch; the gradient stays in the parameters."""
    device, dtype = head.head_weight.device, head.head_weight.dtype
    params = draft.trainable_parameters()
    for parameter in params:
        parameter.grad = None
    with arithmetic(device, dtype):
        result = draft.loss(batch.to(device, dtype), head, counts)
    result.loss.backward()
    return float(nn.utils.get_total_norm([p.grad for p in params if p.grad is not None]))


def document_table(batch: DraftBatch, dataset: Documents) -> list[dict[str, Any]]:
    """Return id, shard, tokens and place in the batch of every document, pack by pack."""
    return [
        {
            "pack": b,
            "place": d,
            "doc_id": dataset.id_array[document].as_py(),
            "shard": dataset.shard_of(document),
            "tokens": int((batch.document_ids[b] == d).sum()),
        }
        for b, pack in enumerate(batch.rows)
        for d, document in enumerate(pack)
    ]


def non_finite_states(
    batch: DraftBatch, documents: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], str, int, int]]:
    """Find stored states that are not finite.

    Returns:
        (document, column, number of tokens, first token) for each document and column with any.
    """
    found = []
    for document in documents:
        span = batch.document_ids[document["pack"]] == document["place"]
        for name, values in batch.hidden.items():
            own = values[document["pack"], span].reshape(document["tokens"], -1)
            bad = (~own.isfinite()).any(-1).nonzero().flatten().tolist()
            if bad:
                found.append((document, name, len(bad), bad[0]))
    return found


def _named(documents: Sequence[dict[str, Any]]) -> str:
    """Return the ids of the first few documents, grouped by shard."""
    shards: dict[str, list[str]] = {}
    for document in documents[:_SHOWN]:
        shards.setdefault(document["shard"], []).append(document["doc_id"])
    text = "; ".join(f"{', '.join(ids)} in {shard}" for shard, ids in shards.items())
    more = len(documents) - _SHOWN
    return text + (f"; and {more} more" if more > 0 else "")


def _stored(batch: DraftBatch, documents: Sequence[dict[str, Any]]) -> str:
    bad = non_finite_states(batch, documents)
    if not bad:
        return "Their stored states are finite"
    document, column, tokens, first = bad[0]
    return (
        f"Stored states are not finite: {column} of {document['doc_id']} at {tokens} tokens, first "
        f"at token {first}" + (f", and {len(bad) - 1} more columns" if len(bad) > 1 else "")
    )


def _tensors(batch: DraftBatch, counts: Tensor) -> dict[str, Tensor]:
    states = {f"states.{name}": values for name, values in batch.hidden.items()}
    tensors = batch.plain() | states | {"counts": counts}
    return {name: values.detach().cpu().contiguous() for name, values in tensors.items()}
