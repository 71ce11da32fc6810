"""What the options of several kinds of drafts share. No torch here: `--help` is instant.

The options of a kind are a frozen dataclass in `options.py` of its folder, made of these.

A size that is not given is the target's, and the other switches of the shape are off.
`spec_train.drafts.config` makes the fields of a draft's configuration from them, under the same
names. What each loss computes is described in `losses`; which distribution of the target it uses,
in docs/losses.md.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from cyclopts import Parameter
from msgspec import Meta

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.layer_ids import chosen_layers
from spec_data.terminal.config import check_bounds
from spec_data.terminal.given import Options, changed
from spec_data.terminal.rules import Excludes, Needs, OneOf, Rule, check_rules, conditions
from spec_data.terminal.types import (
    JOINED,
    ON,
    ONE_TOKEN,
    Count,
    Positive,
    comma_list,
    more,
)

AUTO = "auto"
RANDOM, RIDGE = "random", "ridge"
"""The two values of `start_fc`."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""The two values of `layer_types`."""
MIXED = "ce+l1"
"""The loss of block drafts as published: cross-entropy and L1, each with its weight."""
DPACE = "dpace"
"""Position weights of block drafts: the draft's own expected prefix acceptance."""
VOCABULARY_CHOICES = ("draft_vocab", "draft_vocab_coverage")
"""Options that choose the draft vocabulary instead of `draft_vocab_size`."""
PATHS = ("draft_vocab",)
"""Options that are paths of this machine; a draft's config.json does not repeat them."""

DRAFT, SHAPE = more("the draft"), more("shape of the draft")
_BIASES = ("attention_bias", "mlp_bias")
SIZES = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
_WIDTH, _BLOCKS = 2560, 36
"""Hidden size and decoder blocks of Qwen3-4B, the smallest target of a published block draft."""


Kind = Literal["ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda"]
BlockKind = Literal["ce+l1", "ce", "kl", "reverse-kl", "jsd", "tv", "lk-alpha", "lk-lambda"]
KINDS = get_args(Kind)
Bias = Literal["auto", "true", "false"]
Weight = Annotated[float, Meta(ge=0)]
Ratio = Annotated[float, Meta(gt=0, le=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
TokenId = Annotated[int, Meta(ge=-1), Parameter(metavar="ID")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class DraftOptions(Options):
    """What the options of every draft have; a draft without decoder layers starts from it."""

    rounds: ClassVar[str] = "depth"
    """The option that is the number of tokens that a round drafts."""
    example: ClassVar[Mapping[str, Any]] = {}
    """Options of a tiny draft of this kind, with which `spec_train.testing` tries it."""
    needless: ClassVar[tuple[Rule, ...]] = ()
    """Options that do nothing beside others: a new run refuses them, a saved draft has all."""
    starts_trained: ClassVar[bool] = False
    """Whether a new draft has trained weights of the target, not random ones."""

    def validate(self) -> None:
        """Refuse values out of their bounds, and options that contradict each other.

        Raises:
            DraftError: there are some.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (list, tuple)):  # several values, as in every other function
                self._set(field.name, comma_list(value))
        try:
            check_bounds(self)
            self.check_rules()
            self.check()
        except ConfigError as error:
            raise DraftError(str(error)) from None

    def check(self) -> None:
        """Refuse options that contradict each other."""

    @property
    def untrained(self) -> str:
        """Which part of a new draft nothing trains, and why; "" where all are trained."""
        return ""

    @property
    def idle(self) -> set[str]:
        """The options that were given and do nothing beside the others."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        broken = [r for r in self.needless if r.broken(self.values(), self.given, defaults)]
        return {name.partition("=")[0] for rule in broken for name in conditions(rule.options)}

    def check_needless(self) -> None:
        """Refuse what was given and would do nothing.

        Raises:
            DraftError: there is such an option.
        """
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        try:
            check_rules(self.needless, self.values(), self.given, defaults)
        except ConfigError as error:
            raise DraftError(str(error)) from None

    @property
    def round_length(self) -> int:
        """Number of tokens that a round drafts, and trains."""
        return int(getattr(self, self.rounds))

    @property
    def biases_of_target(self) -> list[str]:
        """The options of biases that are auto, so that a new draft follows its target."""
        return []

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a value for every size that is not given.

        `hidden` and `blocks` are the hidden size and the decoder blocks of the target.
        """
        return self

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of a draft's configuration that these options decide.

        `target` has the target's sizes and its (text) config.json, as one table.

        Raises:
            DraftError: the number of layer types is not `count`, that of the draft's layers.
        """
        return {name: target[name] for name in SIZES}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ShapeOptions(DraftOptions):
    """The shape of a decoder layer, and the embedding."""

    intermediate_size: Annotated[Count, SHAPE] = 0
    """Width inside the MLP. 0 = the target's."""
    num_attention_heads: Annotated[Count, SHAPE] = 0
    """Query heads. 0 = the target's."""
    num_key_value_heads: Annotated[Count, SHAPE] = 0
    """Key and value heads; they divide the query heads. 0 = the target's."""
    head_dim: Annotated[Count, SHAPE] = 0
    """Size of a head. 0 = the target's. With another one, the rotary frequencies are those of this
    size, as engines compute them from the draft's own config."""
    hidden_act: Annotated[str, SHAPE] = "silu"
    """Activation of the MLP, by its name in transformers, such as silu or gelu_pytorch_tanh."""
    qk_norm: Annotated[bool, SHAPE] = False
    """Normalise queries and keys, each head by an RMSNorm (Qwen3's layer)."""
    attention_bias: Annotated[Bias, SHAPE] = "auto"
    """Biases of the four attention projections; auto: as the target's config says."""
    mlp_bias: Annotated[Bias, SHAPE] = "auto"
    """Biases of the three projections of the MLP; auto: as the target's config says."""
    sliding_window: Annotated[Count, SHAPE] = 0
    """A token sees the last N positions only, its own one included, in the layers of layer_types.
    0 = every earlier position."""
    layer_types: Annotated[str, SHAPE, JOINED, Parameter(metavar="TYPES")] = AUTO
    """One of full_attention and sliding_attention per layer of the draft, with commas; auto: every
    layer slides if --sliding-window is given."""
    train_embeddings: Annotated[bool, SHAPE] = False
    """Train an embedding of its own, which starts as the target's; SGLang replaces it by the
    target's."""

    def check(self) -> None:
        """Refuse types of layers that do not exist, or that contradict the window."""
        super().check()
        types = set(self.types)
        if odd := sorted(types - {FULL, SLIDING}):
            raise DraftError(
                f"layer_types: {', '.join(odd)} unknown; choose from {FULL}, {SLIDING}"
            )
        if SLIDING in types and not self.sliding_window:
            raise DraftError(f"layer_types has {SLIDING}: --sliding-window N is needed as well")
        if types and SLIDING not in types and self.sliding_window:
            raise DraftError(
                f"sliding_window = {self.sliding_window}: no layer of layer_types is {SLIDING}"
            )

    @property
    def types(self) -> tuple[str, ...]:
        """The entries of `layer_types`; () for auto."""
        if self.layer_types == AUTO:
            return ()
        return tuple(part.strip() for part in self.layer_types.split(","))

    @property
    def biases_of_target(self) -> list[str]:
        """The options of biases that are auto, so that a new draft follows its target."""
        return [name for name in _BIASES if getattr(self, name) == AUTO]

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of a draft's configuration that these options decide.

        `target` has the target's sizes and its (text) config.json, as one table.

        Raises:
            DraftError: the number of layer types is not `count`, that of the draft's layers.
        """
        types = self.types
        if self.sliding_window and not types:
            types = (SLIDING,) * count
        if types and len(types) != count:
            raise DraftError(f"layer_types has {len(types)} entries; the draft has {count} layers")
        biases = {name: getattr(self, name) for name in _BIASES}
        return {
            **{name: getattr(self, name) or target[name] for name in SIZES},
            "hidden_act": self.hidden_act,
            "qk_norm": self.qk_norm,
            **{n: bool(target.get(n)) if v == AUTO else v == "true" for n, v in biases.items()},
            "sliding_window": self.sliding_window or None,
            "layer_types": types,
            "train_embeddings": self.train_embeddings,
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class TargetShape(DraftOptions):
    """The shape of a draft whose layers are the target's own: nothing of it is an option."""

    intermediate_size: ClassVar[int] = 0
    num_attention_heads: ClassVar[int] = 0
    num_key_value_heads: ClassVar[int] = 0
    head_dim: ClassVar[int] = 0
    hidden_act: ClassVar[str] = "silu"
    qk_norm: ClassVar[bool] = False
    attention_bias: ClassVar[str] = AUTO
    mlp_bias: ClassVar[str] = AUTO
    sliding_window: ClassVar[int] = 0
    layer_types: ClassVar[str] = AUTO
    train_embeddings: ClassVar[bool] = False
    layers: ClassVar[str] = AUTO
    num_layers: ClassVar[int] = 1

    @property
    def biases_of_target(self) -> list[str]:
        """The options of biases that are auto, so that a new draft follows its target."""
        return list(_BIASES)

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of `DraftOptions.layer_fields`, and the switches of a plain layer."""
        return {
            **super().layer_fields(target, count),
            "hidden_act": self.hidden_act,
            "qk_norm": self.qk_norm,
            **{name: bool(target.get(name)) for name in _BIASES},
            "sliding_window": None,
            "layer_types": (),
            "train_embeddings": self.train_embeddings,
        }


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LossOptions(DraftOptions):
    """The menu of losses."""

    loss: Annotated[Kind, DRAFT] = "ce"
    """Loss of a slot. ce: cross-entropy; kl, reverse-kl: KL divergence from and to the target's
    distribution; jsd: Jensen-Shannon divergence; tv: total variation, the probability that a
    sampled draft is rejected; lk-alpha, lk-lambda: the acceptance losses of arXiv 2602.23881."""
    loss_target: Annotated[Literal["soft", "hard"], DRAFT] = "soft"
    """What the loss compares the draft with. soft: the target's distribution; hard: its most
    probable token alone."""

    def check(self) -> None:
        """Refuse a loss that its target makes infinite."""
        super().check()
        _refuse_infinite(self.loss, self.loss_target)


def _refuse_infinite(loss: str, target: str) -> None:
    """Refuse a loss that its target makes infinite."""
    if loss == "reverse-kl" and target not in ("soft", AUTO):
        raise DraftError(
            f"loss = reverse-kl with loss_target = {target}: the reverse KL divergence from a "
            "single token is infinite; use --loss-target soft, or another loss"
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class VocabularyOptions(DraftOptions):
    """The tokens that a draft can propose."""

    draft_vocab_size: Count = 32000
    """The draft can propose this many tokens, the most frequent supervised ones; 0 = all. Fewer are
    faster; raise it for many languages."""
    draft_vocab: Annotated[str | None, DRAFT, Parameter(metavar="FILE")] = None
    """The tokens that the draft can propose, instead of a size: a JSON list of ids, a safetensors
    file of ids or of d2t/t2d, or any draft (its directory, run or weights file)."""
    draft_vocab_coverage: Annotated[Ratio | None, DRAFT, Parameter(metavar="SHARE")] = None
    """The smallest vocabulary that holds this share of the supervised tokens, such as 0.99, instead
    of a size."""
    rules: ClassVar[tuple[Rule, ...]] = (
        OneOf(
            ("draft_vocab_size", *VOCABULARY_CHOICES),
            "{given}: each of them chooses the draft vocabulary; give one",
        ),
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WholeVocabulary(DraftOptions):
    """The vocabulary of a draft that proposes every token of its target."""

    draft_vocab_size: ClassVar[int] = 0
    draft_vocab: ClassVar[None] = None
    draft_vocab_coverage: ClassVar[None] = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class WeightsOptions(DraftOptions):
    """Weights of the drafted tokens, and the memory of the backward pass."""

    gradient_checkpointing: Annotated[bool, DRAFT] = False
    """Compute every layer (of EAGLE-3: every unroll step) again in the backward pass: less memory,
    up to a third slower."""
    position_weights: Annotated[str, DRAFT, ONE_TOKEN, Parameter(metavar="D|W,W,...")] = AUTO
    """Weights of the losses of the drafted tokens (unroll step, depth, place in the block), first
    token first. auto: as published for this draft; one number D above 0 and at most 1: D ** d for
    token d, counted from 0; a list such as 1,0.8,0.5: one weight per token."""
    other_weights: ClassVar[str] = ""
    """What a message about `position_weights` adds."""

    def check(self) -> None:
        """Refuse weights of another number of tokens."""
        super().check()
        self.weights_of(self.round_length)

    def weights_of(self, count: int) -> tuple[float, ...] | None:
        """Return the weights of the `count` tokens of a round; None: as published.

        Raises:
            DraftError: no such weights.
        """
        text = self.position_weights
        if text == AUTO:
            return None
        try:
            weights = tuple(float(part) for part in text.split(","))
        except ValueError:
            raise DraftError(
                f"position_weights = {text!r}: expected auto, one decay such as 0.8, or weights "
                f"with commas such as 1,0.8,0.5{self.other_weights}"
            ) from None
        if "," not in text:
            if not 0 < weights[0] <= 1:
                raise DraftError(f"position_weights = {text}: a decay is above 0, at most 1")
            return tuple(weights[0] ** d for d in range(count))
        if len(weights) != count:
            raise DraftError(
                f"position_weights = {text}: {len(weights)} weights for {count} drafted tokens; "
                "name one per token"
            )
        if not all(0 <= weight < math.inf for weight in weights) or not any(weights):
            raise DraftError(f"position_weights = {text}: each is 0 or more, and one above 0")
        return weights


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CapturedOptions(WeightsOptions, ShapeOptions):
    """What drafts with decoder layers of their own over captured layers share."""

    layers: Annotated[str, DRAFT, JOINED, Parameter(metavar="IDS")] = AUTO
    """Layer ids that the draft reads, such as 1,3,5; auto reads those that the dataset was captured
    with for this draft (`spec-data generate --for`), else every captured layer."""
    num_layers: Annotated[Positive | None, SHAPE, Parameter(metavar="N")] = None
    """Decoder layers of the draft; fewer are faster and accept less. Not given: as published (4 of
    P-EAGLE, 5 of block drafts), or for a target narrower than 2560 channels the share of its layers
    that they are of 36."""
    start_fc: Annotated[Literal["random", "ridge"], DRAFT] = "random"
    """First weights of fc, which joins the captured layers in a new draft. ridge: by regression to
    the target's next final state, on documents of the data (docs/training.md); random: as the other
    weights."""
    published_layers: ClassVar[int] = 1
    """Decoder layers of the published drafts."""

    def layer_ids(
        self, captured: tuple[int, ...], recorded: tuple[int, ...] | None = None
    ) -> tuple[int, ...]:
        """The ascending layer ids to draft from (see `chosen_layers`)."""
        return chosen_layers(self.layers, captured, recorded)

    def sized(self, hidden: int, blocks: int) -> Self:
        """Return the options with a number of layers.

        It is that of the published drafts. For a narrower target than any of these have, they would
        be too large a part of it: there the draft has their share of the target's depth.
        """
        most = self.published_layers
        share = max(1, min(most, round(most * blocks / _BLOCKS)))
        layers = self.num_layers or len(self.types) or (most if hidden >= _WIDTH else share)
        return changed(self, num_layers=layers)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class NormOptions(LossOptions, CapturedOptions, VocabularyOptions):
    """The norms of EAGLE-3's first layer."""

    norm_before_fc: Annotated[bool | None, DRAFT, ON] = None
    """One RMSNorm over all captured layers together, before fc; not given: unless --fc-norm norms
    each of them. The papers' authors have none, which learned more slowly."""
    norm_before_residual: Annotated[bool, SHAPE] = False
    """Add the attention of the first layer to its normalised input instead of to the input."""
    fc_norm: Annotated[bool, DRAFT] = False
    """Normalise every captured layer before fc (EAGLE-3.1)."""
    train_head: Annotated[bool, DRAFT] = False
    """Train the LM head too, as EAGLE-3's authors do: it starts as the target's, has most of the
    draft's weights, and did not help where the corpus was small."""

    def layer_fields(self, target: dict[str, Any], count: int) -> dict[str, Any]:
        """Return the fields of `DraftOptions.layer_fields` and the switches of the norms."""
        one = not self.fc_norm if self.norm_before_fc is None else self.norm_before_fc
        return super().layer_fields(target, count) | {
            "norm_before_fc": one,
            "norm_before_residual": self.norm_before_residual,
        }


DECAY = OneOf(
    ("position_weights", "step_decay"),
    "position_weights = {position_weights} and step_decay = {step_decay}: both decide the weights "
    "of the drafted tokens; give one of them",
    idle=AUTO,
)


def of_one_token(rounds: str, **idle: Any) -> tuple[Rule, ...]:
    """Refuse options by which drafted tokens differ, for rounds of one token.

    `rounds` is the option that is the number of drafted tokens; `idle` are the others, and their
    values that ask for nothing.
    """
    flag = "--" + rounds.replace("_", "-")
    return tuple(
        Excludes(
            name,
            f"{rounds}=1",
            f"{name} = {{{name}}} weighs or thins the later tokens of a round, and {flag} 1 has "
            "none; leave it out",
            idle=value,
        )
        for name, value in idle.items()
    )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BlockOptions(CapturedOptions):
    """What DSpark and DFlash share: drafts that propose a whole block in one forward."""

    example: ClassVar[Mapping[str, Any]] = {"num_layers": 2, "block_size": 3, "draft_vocab_size": 0}
    loss: Annotated[BlockKind, DRAFT] = "ce+l1"
    """Loss of a draft. ce+l1: cross-entropy and L1 distance to the target's distribution, with the
    published weights; another one replaces both. ce: cross-entropy; kl, reverse-kl: KL
    divergence from and to the target's distribution; jsd: Jensen-Shannon divergence; tv: total
    variation, the probability that a sampled draft is rejected; lk-alpha, lk-lambda: the acceptance
    losses of arXiv 2602.23881."""
    position_weights: Annotated[str, DRAFT, ONE_TOKEN, Parameter(metavar="D|W,..|dpace")] = AUTO
    """Weights of the losses of the drafted tokens, first token first. auto: as published for this
    draft; one number D above 0 and at most 1: D ** d for token d, counted from 0; a list such as
    1,0.8,0.5: one weight per token; dpace or dpace:A (arXiv 2605.18810): by the draft's own
    expected acceptance, smoothed by A, 0.5 if not given."""
    loss_target: Annotated[Literal["auto", "soft", "hard", "tokens"], DRAFT] = "auto"
    """What the loss (of ce+l1, its cross-entropy) compares the draft with. soft: the target's
    distribution; hard: its most probable token; tokens: the document's token. auto: tokens for
    cross-entropies, as published, else soft."""
    ce_weight: ClassVar[float] = 0.1
    l1_weight: ClassVar[float] = 0.9
    qk_norm: Annotated[bool, SHAPE, ON] = True
    sliding_window_non_causal: Annotated[bool, SHAPE] = False
    """Slots see all slots of their block in the layers of --sliding-window as well; without it they
    see only earlier ones there, as engines serve such layers by default."""
    attention_sink_bias: Annotated[bool, SHAPE] = False
    """Every head has a trained score that joins its softmax without a value, as in NVIDIA's and
    MiMo's published drafts."""
    needless: ClassVar[tuple[Rule, ...]] = (
        Needs(
            "sliding_window_non_causal",
            "sliding_window",
            "--sliding-window-non-causal is about layers with a window, and there is none; add "
            "--sliding-window N, or leave it out",
        ),
    )
    published_layers: ClassVar[int] = 5
    other_weights: ClassVar[str] = f", or {DPACE}"
    block_size: Positive = 7
    """Slots of a block: the anchor token, then mask tokens."""
    mask_token_id: Annotated[TokenId, DRAFT] = -1
    """Token of the slots after the anchor; -1 chooses one that the target's tokenizer leaves
    unused, else a reserved, padding or unseen one."""
    num_anchors: Annotated[Positive, DRAFT] = 512
    """Most blocks sampled per pack in a step. Lower it when memory runs out."""
    loss_decay_gamma: ClassVar[float] = 4.0
    """The d-th draft of a block, counted from 0, has the weight exp(-d / gamma) as published."""

    def check(self) -> None:
        """Refuse a block that drafts nothing, and a loss that its target makes infinite."""
        if not self.round_length:
            raise DraftError(f"block_size = 1: at least 2 in layout {self.layout}")
        super().check()
        _refuse_infinite(self.loss, self.loss_target)

    @property
    def layout(self) -> str:
        """Which slots draft: those of the option, or "mask" where there is none."""
        return "mask"

    @property
    def smoothing(self) -> float | None:
        """What D-PACE mixes 1 into the draft's confidences with; None: another weighting.

        Raises:
            DraftError: it is not above 0 and at most 1.
        """
        name, given, number = self.position_weights.partition(":")
        if name != DPACE:
            return None
        try:
            smoothing = float(number) if given else 0.5
        except ValueError:
            smoothing = math.nan
        if not 0 < smoothing <= 1:
            raise DraftError(
                f"position_weights = {self.position_weights}: expected {DPACE}, or {DPACE}:A with "
                "A above 0 and at most 1"
            )
        return smoothing

    def weights_of(self, count: int) -> tuple[float, ...] | None:
        """Return the weights of the drafts in the denominators of the loss; see `AuxOptions`."""
        return super().weights_of(count) if self.smoothing is None else (1.0,) * count

    @property
    def round_length(self) -> int:
        """Number of tokens that a block drafts."""
        return self.block_size if self.layout == "anchor" else self.block_size - 1

    @property
    def mixed(self) -> bool:
        """Whether the loss is the weighted sum of cross-entropy and L1."""
        return self.loss == MIXED

    @property
    def compared_with(self) -> str:
        """What the loss compares a draft with: "soft", "hard" or "tokens"."""
        if self.loss_target != AUTO:
            return self.loss_target
        return "tokens" if self.loss in (MIXED, "ce") else "soft"


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class BlockVocabulary(VocabularyOptions):
    """The tokens that a block draft can propose: all of them, unless one asks for fewer."""

    draft_vocab_size: Count = 0


def table_rank(hidden: int) -> int:
    """Return the rank of tables of tokens beside a target of this width."""
    return min(256, max(8, 8 * round(256 * hidden / _WIDTH / 8)))


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlainBlockOptions(BlockOptions):
    """What DFlash and the second stages of other projects share."""

    position_weights: Annotated[str, DRAFT, ONE_TOKEN, Parameter(metavar="D|W,..|dpace")] = DPACE
    """Weights of the losses of the drafted tokens, first token first. dpace or dpace:A (arXiv
    2605.18810): by the draft's own expected acceptance, smoothed by A, 0.5 if not given; auto: as
    the authors publish, exp(-d / 7) for token d, counted from 0; one number D above 0 and at most
    1: D ** d; a list such as 1,0.8,0.5: one weight per token."""

    confidence_weight: ClassVar[float] = 0.0
    with_markov: ClassVar[bool] = False
    markov_rank: ClassVar[int] = 0
    markov_head_type: ClassVar[str] = "vanilla"
    block_size: Positive = 16
    loss_decay_gamma: ClassVar[float] = 7.0
    ce_weight: ClassVar[float] = 1.0
    l1_weight: ClassVar[float] = 0.0


@dataclass(frozen=True, kw_only=True)
class PublishedOptions(PlainBlockOptions, WholeVocabulary):
    """What the second stages of other projects share: the vocabulary of their papers."""
