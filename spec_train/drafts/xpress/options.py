"""The options of XPress. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from cyclopts import Parameter

from spec_data.terminal.given import changed
from spec_data.terminal.types import Count, Positive
from spec_train.options.draft_options import SHAPE, PublishedOptions, table_rank


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class XPressOptions(PublishedOptions):
    """Options of the XPress draft (arXiv 2608.02438): DFlash with a causal refiner, which corrects
    the logits of a slot by the tokens of the block before it."""

    example: ClassVar[Mapping[str, Any]] = {"num_layers": 2, "block_size": 3, "xpress_rank": 16}
    xpress_rank: Annotated[Count, SHAPE] = 0
    """Width of the refiner. 0: 256, or for a target narrower than 2560 channels less, the power of
    two below a tenth of its width; vLLM serves powers of two from 16."""
    xpress_mlp_hidden: Annotated[Count, SHAPE] = 0
    """Width inside its MLP. 0: twice its own, at least 64; vLLM serves multiples of 64."""
    xpress_num_passes: Annotated[Positive, SHAPE] = 6
    """Times that vLLM refines a block; its drafts after so many may be others than here."""

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and the widths of the refiner."""
        rank = self.xpress_rank or max(16, 1 << table_rank(hidden).bit_length() - 1)
        inside = self.xpress_mlp_hidden or max(64, 2 * rank)
        sized = super().sized(hidden, blocks)
        return changed(sized, xpress_rank=rank, xpress_mlp_hidden=inside)


OPTIONS = XPressOptions
