"""The options of the drafts: one frozen dataclass per draft. No torch here: `--help` is instant."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, Self

from cyclopts import Parameter

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import chosen_layers
from spec_data.terminal.console import did_you_mean
from spec_data.terminal.types import NO_FLAG, ONE_TOKEN
from spec_train.options.loss_options import (
    AUTO,
    DRAFT,
    BlockLossOptions,
    Kind,
    LossOptions,
    PositionOptions,
)
from spec_train.options.shape_options import SHAPE, LayerOptions, NormOptions
from spec_train.options.vocabulary_options import VocabularyOptions

_WIDTH, _BLOCKS = 2560, 36
"""Hidden size and decoder blocks of Qwen3-4B, the smallest target of a published block draft."""


def scaled_layers(published: int, hidden: int, blocks: int) -> int:
    """Return the layers of a draft for a target of `hidden` channels and `blocks` layers.

    They are those of the `published` drafts. For a narrower target than any of these have, they
    would be too large a part of it: there the draft has their share of the target's depth.
    """
    if hidden >= _WIDTH:
        return published
    return max(1, min(published, round(published * blocks / _BLOCKS)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class AuxOptions(VocabularyOptions, LayerOptions):
    """What drafts over captured layers share."""

    layers: Annotated[str, DRAFT, ONE_TOKEN, Parameter(metavar="IDS")] = "auto"
    """Layer ids that the draft reads, such as 1,3,5; auto reads those that the dataset was captured
    with for this draft (`spec-data generate --for`), else every captured layer."""
    gradient_checkpointing: Annotated[bool, DRAFT] = False
    """Compute every layer (of EAGLE-3: every unroll step) again in the backward pass: less memory,
    up to a third slower."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        VocabularyOptions.__post_init__(self)
        LayerOptions.__post_init__(self)

    def layer_ids(
        self, captured: tuple[int, ...], recorded: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """The ascending layer ids to draft from (see `chosen_layers`)."""
        return chosen_layers(self.layers, captured, recorded)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Eagle3Options(PositionOptions, AuxOptions, NormOptions):
    """Options of the EAGLE-3 draft (arXiv 2503.01840)."""

    num_layers: Annotated[int, SHAPE] = 1
    """Decoder layers of the draft; 1 as published. Only the first one reads the token and the
    captured layers; llama.cpp serves one layer."""
    ttt_steps: int = 7
    """Unroll steps of the training-time test, and tokens drafted per round. Memory and time grow
    with it; 3 to 7 are common."""
    step_decay: Annotated[float, NO_FLAG] = 0.8
    """With --position-weights auto: the loss of unroll step s, counted from 0, has the weight
    step_decay ** s."""
    fc_norm: Annotated[bool, DRAFT] = False
    """Normalise every captured layer before fc (EAGLE-3.1)."""
    norm_output: Annotated[bool, NO_FLAG] = False
    """Feed the normalised output back (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        if self.num_layers < 1:
            raise DraftError(f"num_layers = {self.num_layers}: at least 1")
        if self.ttt_steps < 1:
            raise DraftError(f"ttt_steps = {self.ttt_steps}: at least 1")
        if not 0 < self.step_decay <= 1:
            raise DraftError(f"step_decay = {self.step_decay}: above 0 and at most 1")
        self.check_loss()
        self.check_positions(self.ttt_steps)
        if self.position_weights != AUTO and self.step_decay != type(self).step_decay:
            raise DraftError(
                f"position_weights = {self.position_weights} and step_decay = {self.step_decay}: "
                "both decide the weights of a round's tokens; give one of them"
            )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EagleOptions(LossOptions, LayerOptions):
    """Options of the EAGLE-1/2 draft (arXiv 2401.15077, 2406.16858)."""

    num_layers: Annotated[int, SHAPE] = 1
    """Decoder layers of the draft; 1 as published."""
    regression_weight: ClassVar[float] = 1.0
    """Weight of the smooth L1 distance from the target's next final hidden state."""
    ce_weight: ClassVar[float] = 0.1
    """Weight of --loss, between the target's distribution and the draft's, both through the
    target's head."""
    noise: Annotated[float, NO_FLAG] = 0.1
    """Half width of the uniform noise on the input states, only in training."""
    depth: int = 5
    """Tokens drafted per round, also in validation; training looks one token ahead."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        if self.num_layers < 1:
            raise DraftError(f"num_layers = {self.num_layers}: at least 1")
        if self.depth < 1:
            raise DraftError(f"depth = {self.depth}: at least 1")
        self.check_loss()


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PeagleOptions(PositionOptions, AuxOptions, NormOptions):
    """Options of the P-EAGLE draft (arXiv 2602.01469): all tokens of a round in one forward."""

    loss: Annotated[Kind, DRAFT] = "kl"
    """Loss of a slot. ce: cross-entropy; kl, reverse-kl: KL divergence from and to the target's
    distribution; jsd: Jensen-Shannon divergence; tv: total variation, the probability that a
    sampled draft is rejected; lk-alpha, lk-lambda: the acceptance losses of arXiv 2602.23881."""

    depths: int = 8
    """Tokens drafted by one forward; time and memory grow with it."""
    num_layers: Annotated[int | None, SHAPE, Parameter(metavar="N")] = None
    """Decoder layers of the draft; fewer are faster and accept less. Not given: 4 as published, or
    for a target narrower than 2560 channels the share of its layers that 4 are of 36."""
    cod_ratio: Annotated[float, NO_FLAG] = 0.7
    """Conditional drop sampling: depth d keeps a share cod_ratio ** d of the slots."""
    cod_floor: ClassVar[float] = 0.2
    """Smallest share of the slots that any depth keeps."""
    mask_token_id: Annotated[int, DRAFT, Parameter(metavar="ID")] = -1
    """Token that stands for the unknown ones at depth 1 and deeper; -1 chooses one that text does
    not use."""
    segments: Annotated[int, DRAFT] = 1
    """Train a row in so many parts, one after another: the same gradient with less memory, slower,
    because a part's documents are computed again up to its start."""
    fc_norm: Annotated[bool, DRAFT] = False
    """Normalise every captured layer before fc (EAGLE-3.1)."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        for name in ("depths", "num_layers", "segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DraftError(f"{name} = {value}: at least 1")
        if self.mask_token_id < -1:
            raise DraftError(f"mask_token_id = {self.mask_token_id}: -1 or more")
        if not 0 < self.cod_ratio <= 1:
            raise DraftError(f"cod_ratio = {self.cod_ratio}: above 0 and at most 1")
        self.check_loss()
        self.check_positions(self.depths)

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers."""
        layers = self.num_layers or len(self.types) or scaled_layers(4, hidden, blocks)
        return dataclasses.replace(self, num_layers=layers)

    @property
    def norm_output(self) -> bool:
        """Nothing is fed back here, so nothing is normed for it."""
        return False


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BlockOptions(BlockLossOptions, AuxOptions):
    """What DSpark and DFlash share: drafts that propose a whole block in one forward."""

    draft_vocab_size: int = 0
    """The draft can propose this many tokens, the most frequent ones; 0 = all."""
    qk_norm: Annotated[bool, NO_FLAG] = True
    """Normalise queries and keys, each head by an RMSNorm (Qwen3's layer)."""
    sliding_window_non_causal: Annotated[bool, NO_FLAG] = False
    """Slots see all slots of their block in the layers of --sliding-window as well; without it they
    see only earlier ones there, as engines serve such layers by default."""
    num_layers: Annotated[int | None, SHAPE, Parameter(metavar="N")] = None
    """Decoder layers of the draft; fewer are faster and accept less. Not given: 5 as published, or
    for a target narrower than 2560 channels the share of its layers that 5 are of 36."""
    block_size: int = 7
    """Slots of a block: the anchor token, then mask tokens."""
    layout: Annotated[Literal["anchor", "mask"], NO_FLAG] = "anchor"
    """Anchor: every slot drafts the token after its own; mask: the mask slots draft their own
    tokens, the anchor's slot none."""
    mask_token_id: Annotated[int, DRAFT, Parameter(metavar="ID")] = -1
    """Token of the slots after the anchor; -1 chooses one that the target's tokenizer leaves
    unused, else a reserved, padding or unseen one."""
    num_anchors: Annotated[int, DRAFT] = 512
    """Most blocks sampled per pack in a step. Lower it when memory runs out."""
    loss_decay_gamma: ClassVar[float] = 4.0
    """The d-th draft of a block, counted from 0, has the weight exp(-d / gamma) as published."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        least = 1 if self.layout == "anchor" else 2
        if self.block_size < least:
            raise DraftError(
                f"block_size = {self.block_size}: at least {least} in layout {self.layout}"
            )
        for name, value, bound in (
            ("num_layers", self.num_layers, 1),
            ("num_anchors", self.num_anchors, 1),
            ("mask_token_id", self.mask_token_id, -1),
        ):
            if value is not None and not bound <= value < math.inf:
                raise DraftError(f"{name} = {value}: {bound} or more")
        self.check_loss()
        self.check_positions(self.drafts_per_block)

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers."""
        layers = self.num_layers or len(self.types) or scaled_layers(5, hidden, blocks)
        return dataclasses.replace(self, num_layers=layers)

    @property
    def drafts_per_block(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size if self.layout == "anchor" else self.block_size - 1


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions):
    """Options of the DSpark draft (DeepSpec): a block draft with Markov and confidence heads."""

    confidence_weight: Annotated[float, DRAFT] = 1.0
    """Weight of the confidence head's loss; 0 leaves the head out."""
    markov_rank: Annotated[int | None, DRAFT, Parameter(metavar="N")] = None
    """Rank of the Markov head, a bias by the previous token; 0 leaves it out. Not given: 256, or
    for a target narrower than 2560 channels a tenth of its width."""
    markov_head_type: Annotated[Literal["vanilla", "gated", "rnn"], NO_FLAG] = "vanilla"
    """Form of the Markov head; vLLM and llama.cpp serve only vanilla."""
    confidence_head_with_markov: Annotated[bool, NO_FLAG] = True
    """The confidence head also reads the Markov head's embedding of the previous token; llama.cpp
    serves only such a head."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        if self.markov_rank is not None and self.markov_rank < 0:
            raise DraftError(f"markov_rank = {self.markov_rank}: 0 (no Markov head) or more")
        if not 0 <= self.confidence_weight < math.inf:
            raise DraftError(f"confidence_weight = {self.confidence_weight}: 0 or more")

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers, and a Markov rank of whole bytes."""
        sized = super().sized(hidden, blocks)
        if sized.markov_rank is not None:
            return sized
        rank = min(256, max(8, 8 * round(256 * hidden / _WIDTH / 8)))
        return dataclasses.replace(sized, markov_rank=rank)

    @property
    def with_markov(self) -> bool:
        """Whether there is a confidence head, and it reads the Markov embedding."""
        wanted = self.confidence_head_with_markov and self.markov_rank != 0
        return wanted and self.confidence_weight > 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """Options of the DFlash draft (arXiv 2602.06036): a block draft without further heads."""

    confidence_weight: ClassVar[float] = 0.0
    with_markov: ClassVar[bool] = False
    markov_rank: ClassVar[int] = 0
    markov_head_type: ClassVar[str] = "vanilla"
    block_size: int = 16
    """Slots of a block: the anchor token, then mask tokens."""
    layout: Annotated[Literal["mask", "anchor"], NO_FLAG] = "mask"
    """Mask: the mask slots draft their own tokens, the anchor's slot none (what engines serve as
    DFlash); anchor: every slot drafts the token after its own (served as DSpark)."""
    loss_decay_gamma: ClassVar[float] = 7.0
    """The d-th draft of a block, counted from 0, has the weight exp(-d / gamma) as published."""
    ce_weight: ClassVar[float] = 1.0
    l1_weight: ClassVar[float] = 0.0


DRAFT_OPTIONS: dict[str, type] = {
    "eagle": EagleOptions,
    "eagle3": Eagle3Options,
    "peagle": PeagleOptions,
    "dspark": DSparkOptions,
    "dflash": DFlashOptions,
}


AnyDraftOptions = EagleOptions | Eagle3Options | PeagleOptions | DSparkOptions | DFlashOptions


def draft_options(name: str) -> type:
    """Return the class of a draft's options.

    Raises:
        DraftError: there is no draft of that name.
    """
    if name not in DRAFT_OPTIONS:
        known = ", ".join(sorted(DRAFT_OPTIONS)) + did_you_mean(str(name), list(DRAFT_OPTIONS))
        raise DraftError(f"unknown draft {name!r}; known: {known}")
    return DRAFT_OPTIONS[name]
