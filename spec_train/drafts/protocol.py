"""The Draft protocol: everything that training, evaluation and export require of a draft.

A draft is an `nn.Module` that computes its own loss. A new kind of draft implements this protocol;
the trainer does not change. Drafts inherit most of it from `base.BaseDraft`.

B packs, T slots of a pack, S steps or terms of a loss, A width of the states that serving feeds a
draft, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor, nn

from spec_data.shards.position_data import Positions
from spec_data.shards.schema import Manifest
from spec_train.data.batch import DraftBatch
from spec_train.formats.draft_files import DraftFiles
from spec_train.losses.head import TargetHead
from spec_train.losses.sampling import Sampler


@dataclass(frozen=True)
class DraftLoss:
    """A loss, already divided by the counts of the whole optimizer step, and its metrics."""

    loss: Tensor  # scalar with a graph
    sums: dict[
        str, Tensor
    ]  # float64, no graph, additive; `Draft.summarise` turns totals into metrics


@dataclass(frozen=True)
class Ask:
    """What a sequence asks of its drafter: the arguments of `Drafter.propose`."""

    tokens: Sequence[int]
    states: Tensor
    count: int
    sampler: Sampler


class Drafter(Protocol):
    """Drafting for one sequence: reads what the target has verified, proposes the next tokens.

    A class may also have a static method `propose_together(drafters, asks)`: drafters of several
    sequences, all of this class and of one draft, answer one `Ask` each with what `propose` would
    return, in fewer forward passes (see `together.py`). `passes` counts as if each was alone.
    """

    passes: int
    """Forward passes of the draft so far."""

    def propose(
        self, tokens: Sequence[int], states: Tensor, count: int, sampler: Sampler
    ) -> tuple[Tensor, list[Any]]:
        """Append verified positions and draft tokens after the last of them.

        Args:
            tokens: t known tokens; token i is at the position after states[:, i].
            states: the target's states [1, t, A] at the next t positions: the draft's
                `state_columns`, concatenated.
            count: number of drafted tokens wanted, at least 1.
            sampler: chooses the tokens.

        Returns:
            Drafted target ids, int64 [n], n <= count, and their distributions (None per token when
            decoding is greedy).
        """
        ...


class DraftConfig(Protocol):
    """The fields that every draft's configuration has; a frozen dataclass."""

    @property
    def vocab_size(self) -> int:
        """Size of the target's vocabulary."""

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the draft can propose."""

    @property
    def hidden_size(self) -> int:
        """Width of the draft; today it equals the target's."""

    @property
    def dtype(self) -> str:
        """The target's dtype, by its torch name; the draft is saved in it."""

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states."""

    @property
    def layers(self) -> tuple[int, ...]:
        """Layer ids that the draft reads, ascending; empty if it reads only the final hidden."""

    @property
    def origin(self) -> dict[str, Any]:
        """Which target and prompts it was trained for (see `spec_train.formats.origin`)."""


class Draft(Protocol):
    """A draft model with its own loss; also an `nn.Module`."""

    name: ClassVar[str]
    options_class: ClassVar[type]
    embed_tokens: nn.Embedding  # the target's
    draft_ids: Tensor  # int64 [Vd], ascending; only where the vocabulary is not the full one

    @property
    def full_vocabulary(self) -> bool:
        """Whether it can propose every token of the target."""

    @property
    def config(self) -> Any:
        """Its `DraftConfig`."""

    @property
    def options(self) -> Any:
        """Its training options, an instance of `options_class`."""

    # -- as every nn.Module -----------------------------------------------------------------------

    def to(self, *args: Any) -> Self:
        """Move or cast the parameters."""
        ...

    def train(self, mode: bool = True) -> Self:
        """Switch to training mode."""
        ...

    def eval(self) -> Self:
        """Switch to evaluation mode."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """All parameters, frozen ones too."""
        ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters with their names."""
        ...

    def buffers(self) -> Iterator[Tensor]:
        """All buffers."""
        ...

    # -- settings ---------------------------------------------------------------------------------

    def use_options(self, options: Any) -> None:
        """Replace the training options; those that decide a shape must stay the same."""
        ...

    def update_config(self, **changes: Any) -> None:
        """Replace fields of the configuration that decide no tensor's shape."""
        ...

    def stop_below(self, confidence: float) -> None:
        """End a drafted block before its first token of a lower confidence; 0: never.

        Raises:
            ConfigError: the draft has no confidence head.
        """
        ...

    # -- drafting ---------------------------------------------------------------------------------

    @property
    def state_columns(self) -> tuple[str, ...]:
        """Dataset columns of the states that serving feeds the draft, in concatenation order."""

    @property
    def depth(self) -> int:
        """Default number of drafted tokens per round: the number it was trained for."""

    @property
    def max_depth(self) -> int | None:
        """Largest number of drafted tokens per round; None: no limit."""

    def drafter(self, head: TargetHead) -> Drafter:
        """Start drafting one sequence. `head` is the target's, on the draft's device."""
        ...

    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, counted_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot as serving would, without the target.

        `counted_only` leaves out most drafts that no figure counts (see `counted.py`): at slots
        outside responses, and after a draft that the target or the document contradicts.

        Returns:
            Target ids, int64 [B, T, depth]. Entry (t, d) is the draft for token t + 2 + d of the
            document, given the tokens up to t + 1. Slots without a known token (the last of a
            document, padding) hold meaningless drafts: ignore them. -1: the draft ended its round
            before that depth, or the draft was left out.
        """
        ...

    # -- training ---------------------------------------------------------------------------------

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise DatasetError or DraftError if the draft cannot be trained on a dataset."""
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
        vocabulary_counts: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Self:
        """Make a fresh draft for a dataset.

        `token_counts` are the supervised tokens by id, int64 [V]. The draft vocabulary is chosen by
        them, or by `vocabulary_counts` of other data.
        """
        ...

    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Connect a draft that was read from `where` to a dataset's target; share frozen weights.

        Returns:
            Warnings.

        Raises:
            DraftError: the draft belongs to another target.
        """
        ...

    def columns(self, supervision: str) -> tuple[str, ...]:
        """Return the columns that `loss` reads of a dataset with that `supervision` (Manifest)."""
        ...

    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the denominators of the loss, float64 [S]; add them over micro-batches and ranks.

        Torch's generator has the same state here as before `loss` of the same batch, so a draft
        that samples slots counts the slots that its loss will use. The batch has no states here,
        and may be padding only (a rank without a batch).
        """
        ...

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor) -> DraftLoss:
        """Return the loss of a batch over the counts of the whole optimizer step.

        Losses of micro-batches therefore add up. A padding-only batch has loss zero, and sums of
        the same names and shapes as other batches. Random numbers come from torch's default
        generator, which the trainer seeds by the batch's place in the run: a run that resumes, or
        uses another number of ranks, draws the same numbers.
        """
        ...

    @staticmethod
    def summarise(sums: dict[str, Tensor]) -> dict[str, float | None]:
        """Turn added sums into metrics; None: there was nothing to measure.

        "loss" (always a number), "acceptance_length" and "product_limit_length" are always present.
        """
        ...

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters for the optimizer, in a fixed order."""
        ...

    # -- files ------------------------------------------------------------------------------------

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """Return config.json and tensors of our checkpoint; `where` is its directory."""
        ...

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors."""
        ...

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read what `save_pretrained` wrote."""
        ...

    @classmethod
    def from_files(cls, files: DraftFiles) -> Self:
        """Make a draft from the files of `save_pretrained`."""
        ...
