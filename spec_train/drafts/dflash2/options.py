"""The options of DFlash 2. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from cyclopts import Parameter

from spec_data.terminal.given import changed
from spec_data.terminal.types import Count, Positive
from spec_train.options.draft_options import DRAFT, SHAPE, PublishedOptions, Weight, table_rank


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DFlash2Options(PublishedOptions):
    """Options of the DFlash 2 draft: DFlash with convolutions inside a block, and a selector that
    walks through the candidates of its slots."""

    example: ClassVar[Mapping[str, Any]] = {"num_layers": 2, "block_size": 3, "selector_top_k": 6}
    selector_weight: Annotated[Weight, DRAFT] = 1.0
    """Weight of the selector's loss: its cross-entropy over the candidates of a slot."""
    selector_top_k: Annotated[Positive, SHAPE] = 16
    """Candidates of a slot: the most probable tokens, among which the selector chooses."""
    selector_rank: Annotated[Count, SHAPE] = 0
    """Width of the selector's tables of tokens. 0: 256, or for a target narrower than 2560 channels
    a tenth of its width."""
    conv_kernel_size: Annotated[Positive, SHAPE] = 2
    """Slots that a convolution reads: a slot and the ones before it in its block."""
    conv_group_size: Annotated[Positive, SHAPE] = 16
    """Channels that share the part of a convolution's weights that depends on the slot."""

    @property
    def untrained(self) -> str:
        """Which part of a new draft nothing trains."""
        return "" if self.selector_weight else "--selector-weight 0 does not train the selector"

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and a rank of the selector."""
        sized = super().sized(hidden, blocks)
        return changed(sized, selector_rank=sized.selector_rank or table_rank(hidden))


OPTIONS = DFlash2Options
