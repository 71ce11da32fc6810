"""Configuration of a DSpark or DFlash draft: derived from the target's config.json.

In: the target's config.json, or the draft's own. Out: `DSparkConfig`, and the draft's config.json.
The file has the flat form that DeepSpec writes and engines read (`Qwen3DSparkModel`). A DFlash
draft in the layout of its paper is a `DFlashDraftModel`. `sample_from_anchor` is always written,
because the engines have different defaults. `target_layer_ids` are block outputs in every engine.
Keys that only this project needs are in `spec_train`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from spec_data.config import from_dict
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import Positions
from spec_train.attention.masks import BlockWindow
from spec_train.drafts.config import LayeredConfig
from spec_train.drafts.mask_token import require_in_vocabulary
from spec_train.drafts.targets import (
    resolve_dspark_draft_spec,
    target_shape,
    warn_of_last_layer,
)
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.dspark import DFLASH, DSPARK
from spec_train.options.draft_options import BlockOptions, DFlashOptions, DSparkOptions
from spec_train.options.shape_options import FULL, SLIDING

OPTIONS: dict[str, type[BlockOptions]] = {"dspark": DSparkOptions, "dflash": DFlashOptions}


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(LayeredConfig):
    """Shapes and arithmetic of the draft. Layer id: block output, counted from 0."""

    switches: ClassVar[tuple[str, ...]] = (*LayeredConfig.switches, "sliding_window_non_causal")

    qk_norm: bool = True  # as in Qwen3's layers
    sliding_window_non_causal: bool = False  # sliding layers see later slots of their block

    num_target_layers: int
    block_size: int
    mask_token_id: int
    sample_from_anchor: bool
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool  # its input is [y; W1 of the previous token], not y alone

    def __post_init__(self) -> None:
        """Check the shape; see `LayeredConfig`.

        Raises:
            DraftError: names the field.
        """
        super().__post_init__()
        if not self.layer_types:
            object.__setattr__(self, "sliding_window_non_causal", False)
        elif (self.sliding_window or 0) < self.block_size:
            raise DraftError(
                f"sliding_window = {self.sliding_window} is less than block_size = "
                f"{self.block_size}: engines differ in what the slots of a block then see of it"
            )

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        layers: tuple[int, ...],
        vocab_size: int,
        draft_vocab_size: int,
        mask_token_id: int,
        options: Any,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        positions: Positions | None = None,
    ) -> "DSparkConfig":
        """Derive a draft's configuration from the target's config.json and `BlockOptions`.

        `dtype` and `origin` are those of `BaseConfig.of_target`, `positions` those of the dataset.

        Raises:
            DraftError: no draft is registered for the target's family, a size is missing, or the
                mask token is not in the vocabulary.
        """
        shape = target_shape(resolve_dspark_draft_spec, target_config, positions)
        warn_of_last_layer(layers, shape.num_hidden_layers)
        require_in_vocabulary(mask_token_id, vocab_size)
        options = options.sized(shape.hidden_size, shape.num_hidden_layers)
        return cls(
            **cls.of_target(target_config, shape, options, options.num_draft_layers, dtype, origin),
            target_hidden_size=shape.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            layers=layers,
            num_hidden_layers=options.num_draft_layers,
            num_target_layers=shape.num_hidden_layers,
            block_size=options.block_size,
            mask_token_id=mask_token_id,
            sample_from_anchor=options.layout == "anchor",
            markov_rank=options.markov_rank,
            markov_head_type=options.markov_head_type,
            enable_confidence_head=options.confidence_weight > 0,
            confidence_head_with_markov=options.with_markov,
            sliding_window_non_causal=options.sliding_window_non_causal,
        )

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
        """Number of tokens that a block drafts."""
        return self.block_size - self.first

    def to_json(self, options: BlockOptions, draft: str) -> dict[str, Any]:
        """Return config.json of a draft of kind `draft`: "dspark" or "dflash"."""
        published = draft == "dflash" and not self.sample_from_anchor
        out: dict[str, Any] = {
            "architectures": [DFLASH if published else DSPARK],
            "model_type": "qwen3",
            **self.shared_json(),
            "target_layer_ids": list(self.layers),
            "num_anchors": options.num_anchors,
            "layer_types": [FULL] * self.num_hidden_layers,
            "attention_dropout": 0.0,
            "use_sliding_window": bool(self.layer_types),
            **self.shape_json(),
            **self._causal_json(),
            SECTION: self.own_json(draft, options),
        }
        if self.draft_vocab_size == self.vocab_size and not self.train_embeddings:
            # The file has no head: engines take the target's. Without this key, llama.cpp ties a
            # missing head to the embedding of the file.
            out["has_embed_tokens"] = False
        if published:
            out["dflash_config"] = {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.layers),
                "block_size": self.block_size,
            }
        return out

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

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["DSparkConfig", str, Any]:
        """Read a config.json that `to_json` wrote: the config, the kind of draft, its options.

        Raises:
            DraftError: the file is not a block draft of this project, or fields are missing.
        """
        found = cls.fields_of(
            raw,
            where,
            kind="a DSpark or DFlash",
            architectures=(DSPARK, DFLASH),
            needed=("draft", "layers", "options"),
        )
        own = raw[SECTION]
        if own["draft"] not in OPTIONS:
            raise DraftError(
                f"{where}: {SECTION}.draft is {own['draft']!r}, not {' or '.join(OPTIONS)}"
            )
        return (
            cls(**found),
            own["draft"],
            from_dict(OPTIONS[own["draft"]], own["options"], where=where),
        )
