"""What the trainer asks of a draft, and nothing more: adding a draft must not touch the trainer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from spec_data.shards.schema import Manifest
from spec_train.data.batch import DraftBatch
from spec_train.formats.draft_files import DraftFiles
from spec_train.head import TargetHead
from spec_train.sampling import Sampler


@dataclass(frozen=True)
class DraftLoss:
    """A loss already divided by the counts of the whole optimizer step, and its additive sums."""

    loss: Tensor  # scalar with a graph
    sums: dict[str, Tensor]  # float64, no graph; `Draft.summarise` turns their totals into figures


class Drafter(Protocol):
    """One sequence in a draft: takes in what the target has verified, proposes what may follow."""

    passes: int
    """Forward passes of the draft so far."""

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Take in verified positions and draft tokens after the last of them.

        Args:
            tokens: t known tokens; the i-th stands one position after states[:, i].
            states: the target's states at the t positions that follow those so far, [1, t, A]:
                the draft's `state_columns`, concatenated.
            count: drafts wanted, at least 1.
            sampler: chooses them.

        Returns:
            Drafted target ids, int64 [n], n <= count, and, when sampling, their distributions.
        """
        ...


class DraftConfig(Protocol):
    """What every draft's configuration says; a frozen dataclass."""

    @property
    def vocab_size(self) -> int:
        """The target's."""

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that the draft can propose."""

    @property
    def hidden_size(self) -> int:
        """The draft's own width; today the target's."""

    @property
    def dtype(self) -> str:
        """In which the draft is saved, as torch names it: the target's."""

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids that the draft reads, ascending; empty if it reads only the final hidden."""

    @property
    def origin(self) -> dict[str, Any]:
        """Whom it was fitted to (see `spec_train.origin`)."""


class Draft(Protocol):
    """A draft model with its own loss; also an `nn.Module`."""

    name: ClassVar[str]
    options_class: ClassVar[type]
    options: Any
    embed_tokens: nn.Embedding  # the target's

    @property
    def config(self) -> Any:
        """Its `DraftConfig`."""

    def to(self, *args: Any) -> Any:
        """As in every nn.Module, like the next five."""

    def train(self) -> Any:
        """Switch to training mode."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, frozen ones too."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters with their names."""
        ...

    def buffers(self) -> Iterator[Tensor]:
        """All buffers."""
        ...

    @property
    def state_columns(self) -> tuple[str, ...]:
        """Dataset columns of the target's states that serving feeds it, concatenated in order."""

    @property
    def depth(self) -> int:
        """Tokens it drafts per round unless told otherwise: as many as it was trained for."""

    @property
    def max_depth(self) -> int | None:
        """Most tokens it can draft per round; None: any number."""

    def drafter(self, head: TargetHead) -> Drafter:
        """Start drafting one sequence. `head` is the target's, on the draft's device."""
        ...

    def chains(self, batch: DraftBatch, head: TargetHead, depth: int) -> Tensor:
        """Draft greedily from every slot as serving would, without the target.

        Returns:
            Target ids, int64 [B, T, depth]. Entry (t, d) is the draft for token t + 2 + d of the
            document, tokens up to t + 1 being given. Slots with no known token (the last of a
            document, padding) hold drafts of nothing: ignore them. -1: the draft ended its round
            before that depth.
        """
        ...

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

    def set_options(self, options: Any) -> None:
        """Replace the options, for example those that a resumed run may change."""
        ...

    def replace_config(self, **changes: Any) -> None:
        """Replace fields of the configuration that do not affect what the draft computes."""
        ...

    def set_confidence_threshold(self, threshold: float) -> None:
        """End a round before a draft whose forecast acceptance is below `threshold`; 0: never.

        Raises:
            ConfigError: the threshold is above 0 and the draft has no confidence head.
        """
        ...

    def columns(self, supervision: str) -> tuple[str, ...]:
        """Columns that `loss` reads of a dataset with that `supervision` (see Manifest)."""
        ...

    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Denominators of the loss, float64 [S]; they add up over micro-batches and ranks.

        Torch's generator stands where it will stand for the `loss` of the same batch, so a draft
        that samples slots counts those that it will sample. The batch has no states here, and may
        be nothing but padding: a rank without a batch.
        """
        ...

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor) -> DraftLoss:
        """Loss of a batch over the counts of the whole optimizer step: micro-batches add up.

        A batch of nothing but padding has a loss of zero and the same names and shapes in its sums.
        Random numbers come from torch's default generator, which the trainer seeds by the batch's
        place in the run: a resumed run, or one on other ranks, draws the same.
        """
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

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """Return config.json and tensors of our checkpoint; `where` is its directory."""
        ...

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors."""
        ...

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> "Draft":
        """Read what `save_pretrained` wrote."""
        ...
