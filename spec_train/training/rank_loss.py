"""A draft's loss as the module that data parallelism wraps and sharding splits."""

from typing import Any

import torch
from torch import Tensor, nn


class LossOnRanks(nn.Module):
    """`draft.loss` as the `forward` that distributed wrappers need."""

    def __init__(self, draft: Any) -> None:
        """Hold the draft as the only submodule."""
        super().__init__()
        self.draft = draft

    def forward(
        self, batch: Any, head: Any, counts: Tensor, earlier: list[Tensor] | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss of a micro-batch and its sums (plain, so that wrappers find the tensors).

        `earlier`, in the last micro-batch of a rank among several: the losses before. The loss is
        then connected to every parameter, so that each takes part in the exchange whether or not
        this rank's packs used it; and if any of the losses is not finite, so is every gradient,
        and all ranks refuse the step at the same place.
        """
        result = self.draft.loss(batch, head, counts)
        if earlier is None:
            return result.loss, result.sums
        told = torch.stack([*earlier, result.loss.detach()]).sum()
        connected = _Connected.apply(result.loss, told * 0, *self.draft.trainable_parameters())
        return connected, result.sums


class _Connected(torch.autograd.Function):
    """The first argument; every parameter gets the gradient `zero` (nan where a loss is)."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, zero: Tensor, *params: Tensor) -> Tensor:
        ctx.save_for_backward(zero)
        ctx.params = [(p.shape, p.dtype) for p in params]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (zero,) = ctx.saved_tensors
        return grads[0], None, *(zero.to(dtype).expand(shape) for shape, dtype in ctx.params)
