"""The fp32 weights that are trained, and their AdamW: whole on a rank, or its share of them.

In checkpoints both are always whole, by the parameter's name, so that a run goes on with any
number of ranks and either kind of sharding.
"""

import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spec_train.options import FitConfig

STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


class Masters:
    """What the optimizer of a run sees of its draft."""

    def __init__(self, draft: Any, config: FitConfig) -> None:
        """Take the trainable parameters of a draft that the ranks have prepared."""
        self.params: list[nn.Parameter] = draft.trainable_parameters()
        names = {id(p): name for name, p in draft.named_parameters()}
        self.names = [names[id(p)] for p in self.params]
        self._limit = config.clip or math.inf
        groups: list[dict[str, Any]] = [
            {
                "params": [p for p in self.params if p.ndim > 1],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in self.params if p.ndim <= 1], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        fused = self.params[0].device.type in ("cuda", "cpu")
        self.optimizer = torch.optim.AdamW(
            groups, lr=config.lr or 0.0, betas=(0.9, 0.95), fused=fused
        )

    def clip(self) -> Tensor:
        """Limit the norm of the whole step's gradient, a scalar; gives what it was."""
        for parameter in self.params:
            if parameter.grad is None:  # as with several ranks, where an exchange fills it in
                parameter.grad = torch.zeros_like(parameter)
        norm = whole(get_total_norm([p.grad for p in self.params if p.grad is not None]))
        clip_grads_with_norm_(self.params, self._limit, norm)
        return norm

    def step(self, lr: float) -> None:
        """Update the weights with the gradients, and drop those."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Whole weights under their names in a checkpoint; every rank goes through all of them."""
        for name, parameter in zip(self.names, self.params, strict=True):
            yield f"master.{name}", whole(parameter)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """The optimizer's tensors, likewise."""
        for name, parameter in zip(self.names, self.params, strict=True):
            for key, value in self.optimizer.state[parameter].items():
                yield f"optimizer.{key}.{name}", whole(value)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> list[str]:
        """Take up weights and moments of a checkpoint; gives the names of absent weights."""
        lacking = [name for name in self.names if f"master.{name}" not in tensors]
        if lacking:
            return lacking
        for name, parameter in zip(self.names, self.params, strict=True):
            parameter.copy_(split_like(tensors[f"master.{name}"], parameter))
            for key in STATE_KEYS:
                value = tensors.get(f"optimizer.{key}.{name}")
                if value is not None:
                    kept = split_like(value, parameter) if value.ndim else value
                    self.optimizer.state[parameter][key] = kept.to(parameter.device)
        return []


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor that may be split over the ranks; all of them call it."""
    gathered: Any = getattr(tensor, "full_tensor", None)  # a DTensor has it
    return tensor if gathered is None else gathered()


def split_like(full: Tensor, like: Tensor) -> Tensor:
    """This rank's share of `full`, which every rank holds, on the device and split as `like`."""
    full = full.to(like.device)
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = cast(DTensor, like)
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)


def learning_rate(step: int, total: int, config: FitConfig) -> float:
    """Rate of step 0..total-1: linear warm-up, then a cosine that ends at min_lr_ratio * lr."""
    peak = config.lr or 0.0
    warm = math.ceil(config.warmup_ratio * total)
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    progress = (step - warm) / max(1, total - 1 - warm)
    low = config.min_lr_ratio
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
