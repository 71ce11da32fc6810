"""The options of the drafts: one frozen dataclass per draft. No torch here: `--help` is instant."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import chosen_layers
from spec_data.terminal.config import option
from spec_data.terminal.console import nearest
from spec_train.options.loss_options import (
    BlockLossOptions,
    LossOptions,
    PositionOptions,
    loss_option,
)
from spec_train.options.shape_options import SHAPE, LayerOptions, NormOptions, qk_norm_option
from spec_train.options.vocabulary_options import VocabularyOptions

_WIDTH, _BLOCKS = 2560, 36
"""Hidden size and decoder blocks of Qwen3-4B, the smallest target of a published block draft."""


def layers_option(published: int) -> Any:
    """Return the option of drafts with several layers."""
    return option(
        None,
        help="decoder layers of the draft; fewer are faster and accept less. Not given: "
        f"{published} as published, or for a target narrower than {_WIDTH} channels the share of "
        f"its layers that {published} are of {_BLOCKS}",
        metavar="N",
    )


def scaled_layers(published: int, hidden: int, blocks: int) -> int:
    """Return the layers of a draft for a target of `hidden` channels and `blocks` layers.

    They are those of the `published` drafts. For a narrower target than any of these have, they
    would be too large a part of it: there the draft has their share of the target's depth.
    """
    if hidden >= _WIDTH:
        return published
    return max(1, min(published, round(published * blocks / _BLOCKS)))


def slots_option() -> Any:
    """Return the option of drafts that can be compared with other trainers."""
    return option(
        "serving",
        help="slots that have a loss. serving: known and drafted token are supervised, as when "
        "serving; shifted: the known token alone, as some other trainers do",
        choices=("serving", "shifted"),
    )


def head_init_option() -> Any:
    """Return the option of drafts with an LM head of their own."""
    return option(
        "target",
        help="initial LM head of the draft: the target's rows, or random",
        choices=("target", "random"),
    )


def fc_norm_option() -> Any:
    """Return the option of drafts that project captured layers with `fc`."""
    return option(False, help="normalise every captured layer before fc (EAGLE-3.1)")


@dataclass(frozen=True, kw_only=True)
class AuxOptions(VocabularyOptions, LayerOptions):
    """What drafts over captured layers share."""

    layers: str = option(
        "auto",
        help="layer ids that the draft reads, such as 1,3,5; auto reads those that the dataset was "
        "captured with for this draft (`spec-data generate --for`), else every captured layer",
        metavar="IDS",
    )
    gradient_checkpointing: bool = option(
        False,
        help="compute every layer (of EAGLE-3: every unroll step) again in the backward pass: less "
        "memory, up to a third slower",
    )

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        VocabularyOptions.__post_init__(self)
        LayerOptions.__post_init__(self)

    def layer_ids(
        self, captured: tuple[int, ...], recorded: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """The ascending layer ids to draft from (see `chosen_layers`)."""
        return chosen_layers(self.layers, captured, recorded)


@dataclass(frozen=True, kw_only=True)
class Eagle3Options(PositionOptions, AuxOptions, NormOptions):
    """Options of the EAGLE-3 draft (arXiv 2503.01840)."""

    num_layers: int = option(
        1,
        help="decoder layers of the draft; 1 as published. Only the first one reads the token and "
        "the captured layers; llama.cpp serves one layer",
        group=SHAPE,
    )
    ttt_steps: int = option(
        7,
        help="unroll steps of the training-time test, and tokens drafted per round. Memory and "
        "time grow with it; 3 to 7 are common",
    )
    step_decay: float = option(
        0.8,
        help="with --position-weights auto: the loss of unroll step s, counted from 0, has the "
        "weight step_decay ** s",
    )
    slots: str = slots_option()
    fc_norm: bool = fc_norm_option()
    norm_output: bool = option(False, help="feed the normalised output back (EAGLE-3.1)")
    head_init: str = head_init_option()

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
        self.check_one_rule("step_decay")


@dataclass(frozen=True, kw_only=True)
class EagleOptions(LossOptions, LayerOptions):
    """Options of the EAGLE-1/2 draft (arXiv 2401.15077, 2406.16858)."""

    num_layers: int = option(1, help="decoder layers of the draft; 1 as published")
    regression_weight: float = option(
        1.0, help="weight of the smooth L1 distance from the target's next final hidden state"
    )
    ce_weight: float = option(
        0.1,
        help="weight of --loss, between the target's distribution and the draft's, both "
        "through the target's head",
    )
    noise: float = option(
        0.1, help="half width of the uniform noise on the input states, only in training"
    )
    noise_scale: str = option(
        "fixed",
        help="fixed: --noise as it is; length: times 512 / tokens of the document",
        choices=("fixed", "length"),
    )
    slots: str = slots_option()
    depth: int = option(
        5, help="tokens drafted per round, also in validation; training looks one token ahead"
    )

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        if self.num_layers < 1:
            raise DraftError(f"num_layers = {self.num_layers}: at least 1")
        if self.depth < 1:
            raise DraftError(f"depth = {self.depth}: at least 1")
        for name in ("regression_weight", "ce_weight", "noise"):
            if not 0 <= getattr(self, name) < math.inf:
                raise DraftError(f"{name} = {getattr(self, name)}: 0 or more")
        if self.regression_weight == self.ce_weight == 0:
            raise DraftError("regression_weight and ce_weight are both 0: nothing would be learned")
        self.check_loss()


@dataclass(frozen=True, kw_only=True)
class PeagleOptions(PositionOptions, AuxOptions, NormOptions):
    """Options of the P-EAGLE draft (arXiv 2602.01469): all tokens of a round in one forward."""

    loss: str = loss_option("kl")

    depths: int = option(8, help="tokens drafted by one forward; time and memory grow with it")
    draft_layers: int | None = layers_option(4)
    cod_ratio: float = option(
        0.7,
        help="conditional drop sampling: depth d keeps a share cod_ratio ** d of the slots. Lower "
        "it when memory runs out",
    )
    cod_floor: float = option(0.2, help="smallest share of the slots that any depth keeps")
    mask_token_id: int = option(
        -1,
        help="token that stands for the unknown ones at depth 1 and deeper; -1 chooses one that "
        "text does not use",
        metavar="ID",
    )
    segments: int = option(
        1,
        help="train a row in so many parts, one after another: the same gradient with less memory, "
        "slower, because a part's documents are computed again up to its start",
    )
    slots: str = slots_option()
    fc_norm: bool = fc_norm_option()
    head_init: str = head_init_option()

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        for name in ("depths", "draft_layers", "segments"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DraftError(f"{name} = {value}: at least 1")
        if self.mask_token_id < -1:
            raise DraftError(f"mask_token_id = {self.mask_token_id}: -1 or more")
        if not 0 < self.cod_ratio <= 1:
            raise DraftError(f"cod_ratio = {self.cod_ratio}: above 0 and at most 1")
        if not 0 <= self.cod_floor <= 1:
            raise DraftError(f"cod_floor = {self.cod_floor}: from 0 to 1")
        self.check_loss()
        self.check_positions(self.depths)

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers."""
        layers = self.draft_layers or len(self.types) or scaled_layers(4, hidden, blocks)
        return dataclasses.replace(self, draft_layers=layers)

    @property
    def num_layers(self) -> int | None:
        """Its layers, under EAGLE-3's name."""
        return self.draft_layers

    @property
    def norm_output(self) -> bool:
        """Nothing is fed back here, so nothing is normed for it."""
        return False


@dataclass(frozen=True, kw_only=True)
class BlockOptions(BlockLossOptions, AuxOptions):
    """What DSpark and DFlash share: drafts that propose a whole block in one forward."""

    draft_vocab_size: int = option(
        0, help="the draft can propose this many tokens, the most frequent ones; 0 = all"
    )
    qk_norm: bool = qk_norm_option(True)
    sliding_window_non_causal: bool = option(
        False,
        help="slots see all slots of their block in the layers of --sliding-window as well; "
        "without it they see only earlier ones there, as engines serve such layers by default",
        group=SHAPE,
    )
    num_draft_layers: int | None = layers_option(5)
    block_size: int = option(7, help="slots of a block: the anchor token, then mask tokens")
    layout: str = option(
        "anchor",
        help="anchor: every slot drafts the token after its own; mask: the mask slots draft their "
        "own tokens, the anchor's slot none",
        choices=("anchor", "mask"),
    )
    mask_token_id: int = option(
        -1,
        help="token of the slots after the anchor; -1 chooses one that the target's tokenizer "
        "leaves unused, else a reserved, padding or unseen one",
        metavar="ID",
    )
    num_anchors: int = option(
        512, help="most blocks sampled per pack in a step. Lower it when memory runs out"
    )
    loss_decay_gamma: float = option(
        4.0,
        help="with --position-weights auto: the d-th draft of a block, counted from 0, has the "
        "weight exp(-d / gamma); 0 weighs all alike",
    )

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        super().__post_init__()
        least = 1 if self.layout == "anchor" else 2
        if self.block_size < least:
            raise DraftError(
                f"block_size = {self.block_size}: at least {least} in layout {self.layout}"
            )
        for name, value, bound in (
            ("num_draft_layers", self.num_draft_layers, 1),
            ("num_anchors", self.num_anchors, 1),
            ("mask_token_id", self.mask_token_id, -1),
            ("loss_decay_gamma", self.loss_decay_gamma, 0),
            ("ce_weight", self.ce_weight, 0),
            ("l1_weight", self.l1_weight, 0),
        ):
            if value is not None and not bound <= value < math.inf:
                raise DraftError(f"{name} = {value}: {bound} or more")
        self.check_mixture()
        self.check_positions(self.drafts_per_block)
        self.check_one_rule("loss_decay_gamma")

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers."""
        layers = self.num_draft_layers or len(self.types) or scaled_layers(5, hidden, blocks)
        return dataclasses.replace(self, num_draft_layers=layers)

    @property
    def num_layers(self) -> int | None:
        """Its layers, under EAGLE-3's name."""
        return self.num_draft_layers

    @property
    def drafts_per_block(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size if self.layout == "anchor" else self.block_size - 1


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(BlockOptions):
    """Options of the DSpark draft (DeepSpec): a block draft with Markov and confidence heads."""

    confidence_weight: float = option(
        1.0, help="weight of the confidence head's loss; 0 leaves the head out"
    )
    markov_rank: int | None = option(
        None,
        help="rank of the Markov head, a bias by the previous token; 0 leaves it out. Not given: "
        f"256, or for a target narrower than {_WIDTH} channels a tenth of its width",
        metavar="N",
    )
    markov_head_type: str = option(
        "vanilla",
        help="form of the Markov head; vLLM and llama.cpp serve only vanilla",
        choices=("vanilla", "gated", "rnn"),
    )
    confidence_head_with_markov: bool = option(
        True,
        help="the confidence head also reads the Markov head's embedding of the previous token; "
        "llama.cpp serves only such a head",
    )

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


@dataclass(frozen=True, kw_only=True)
class DFlashOptions(BlockOptions):
    """Options of the DFlash draft (arXiv 2602.06036): a block draft without further heads."""

    confidence_weight: ClassVar[float] = 0.0
    with_markov: ClassVar[bool] = False
    markov_rank: ClassVar[int] = 0
    markov_head_type: ClassVar[str] = "vanilla"
    block_size: int = option(16, help="slots of a block: the anchor token, then mask tokens")
    layout: str = option(
        "mask",
        help="mask: the mask slots draft their own tokens, the anchor's slot none (what engines "
        "serve as DFlash); anchor: every slot drafts the token after its own (served as DSpark)",
        choices=("mask", "anchor"),
    )
    loss_decay_gamma: float = option(
        7.0,
        help="with --position-weights auto: the d-th draft of a block, counted from 0, has the "
        "weight exp(-d / gamma); 0 weighs all alike",
    )
    ce_weight: float = option(1.0, help="with --loss ce+l1: weight of the cross-entropy")
    l1_weight: float = option(
        0.0, help="with --loss ce+l1: weight of the L1 distance to the target's distribution"
    )


DRAFT_OPTIONS: dict[str, type] = {
    "eagle": EagleOptions,
    "eagle3": Eagle3Options,
    "peagle": PeagleOptions,
    "dspark": DSparkOptions,
    "dflash": DFlashOptions,
}


def draft_options(name: str) -> type:
    """Return the class of a draft's options.

    Raises:
        DraftError: there is no draft of that name.
    """
    if name not in DRAFT_OPTIONS:
        near = nearest(str(name), list(DRAFT_OPTIONS))
        advice = f"; did you mean {near}?" if near else ""
        known = ", ".join(sorted(DRAFT_OPTIONS))
        raise DraftError(f"unknown draft {name!r}; known: {known}{advice}")
    return DRAFT_OPTIONS[name]
