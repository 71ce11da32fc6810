"""A state before the final norm, from the state after it: what the speculators library stores.

An RMSNorm forgets the length of its input, so the raw output of the last block cannot be found
again. Any vector of the same direction has the same state after the norm, and so the same logits:
this one has length sqrt(H). It is measured that the norm returns the stored state.

Shapes: T tokens, H hidden size.
"""

import torch
from torch import Tensor

from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.position_data import load_positions
from spec_data.shards.reader import HiddenStatesDataset, load_head_tensors

_ALLOWED = 1e-2  # mean relative difference after the norm; rounding to bf16 is 2e-3


class Unnormed:
    """Makes states before the final norm of a dataset's target."""

    def __init__(self, dataset: HiddenStatesDataset) -> None:
        """Read the final norm of the target.

        Raises:
            DatasetError: the dataset does not record an RMSNorm, so it cannot be undone.
        """
        positions = load_positions(dataset.path, dataset.manifest)
        norm = positions.norm if positions else {}
        weight = load_head_tensors(dataset.path, dataset.manifest).get("norm")
        if norm.get("kind") != "rms" or weight is None:
            blocks = dataset.manifest.target.get("num_layers")
            raise DatasetError(
                f"{dataset.path}: speculators needs the state before the final norm. The dataset "
                "records no RMSNorm that could be undone; capture the last block as well "
                f"(--layers with {blocks - 1 if blocks else 'L-1'})"
            )
        self._weight = weight.float() + float(norm["offset"])
        self._eps = float(norm["eps"])

    def __call__(self, final: Tensor) -> tuple[Tensor, float]:
        """Return states bf16 [T, H] whose norm is `final` [T, H], and the mean relative difference.

        Raises:
            RunError: the difference is above rounding.
        """
        wanted = final.float()
        weight = self._weight
        raw = torch.where(weight.abs() < 1e-6, 0.0, wanted / weight).bfloat16()
        length = raw.float().pow(2).mean(-1, keepdim=True)
        again = raw.float() * torch.rsqrt(length + self._eps) * weight
        error = (again - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
        found = float(error.mean())
        if not found <= _ALLOWED:
            raise RunError(
                f"the final norm cannot be undone: the difference is {found:.1e}, more than "
                f"rounding ({_ALLOWED:.0e}); capture the last block as well"
            )
        return raw, found
