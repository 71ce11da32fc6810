"""A draft's loss as an nn.Module, which distributed wrappers need."""

from typing import Any

import torch
from torch import Tensor, nn

from spec_train.data.batch import DraftBatch
from spec_train.drafts import Draft
from spec_train.head import TargetHead


class LossOnRanks(nn.Module):
    """A module whose `forward` is `draft.loss`."""

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
        micro-batch when there are several ranks. The loss is then connected to every parameter, so
        that each parameter joins the all-reduce even if this rank's packs did not use it. If any
        loss is not finite, every gradient is non-finite too, and all ranks refuse the step.
        """
        result = self.draft.loss(batch, head, counts)
        if earlier is None:
            return result.loss, result.sums
        total = torch.stack([*earlier, result.loss.detach()]).sum()
        connected = _Connected.apply(result.loss, total * 0, *self.draft.trainable_parameters())
        return connected, result.sums


class _Connected(torch.autograd.Function):
    """Return the loss; give every parameter the gradient `zero` (nan if a loss is not finite)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, zero: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(zero)
        ctx.params = [(p.shape, p.dtype) for p in params]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (zero,) = ctx.saved_tensors
        return grads[0], None, *(zero.to(dtype).expand(shape) for shape, dtype in ctx.params)
