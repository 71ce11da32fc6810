"""The options of Domino. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from cyclopts import Parameter

from spec_data.terminal.given import changed
from spec_data.terminal.rules import Excludes, Rule
from spec_data.terminal.types import Count
from spec_train.options.draft_options import (
    DRAFT,
    SHAPE,
    PublishedOptions,
    Ratio,
    Share,
    table_rank,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DominoOptions(PublishedOptions):
    """Options of the Domino draft: DFlash with a recurrent head, which corrects the logits of a
    slot by the tokens drafted before it."""

    example: ClassVar[Mapping[str, Any]] = {"num_layers": 2, "block_size": 3, "emb_dim": 4}
    layout: Annotated[Literal["anchor", "mask"], SHAPE] = "anchor"
    """Anchor: every slot drafts the token after its own, as published; mask: the mask slots draft
    their own tokens, the anchor's slot none."""
    base_weight: Annotated[Share, DRAFT] = 1.0
    """Share of the loss, at the first step, that is of the logits without the recurrent head."""
    base_decay: Annotated[Ratio, DRAFT] = 1.0
    """Share of the run's steps over which --base-weight falls to 0."""
    needless: ClassVar[tuple[Rule, ...]] = (
        *PublishedOptions.needless,
        Excludes(
            "base_decay",
            "base_weight=0",
            "base_decay = {base_decay} is how --base-weight falls, and that is 0 from the start; "
            "give one of them",
            idle=1.0,
        ),
    )
    emb_dim: Annotated[Count, SHAPE] = 0
    """Rank of the head's correction. 0: 256, or for a target narrower than 2560 channels a tenth of
    its width."""
    gru_hidden_dim: Annotated[Count, SHAPE] = 0
    """Width of the GRU. 0: four times the rank."""
    pure_draft_prefix_len: Annotated[Count, SHAPE] = 1
    """First drafts of a block that the head leaves alone; SGLang serves 1."""

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and the widths of the head."""
        rank = self.emb_dim or table_rank(hidden)
        width = self.gru_hidden_dim or 4 * rank
        sized = super().sized(hidden, blocks)
        return changed(sized, emb_dim=rank, gru_hidden_dim=width)


OPTIONS = DominoOptions
