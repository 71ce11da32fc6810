"""The options of LiLiCorr. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from cyclopts import Parameter
from msgspec import Meta

from spec_data.terminal.given import changed
from spec_data.terminal.rules import Excludes, Rule
from spec_data.terminal.types import Count, Positive
from spec_train.options.draft_options import DRAFT, SHAPE, PublishedOptions, Weight, table_rank


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LiLiCorrOptions(PublishedOptions):
    """Options of the LiLiCorr draft (arXiv 2608.20530): DFlash with a transformer over the
    candidates of a block, which scores the steps from slot to slot."""

    example: ClassVar[Mapping[str, Any]] = {
        **{"num_layers": 2, "block_size": 3, "conv_kernel_size": 0, "lilicorr_hidden_size": 8},
        **{"lilicorr_num_layers": 1, "lilicorr_num_heads": 2, "lilicorr_candidate_topk": 16},
    }
    lattice_weight: Annotated[Weight, DRAFT] = 0.25
    """Weight of the cross-entropy of the scores of a slot's candidates."""
    penalty_weight: Annotated[Weight, DRAFT] = 0.25
    """Weight of the scores' mass on candidates that the target finds less probable than the
    document's token, each by how much."""
    margin_weight: Annotated[Weight, DRAFT] = 0.0
    """Weight of the lead that the document's token lacks to a score 2 above all others. Published
    with 0, and with 0.125 beside --lattice-weight 0.125."""
    margin: ClassVar[float] = 2.0
    conv_kernel_size: Annotated[Count, SHAPE] = 2
    """Slots that the convolutions of DFlash 2 read; 0: none. Published with 0 and with 2."""
    conv_group_size: Annotated[Count, SHAPE] = 16
    """Channels that share the part of a convolution's weights that depends on the slot."""
    needless: ClassVar[tuple[Rule, ...]] = (
        *PublishedOptions.needless,
        Excludes(
            "conv_group_size",
            "conv_kernel_size=0",
            "conv_group_size = {conv_group_size}, and --conv-kernel-size 0 leaves the convolutions "
            "out; give one of them",
            idle=16,
        ),
    )
    lilicorr_candidate_topk: Annotated[Positive, SHAPE] = 8
    """Candidates of a slot; SGLang serves powers of two up to 16."""
    lilicorr_hidden_size: Annotated[Count, SHAPE] = 0
    """Width of the transformer. 0: 1024, or for a target narrower than 2560 channels two fifths of
    its width."""
    lilicorr_num_layers: Annotated[Positive, SHAPE] = 2
    """Layers of the transformer."""
    lilicorr_num_heads: Annotated[Positive, SHAPE] = 8
    """Heads of its attention."""
    lilicorr_mlp_ratio: Annotated[float, Meta(gt=0), SHAPE] = 2.0
    """Width inside its MLPs, in widths of the transformer."""
    lilicorr_factor_dim: Annotated[Count, SHAPE] = 0
    """Width of the vectors whose cosine is a score. 0: that of the transformer."""
    lilicorr_vector_eps: Annotated[float, Meta(gt=0), SHAPE] = 1e-4
    """Least length that such a vector is divided by."""
    lilicorr_logit_scale: Annotated[float, Meta(gt=0), SHAPE] = 8.0
    """What the cosines are multiplied by."""

    @property
    def untrained(self) -> str:
        """Which part of a new draft nothing trains."""
        if self.lattice_weight or self.penalty_weight or self.margin_weight:
            return ""
        return "lattice_weight = penalty_weight = margin_weight = 0 does not train the transformer"

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and the widths of the transformer."""
        width = self.lilicorr_hidden_size or 4 * table_rank(hidden)
        factors = self.lilicorr_factor_dim or width
        sized = super().sized(hidden, blocks)
        return changed(sized, lilicorr_hidden_size=width, lilicorr_factor_dim=factors)


OPTIONS = LiLiCorrOptions
