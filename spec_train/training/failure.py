"""The record of a step whose loss or gradient is not finite; `spec-train replay` runs it again.

    RUN/failed-step-<n>/config.json, model.safetensors   the draft before that step, in float32
    RUN/failed-step-<n>/batch.safetensors                the micro-batch, and the counts that divide
                                                         its loss
    RUN/failed-step-<n>/failure.json                     its documents, every option, the seed of
                                                         its random numbers, the head's checksum

When a step's loss is read, its buffers already hold other documents, so the micro-batch is read
from the dataset again. If only the gradient of the whole step is not finite, its micro-batches run
again one by one to find the responsible one. With several ranks, rank 0 does this for all: a
micro-batch is the same on every rank.
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
from spec_train.training.run_directory import RunDirectory

# -- arithmetic of a run ---------------------------------------------------------------------------


def place_seed(seed: int, kind: str, epoch: int, number: int) -> int:
    """Return the random seed of a micro-batch with `number` packs before it in the epoch.

    It depends on nothing else than the run's `seed` and the split `kind`: no generator state is
    saved, and a micro-batch draws the same numbers on any rank.
    """
    text = repr((seed, kind, epoch, number)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_place(seed: int, kind: str, epoch: int, number: int) -> None:
    """Seed torch for a micro-batch; arguments as for `place_seed`."""
    torch.manual_seed(place_seed(seed, kind, epoch, number))


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


def loss_and_norm(
    draft: Draft, head: TargetHead, batch: DraftBatch, counts: Tensor
) -> tuple[float, float]:
    """Return loss and gradient norm of one micro-batch; the gradient stays in the parameters."""
    device, dtype = head.head_weight.device, head.head_weight.dtype
    params = draft.trainable_parameters()
    for parameter in params:
        parameter.grad = None
    with arithmetic(device, dtype):
        loss = draft.loss(batch.to(device, dtype), head, counts).loss
    loss.backward()
    norm = nn.utils.get_total_norm([p.grad for p in params if p.grad is not None])
    return float(loss.detach()), float(norm)


# -- the record ------------------------------------------------------------------------------------

FAILURE, BATCH = "failure.json", "batch.safetensors"
STATES_TEXT = "{column} of {doc_id} at {tokens} tokens, first at token {first}"
_SHOWN = 8  # documents


@dataclass(frozen=True, kw_only=True)
class FailedStep:
    """A step of all ranks whose loss or gradient norm is not finite."""

    step: int  # from 1
    epoch: int
    batch: int  # of the epoch, from 0
    parts: list[tuple[int, list[Pack], float]]
    """Of each micro-batch: packs before it in the epoch, its packs, its loss."""
    grad_norm: float
    counts: Tensor  # slot counts of the whole step, float64 [S]


def describe_failure(
    failed: FailedStep,
    draft: Draft,
    head: TargetHead,
    stream: BatchStream,
    config: Training,
    directory: RunDirectory,
    stored: Draft,
) -> str:
    """Save the responsible micro-batch; return the message of the error to raise.

    `draft` and `stored`, its copy on the host, hold the complete weights from before the step.
    """
    dataset, losses = stream.dataset, [loss for _, _, loss in failed.parts]
    seeds = [place_seed(config.seed, "train", failed.epoch, first) for first, _, _ in failed.parts]
    index = _first_bad_part(failed, seeds, draft, head, stream)
    batch = stream.read(failed.parts[index][1])
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    what = f"gradient norm is {failed.grad_norm}" if bad is None else f"loss is {bad}"
    documents = document_table(batch, dataset)
    names = "; ".join("{doc_id} in {shard}".format(**document) for document in documents[:_SHOWN])
    if (more := len(documents) - _SHOWN) > 0:
        names += f"; and {more} more"
    states = "Their stored states are finite"
    if columns := non_finite_states(batch, documents):
        others = f", and {len(columns) - 1} more columns" if len(columns) > 1 else ""
        states = f"Stored states are not finite: {STATES_TEXT.format(**columns[0])}{others}"
    message = (
        f"step {failed.step} (epoch {failed.epoch}, batch {failed.batch}): the {what}; "
        f"the step was not applied. Documents of micro-batch {index + 1} of {len(losses)}: "
        f"{names}. {states}"
    )
    state = {
        "draft": draft.name,
        "step": failed.step,
        "epoch": failed.epoch,
        "batch": failed.batch,
        "micro_batch": index,
        "losses": [str(loss) for loss in losses],  # JSON has no nan
        "grad_norm": str(failed.grad_norm),
        "random_seed": seeds[index],
        "dtype": config.dtype,
        "config": to_dict(config),
        "options": to_dict(draft.options),
        "dataset": str(Path(dataset.path).absolute()),
        "head": head_hash(dataset.manifest),
        "documents": documents,
    }
    hidden = {f"states.{name}": values for name, values in batch.hidden.items()}
    tensors = batch.plain() | hidden | {"counts": failed.counts}

    def write(folder: Path) -> None:
        stored.save_pretrained(folder, torch.float32)
        on_host = {name: values.detach().cpu().contiguous() for name, values in tensors.items()}
        save_file(on_host, folder / BATCH)
        (folder / FAILURE).write_text(dump_json(state), encoding="utf-8")

    try:
        folder = directory.save_failure(failed.step, write)
    except (SpecDataError, OSError) as error:  # report the cause even if the record fails
        return f"{message}. It could not be saved for `spec-train replay`: {error}"
    return (
        f"{message}. Run it again with `spec-train replay {folder}`; check the data with "
        f"`spec-data verify {dataset.path}`; if the data is correct, lower --lr"
    )


def head_hash(manifest: Manifest) -> str | None:
    """Return the checksum of the target's head in a dataset; None if none is recorded."""
    record = manifest.files.get("target/head.safetensors")
    return None if record is None else record.sha256


def _first_bad_part(
    failed: FailedStep, seeds: list[int], draft: Draft, head: TargetHead, stream: BatchStream
) -> int:
    """Return the index of the first micro-batch whose loss or own gradient is not finite.

    If there is none (only the sum overflows), return the one with the largest gradient.
    """
    for i, (_, _, loss) in enumerate(failed.parts):
        if not math.isfinite(loss):
            return i
    norms: list[float] = []
    for seed, (_, packs, _) in zip(seeds, failed.parts, strict=True):
        torch.manual_seed(seed)
        norms.append(loss_and_norm(draft, head, stream.read(packs), failed.counts)[1])
        if not math.isfinite(norms[-1]):
            return len(norms) - 1
    return norms.index(max(norms))


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
) -> list[dict[str, Any]]:
    """Find stored states that are not finite.

    Returns:
        doc_id, shard, column, number of tokens and first token, of each document and column.
    """
    columns = []
    for document in documents:
        span = batch.document_ids[document["pack"]] == document["place"]
        for name, values in batch.hidden.items():
            states = values[document["pack"], span].reshape(document["tokens"], -1)
            bad = (~states.isfinite()).any(-1).nonzero().flatten().tolist()
            if bad:
                where = {"doc_id": document["doc_id"], "shard": document["shard"]}
                columns.append(where | {"column": name, "tokens": len(bad), "first": bad[0]})
    return columns
