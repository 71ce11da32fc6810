"""What is said of a step whose loss or gradient is not finite, so that its cause is found.

When a step's loss is read, its buffers already hold other documents, so the responsible micro-batch
is read from the dataset again, and run again up to the first module whose values are not finite. If
only the gradient of the whole step is not finite, its micro-batches run again one by one. With
several ranks, rank 0 does this for all: a micro-batch is the same on every rank.
"""

import hashlib
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from spec_train.data.batch import DraftBatch
from spec_train.data.mixture import Documents
from spec_train.data.order import Pack
from spec_train.data.stream import BatchStream
from spec_train.drafts import Draft
from spec_train.losses.head import TargetHead

# -- arithmetic of a run ---------------------------------------------------------------------------


def seed_place(seed: int, kind: str, epoch: int, number: int) -> None:
    """Seed torch for the micro-batch with `number` packs before it in the epoch.

    The numbers depend on nothing else than the run's `seed` and the split `kind`: no generator
    state is saved, and a micro-batch draws the same ones on any rank.
    """
    text = repr((seed, kind, epoch, number)).encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1)


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


# -- the cause -------------------------------------------------------------------------------------

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
    failed: FailedStep, draft: Draft, head: TargetHead, stream: BatchStream, seed: int
) -> str:
    """Return the message of the error to raise: which documents, states and module it was.

    `draft` holds the complete weights from before the step, `seed` is that of the run.
    """
    dataset, losses = stream.dataset, [loss for _, _, loss in failed.parts]
    modules: list[list[str]] = []
    norms: list[float] = []
    for first, packs, _ in failed.parts:
        seed_place(seed, "train", failed.epoch, first)
        with _non_finite_modules(draft) as found:
            norms.append(loss_and_norm(draft, head, stream.read(packs), failed.counts)[1])
        modules.append(found)
    wrong = [not math.isfinite(x) for x in losses]
    wrong = wrong if any(wrong) else [not math.isfinite(x) for x in norms]
    index = wrong.index(True) if any(wrong) else norms.index(max(norms))  # only the sum overflows
    batch = stream.read(failed.parts[index][1])
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    what = f"gradient norm is {failed.grad_norm}" if bad is None else f"loss is {bad}"
    rows = [document for pack in batch.rows for document in pack]
    names = [f"{dataset.id_array[row].as_py()} in {dataset.shard_of(row)}" for row in rows]
    more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    causes = _non_finite_states(batch, dataset)[:1] or ["Their stored states are finite"]
    weights = [name for name, p in draft.named_parameters() if not bool(p.isfinite().all())]
    causes += [f"the weights of {weights[0]} are not finite"] if weights else []
    causes += (
        [f"the first values that are not finite: {modules[index][0]}"] if modules[index] else []
    )
    return (
        f"step {failed.step} (epoch {failed.epoch}, batch {failed.batch}): the {what}; the step "
        f"was not applied. Documents of micro-batch {index + 1} of {len(losses)}: "
        f"{'; '.join(names[:_SHOWN])}{more}. {'; '.join(causes)}. Check the data with `spec-data "
        f"verify {dataset.path}`; if they are correct, lower --lr. The same command resumes from "
        "the last checkpoint and comes to this step again"
    )


def _non_finite_states(batch: DraftBatch, dataset: Documents) -> list[str]:
    """Return in words which stored states of a batch are not finite."""
    lines = []
    for b, pack in enumerate(batch.rows):
        for place, row in enumerate(pack):
            span = batch.document_ids[b] == place
            for name, values in batch.hidden.items():
                bad = (~values[b, span].flatten(1).isfinite()).any(-1).nonzero().flatten().tolist()
                if bad:
                    lines.append(
                        f"Stored states are not finite: {name} of {dataset.id_array[row].as_py()} "
                        f"at {len(bad)} tokens, first at token {bad[0]}"
                    )
    return lines


@contextmanager
def _non_finite_modules(model: nn.Module) -> Iterator[list[str]]:
    """Yield a list that collects, in order, the modules with values that are not finite."""
    modules: list[str] = []

    def hook(name: str, inputs: Any, output: Any) -> None:
        for what, values in (("input", inputs), ("output", output)):
            for x in tree_leaves(values):
                if isinstance(x, Tensor) and x.is_floating_point() and not bool(x.isfinite().all()):
                    modules.append(f"the {what} of {name}")

    handles = [
        module.register_forward_hook(lambda m, i, o, name=name: hook(name, i, o))
        for name, module in model.named_modules()
        if name
    ]
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()
