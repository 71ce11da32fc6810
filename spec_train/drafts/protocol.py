"""What the trainer asks of a draft, and nothing more: adding a draft must not touch the trainer."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from spec_data.shards.schema import Manifest
from spec_train.head import TargetHead

if TYPE_CHECKING:
    from spec_train.batch import DraftBatch


@dataclass(frozen=True)
class DraftLoss:
    """A loss already divided by the counts of the whole optimizer step, and its additive sums."""

    loss: Tensor  # scalar with a graph
    sums: dict[str, Tensor]  # float64, no graph; `Draft.summarise` turns their totals into figures


class Draft(Protocol):
    """A draft model with its own loss; also an `nn.Module`."""

    name: ClassVar[str]
    options_class: ClassVar[type]

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise DatasetError or DraftError for a dataset that cannot be learned from."""
        ...

    @classmethod
    def build(
        cls,
        options: Any,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> "Draft":
        """Make a fresh draft for a dataset. `token_counts`: supervised tokens by id, int64 [V]."""
        ...

    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Make a draft read from `where` that of a dataset's target, sharing the frozen weights.

        Gives warnings; raises DraftError for a draft of another target.
        """
        ...

    def columns(self, supervision: str) -> tuple[str, ...]:
        """Columns that `loss` reads of a dataset with that `supervision` (see Manifest)."""
        ...

    def slot_counts(self, batch: "DraftBatch") -> Tensor:
        """Denominators of the loss, float64 [S]; they add up over micro-batches and ranks."""
        ...

    def loss(self, batch: "DraftBatch", head: TargetHead, counts: Tensor) -> DraftLoss:
        """Loss of a batch over the counts of the whole optimizer step: micro-batches add up."""
        ...

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Figures of added-up sums; None: nothing to measure it on.

        Always among them: "loss" (a number), "acceptance_length" and "product_limit_length".
        """
        ...

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Parameters for the optimizer, in a fixed order."""
        ...

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors."""
        ...

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "Draft":
        """Read what `save_pretrained` wrote."""
        ...
