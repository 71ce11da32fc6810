"""--tp-plan: every layer of a target is split over the processes of torchrun.

States are equal on all processes, because the blocks of transformers' plans return whole sums.
"""

from typing import Any

from torch import Tensor

from spec_data.capture.processes import SharedTarget


class ShardedTarget(SharedTarget):
    """A target of which every process holds a part of the weights."""

    flag = "--tp-plan"

    def __init__(self, model: Any, *layers: Any, **options: Any) -> None:
        """Gather embedding, head and norm, which all processes do together.

        The head is kept on the device as well: the first process computes logits alone.
        """
        super().__init__(model, *layers, **options)
        self._stored_head = super().head_tensors()
        for name in ("weight", "bias"):
            self.head_tensor(name)

    def head_tensors(self) -> dict[str, Tensor]:
        return dict(self._stored_head)
