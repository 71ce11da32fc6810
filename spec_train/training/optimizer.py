"""The trained fp32 weights and their optimizer state, complete on each rank or sharded.

Checkpoints hold both complete, by parameter name, so that a run can resume with any number of
ranks and either kind of sharding.

With --optimizer muon, Muon moves the matrices of the layers between the draft's inputs and its
heads; AdamW moves the others. Muon's step is scaled to the size of AdamW's, so that one learning
rate serves both, but for the tables of DSpark's Markov head (`table_factor`).

Not `torch.distributed.checkpoint.state_dict`: it reads the state of an optimizer without steps as
one of step 1, and gathers all of it into new memory.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from spec_train.drafts import Draft
from spec_train.options.training import Training

BETAS = 0.9, 0.95
"""Decay rates of AdamW's averages of the gradient and of its square."""
MOMENTUM = 0.95
"""Of Muon, as Nesterov's."""
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq", "momentum_buffer")
NOT_HIDDEN = {"embed_tokens", "lm_head", "markov_w1", "markov_w2", "confidence_head", "mask_hidden"}
NOT_HIDDEN |= {"candidate_selector", "embed_proj", "w1", "w2"}
"""Parts of a name that mark embeddings and heads: AdamW moves them, with any optimizer."""

TABLES = {"markov_w1", "markov_w2", "w1", "w2"}
"""Parts of a name that mark low-rank tables of tokens [V, r]."""


def table_factor(hidden: int, rank: int) -> float:
    """Return how many times the rate of a draft its tables of tokens have, beside Muon.

    A token's bias is a sum of r products, so the rate goes with 1 / r; and it does not depend on
    the width H, with whose root `default_lr` falls. The 8 is of one width, H = 192, where 3 times
    the rate did worse than 8 times for r = 16, and once worse than 4 times for r = 64.
    """
    return max(1.0, 8 * math.sqrt(hidden) / rank)


def is_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter is a matrix, or one of every expert in one tensor [E, ..., ...].

    Not norms, biases (also of pairs, as LiLiCorr's by head and distance), the vector of a masked
    slot, kernels that start as the identity.
    """
    stacked = parameter.ndim == 3 and "experts" in name.split(".")
    return stacked or (parameter.ndim == 2 and not name.endswith("_bias"))


class Muon(torch.optim.Optimizer):
    """Muon (arXiv 2502.16982): the step of a matrix is its momentum, made orthogonal.

    Equals torch's with `adjust_lr_fn="match_rms_adamw"`, and on a GPU computes in its dtype. But
    torch's is in bfloat16 everywhere, for which a CPU without AVX-512 takes 15 times as long or
    more; and of a matrix that fsdp2 splits, each of its products is a collective call.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(list(matrices), {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Move every matrix [rows, columns], or [E, rows, columns]; each must have a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix)
                momentum = state["momentum_buffer"]
                momentum.lerp_(matrix.grad, 1 - MOMENTUM)
                step = orthogonal(gather_whole(matrix.grad.lerp(momentum, MOMENTUM)))
                step = shard_like(step.to(matrix.dtype), matrix)
                rate = group["lr"] * 0.2 * math.sqrt(max(matrix.shape[-2:]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return a matrix with about the same singular vectors, and values of 0.7 to 1.2.

    Five Newton-Schulz steps of an odd polynomial; what has no direction stays 0. Of [E, rows,
    columns], each for itself.
    """
    if matrix.ndim == 3:
        return torch.stack([orthogonal(one) for one in matrix])
    x = matrix if matrix.device.type == "cpu" else matrix.bfloat16()
    x = x.T if x.shape[0] > x.shape[1] else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Masters:
    """The trained parameters of a run's draft and their optimizer."""

    def __init__(self, draft: Draft, config: Training) -> None:
        """Use the trainable parameters of a draft after `Ranks.prepare`."""
        self.params: list[nn.Parameter] = draft.trainable_parameters()
        names = {id(p): name for name, p in draft.named_parameters()}
        self.names = [names[id(p)] for p in self.params]
        self._limit = config.clip or math.inf
        not_hidden = NOT_HIDDEN | draft.not_muon
        hidden = {
            name: p
            for name, p in zip(self.names, self.params, strict=True)
            if config.optimizer == "muon"
            and is_matrix(name, p)
            and not_hidden.isdisjoint(name.split("."))
        }
        groups: dict[tuple[float, float], list[Tensor]] = defaultdict(list)
        for name, p in zip(self.names, self.params, strict=True):
            if name not in hidden:
                decay, factor = config.weight_decay if is_matrix(name, p) else 0.0, 1.0
                if hidden and not TABLES.isdisjoint(name.split(".")):
                    factor = table_factor(draft.config.hidden_size, p.shape[1])
                groups[decay, factor].append(p)
        adamw = torch.optim.AdamW(
            [
                {"params": some, "weight_decay": decay, "factor": factor}
                for (decay, factor), some in groups.items()
            ],
            lr=config.lr or 0.0,
            betas=BETAS,
            fused=self.params[0].device.type in ("cuda", "cpu"),
        )
        self.optimizers: list[torch.optim.Optimizer] = [adamw]
        if hidden:
            self.optimizers.append(Muon(hidden.values(), config.lr or 0.0, config.weight_decay))
        self._states = [self.optimizers[name in hidden].state for name in self.names]

    def clip(self) -> Tensor:
        """Limit the gradient norm of the step; return the norm before, a float32 scalar."""
        for parameter in self.params:
            if parameter.grad is None:  # zero, as after an all-reduce over several ranks
                parameter.grad = torch.zeros_like(parameter)
        norm = gather_whole(get_total_norm([p.grad for p in self.params if p.grad is not None]))
        clip_grads_with_norm_(self.params, self._limit, norm)
        return norm

    def step(self, lr: float) -> None:
        """Update the weights at the rate `lr`, then drop the gradients."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * group.get("factor", 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete weights with their checkpoint names; every rank must iterate to the end.

        Gathering a sharded weight is a collective call.
        """
        for name, parameter in zip(self.names, self.params, strict=True):
            yield f"master.{name}", gather_whole(parameter)

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's tensors in the same way; none before the first step."""
        for name, parameter, states in zip(self.names, self.params, self._states, strict=True):
            for key, value in states[parameter].items():
                yield f"optimizer.{key}.{name}", gather_whole(value)

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> list[str]:
        """Load weights and moments of a checkpoint; return the names of missing weights."""
        lacking = [name for name in self.names if f"master.{name}" not in tensors]
        if lacking:
            return lacking
        for name, parameter, states in zip(self.names, self.params, self._states, strict=True):
            parameter.copy_(shard_like(tensors[f"master.{name}"], parameter))
            for key in STATE_KEYS:
                value = tensors.get(f"optimizer.{key}.{name}")
                if value is not None:
                    whole = shard_like(value, parameter) if value.ndim else value
                    states[parameter][key] = whole.to(parameter.device)
        return []


def gather_whole(tensor: Tensor) -> Tensor:
    """Return the complete tensor of a shard; collective. Other tensors are returned unchanged."""
    gathered: Any = getattr(tensor, "full_tensor", None)  # a DTensor has it
    return tensor if gathered is None else gathered()


def shard_like(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of `full`, with the device and sharding of `like`.

    Every rank holds `full`.
    """
    full = full.to(like.device)
    if not hasattr(like, "full_tensor"):
        return full
    from torch.distributed.tensor import DTensor, distribute_tensor

    sharded = cast(DTensor, like)
    return distribute_tensor(full, sharded.device_mesh, sharded.placements, src_data_rank=None)


def learning_rate(step: int, total: int, config: Training) -> float:
    """Return the rate of step 0..total-1: linear warm-up to lr, then --schedule.

    cosine and linear end at min_lr_ratio * lr with the last step; constant stays at lr.
    """
    # Not transformers' cosine schedule with a minimum: it starts at rate 0 and ends one step later,
    # and with shifted arguments its warm-up rounds differently. A resumed run must keep its rates.
    peak = config.lr or 0.0
    warm = math.ceil(config.warmup_ratio * total)
    if step < warm:
        return peak * (step + 1) / (warm + 1)
    if config.schedule == "constant":
        return peak
    progress = min(1.0, (step - warm) / max(1, total - 1 - warm))
    low = config.min_lr_ratio
    if config.schedule == "linear":
        return peak * (1 - (1 - low) * progress)
    return peak * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
