"""The configurations of block drafts."""

from dataclasses import dataclass
from typing import Any, ClassVar

from spec_data.models.families import TargetShape
from spec_data.shards.errors import DraftError, an
from spec_train.attention.masks import BlockWindow
from spec_train.drafts.block.files import DFLASH, DSPARK
from spec_train.drafts.config import DraftConfig
from spec_train.formats.draft_seal import SECTION
from spec_train.options.draft_options import FULL, SLIDING, BlockOptions


@dataclass(frozen=True, kw_only=True)
class BlockConfig(DraftConfig):
    """Shapes and arithmetic of a block draft.

    The file has the flat form that DeepSpec writes and engines read (`Qwen3DSparkModel`). A DFlash
    draft in the layout of its paper is a `DFlashDraftModel`. `sample_from_anchor` is always
    written, because the engines have different defaults. `target_layer_ids` are block outputs in
    every engine.
    """

    architectures: ClassVar[tuple[str, ...]] = (DSPARK, DFLASH)
    switches: ClassVar[tuple[str, ...]] = (
        *DraftConfig.switches,
        *("sliding_window_non_causal", "attention_sink_bias"),
    )
    stage_keys: ClassVar[tuple[str, ...]] = ()
    """Fields, keys and options of a second stage."""
    qk_norm: bool = True  # as in Qwen3's layers
    sliding_window_non_causal: bool = False  # sliding layers see later slots of their block
    attention_sink_bias: bool = False  # a score of every head joins its softmax without a value

    num_target_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool  # its input is [y; W1 of the previous token], not y alone

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.layer_types:
            object.__setattr__(self, "sliding_window_non_causal", False)
        elif (self.sliding_window or 0) < self.block_size:
            raise DraftError(
                f"sliding_window = {self.sliding_window} is less than block_size = "
                f"{self.block_size}: engines differ in what the slots of a block then see of it"
            )

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        same = ("block_size", "markov_rank", "markov_head_type", "sliding_window_non_causal")
        return {
            **{name: getattr(options, name) for name in (*same, "attention_sink_bias")},
            **{name: getattr(options, name) for name in cls.stage_keys},
            "num_target_layers": shape.num_hidden_layers,
            "sample_from_anchor": options.layout == "anchor",
            "enable_confidence_head": options.confidence_weight > 0,
            "confidence_head_with_markov": options.with_markov,
        }

    @property
    def block_windows(self) -> tuple[BlockWindow | None, ...]:
        """The window of every layer; None: its slots see the whole context and block."""
        causal = not self.sliding_window_non_causal
        return tuple(None if size is None else BlockWindow(size, causal) for size in self.windows)

    @property
    def first(self) -> int:
        """Slot of a block that makes its first draft."""
        return 0 if self.sample_from_anchor else 1

    @property
    def depth(self) -> int:
        return self.block_size - self.first

    def to_json(self, options: BlockOptions) -> dict[str, Any]:
        published = self.in_dflash_form
        out: dict[str, Any] = {
            "architectures": [self.architectures[-1] if published else DSPARK],
            "model_type": "qwen3",
            **self.shared_json(),
            "target_layer_ids": list(self.layers),
            "num_anchors": options.num_anchors,
            "layer_types": [FULL] * self.num_hidden_layers,
            "attention_dropout": 0.0,
            "use_sliding_window": bool(self.layer_types),
            **self.shape_json(),
            **self._causal_json(),
            SECTION: self.own_json(options),
        }
        if self.draft_vocab_size == self.vocab_size and not self.train_embeddings:
            # The file has no head: engines take the target's. Without this key, llama.cpp ties a
            # missing head to the embedding of the file.
            out["has_embed_tokens"] = False
        if published or self.attention_sink_bias:  # engines read that key there alone
            out["dflash_config"] = self.table_json()
        return out

    @property
    def in_dflash_form(self) -> bool:
        """Whether the file has the class of DFlash and its table of keys."""
        return self.draft != "dspark" and not self.sample_from_anchor

    def table_json(self) -> dict[str, Any]:
        """Return the table of keys of a draft in DFlash's form."""
        return {
            "mask_token_id": self.mask_token_id,
            "target_layer_ids": list(self.layers),
            **{name: getattr(self, name) for name in ("block_size", *self.stage_keys)},
            **({"attention_sink_bias": True} if self.attention_sink_bias else {}),
        }

    def _causal_json(self) -> dict[str, Any]:
        """Return the key that engines read before their defaults, where it says what we compute.

        Without it, vLLM and SGLang make sliding layers causal and full ones not; llama.cpp makes
        none causal. It is for all layers, so causal sliding layers beside full ones have no key.
        """
        if not self.layer_types:
            return {}
        if self.sliding_window_non_causal:
            return {"is_causal": False}
        return {"is_causal": True} if set(self.layer_types) == {SLIDING} else {}


class DSparkConfig(BlockConfig):
    """A block draft with a Markov head and a confidence head, or one of them."""

    draft: ClassVar[str] = "dspark"


class DFlashConfig(BlockConfig):
    """A block draft without a second stage."""

    draft: ClassVar[str] = "dflash"

    def require_published(self, kind: str, *, anchored: bool = False) -> None:
        """Raise DraftError unless a draft of a `kind` has the vocabulary and slots of its paper.

        `anchored`: it may also draft from the anchor's slot.
        """
        if self.draft_vocab_size != self.vocab_size or (self.sample_from_anchor and not anchored):
            slots = "" if anchored else " and drafts from its mask slots"
            raise DraftError(
                f"{an(kind)} draft has the target's whole vocabulary{slots}: no program reads "
                "another one"
            )
