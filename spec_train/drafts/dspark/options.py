"""The options of DSpark. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from cyclopts import Parameter

from spec_data.terminal.given import changed
from spec_data.terminal.rules import Excludes, Rule
from spec_data.terminal.types import ON, Count
from spec_train.options.draft_options import (
    DRAFT,
    SHAPE,
    BlockKind,
    BlockOptions,
    BlockVocabulary,
    Weight,
    table_rank,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions, BlockVocabulary):
    """Options of the DSpark draft (DeepSpec): a block draft with Markov and confidence heads."""

    example: ClassVar[Mapping[str, Any]] = {**BlockOptions.example, "markov_rank": 4}
    loss: Annotated[BlockKind, DRAFT] = "kl"
    """Loss of a draft. kl, reverse-kl: KL divergence from and to the target's distribution; ce+l1:
    0.1 cross-entropy + 0.9 L1 distance to that distribution, as published; ce: cross-entropy; jsd:
    Jensen-Shannon divergence; tv: total variation, the probability that a sampled draft is
    rejected; lk-alpha, lk-lambda: the acceptance losses of arXiv 2602.23881."""
    layout: Annotated[Literal["anchor", "mask"], SHAPE] = "anchor"
    """Anchor: every slot drafts the token after its own; mask: the mask slots draft their own
    tokens, the anchor's slot none."""
    confidence_weight: Annotated[Weight, DRAFT] = 1.0
    """Weight of the confidence head's loss; 0 leaves the head out."""
    markov_rank: Annotated[Count | None, DRAFT, Parameter(metavar="N")] = None
    """Rank of the Markov head, a bias by the previous token; 0 leaves it out. Not given: 256, or
    for a target narrower than 2560 channels a tenth of its width."""
    markov_head_type: Annotated[Literal["vanilla", "gated", "rnn"], SHAPE] = "vanilla"
    """Form of the Markov head; vLLM and llama.cpp serve only vanilla."""
    confidence_head_with_markov: Annotated[bool, SHAPE, ON] = True
    """The confidence head also reads the Markov head's embedding of the previous token; llama.cpp
    serves only such a head."""
    needless: ClassVar[tuple[Rule, ...]] = (
        *BlockOptions.needless,
        Excludes(
            "markov_head_type",
            "markov_rank=0",
            "markov_head_type = {markov_head_type}, and --markov-rank 0 leaves the Markov head "
            "out; give one of them",
            idle="vanilla",
        ),
        Excludes(
            "confidence_head_with_markov=False",
            ("markov_rank=0", "confidence_weight=0"),
            "--no-confidence-head-with-markov is about a draft with both heads; markov_rank = "
            "{markov_rank} and confidence_weight = {confidence_weight} leave one out already",
        ),
    )

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and a Markov rank of whole bytes."""
        sized = super().sized(hidden, blocks)
        if sized.markov_rank is not None:
            return sized
        return changed(sized, markov_rank=table_rank(hidden))

    @property
    def with_markov(self) -> bool:
        """Whether there is a confidence head, and it reads the Markov embedding."""
        wanted = self.confidence_head_with_markov and self.markov_rank != 0
        return wanted and self.confidence_weight > 0


OPTIONS = DSparkOptions
