"""The loss of a micro-batch: its dtype, its random numbers, its part in the step of all ranks."""

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.batch import DraftBatch
from spec_train.data.seeds import batch_seed
from spec_train.data.stream import Step
from spec_train.data.upload import Uploads
from spec_train.drafts import Draft
from spec_train.drafts.output import Connected
from spec_train.losses.head import TargetHead


def seed_micro_batch(seed: int, split: str, epoch: int, number: int) -> None:
    """Seed torch for the micro-batch with `number` packs before it in the epoch."""
    torch.manual_seed(batch_seed(seed, split, epoch, number))


def arithmetic(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return the autocast context of a run in `dtype`; weights keep their dtype."""
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def cast_draft(
    draft: Draft, dtype: torch.dtype, saved: torch.dtype | None = None
) -> list[nn.Parameter]:
    """Cast trained parameters to fp32 and frozen ones to `dtype`; return the trained ones.

    Frozen ones are rounded to `saved` before, in which files have them: as they will be served.
    """
    params = draft.trainable_parameters()
    trained = {id(p) for p in params}
    for parameter in draft.parameters():
        data = parameter.data
        if id(parameter) in trained:
            parameter.data = data.to(torch.float32)
            continue
        if saved not in (None, data.dtype) and not torch.equal(rounded := data.to(saved), data):
            data = rounded  # else no copy: it may be shared with the target's head
        parameter.data = data.to(dtype)
    return params


def slot_counts(draft: Draft, step: Step, split: str, seed: int, uploads: Uploads) -> Tensor:
    """Return the loss denominators of this rank's micro-batches of a step, float64 [S].

    Seeded like the losses, so that a draft that samples slots counts the slots it will use.
    """
    parts = []
    for number, batch in zip(step.numbers, step.batches, strict=True):
        seed_micro_batch(seed, split, step.epoch, number)
        parts.append(draft.slot_counts(uploads.without_hidden(batch)))
    return torch.stack(parts).sum(0)


class LossOnRanks(nn.Module):
    """A module whose `forward` is `draft.scored`; `Ranks.prepare` wraps it."""

    def __init__(self, draft: Draft) -> None:
        """Register the draft as the only submodule."""
        super().__init__()
        self.draft = draft

    def forward(
        self,
        batch: DraftBatch,
        head: TargetHead,
        counts: Tensor,
        earlier: list[Tensor] | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of a micro-batch, a scalar, and its sums (see `DraftLoss`).

        A plain tuple, because wrappers look for tensors in the result.

        `earlier` holds the previous losses of this rank in the step; it is passed with the last
        micro-batch when there are several ranks. The loss is then connected to every parameter
        outside of the draft's `units`, which it always is connected to, so that each parameter
        joins the all-reduce even if this rank's packs did not use it. If any loss is not finite,
        these gradients are non-finite too, and all ranks refuse the step.
        """
        result = self.draft.scored(batch, head, counts)
        if earlier is None:
            return result.loss, result.sums
        total = torch.stack([*earlier, result.loss.detach()]).sum()
        connected = Connected.apply(result.loss, total * 0, *self.draft.parameters_outside_units())
        return connected, result.sums
