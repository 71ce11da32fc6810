"""Configuration of an EAGLE-3 draft (arXiv 2503.01840): derived from the target's config.json.

In: the target's config.json, or the draft's own. Out: `Eagle3Config`, and the draft's config.json.
Every engine can read that file: `architectures`, both keys for the layer ids (engines disagree on
the meaning of an id), no null fields. Keys that only this project needs are in `spec_train`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

from spec_data.config import from_dict
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.shards.position_data import Positions
from spec_train.drafts.config import AuxConfig
from spec_train.drafts.targets import (
    resolve_eagle3_draft_spec,
    target_shape,
    warn_of_last_layer,
)
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.eagle3 import OWN as ARCHITECTURE
from spec_train.formats.eagle3 import WITH_QK_NORM, named_class
from spec_train.options.draft_options import Eagle3Options


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(AuxConfig):
    """Shapes and arithmetic of the draft. Layer id: block output, counted from 0."""

    draft: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = ARCHITECTURE
    options_class: ClassVar[type] = Eagle3Options

    num_hidden_layers: int = 1  # only the first one reads the token and the features

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        layers: tuple[int, ...],
        vocab_size: int,
        draft_vocab_size: int,
        options: Any,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        positions: Positions | None = None,
        **own: Any,
    ) -> Self:
        """Derive a draft's configuration from the target's config.json.

        `dtype` and `origin` are those of `BaseConfig.of_target`, `positions` those of the dataset;
        `own` are the fields that a subclass adds.

        Raises:
            DraftError: no draft is registered for the target's family, or a size is missing.
        """
        shape = target_shape(resolve_eagle3_draft_spec, target_config, positions)
        warn_of_last_layer(layers, shape.num_hidden_layers)
        options = options.sized(shape.hidden_size, shape.num_hidden_layers)
        return cls(
            **cls.of_target(target_config, shape, options, options.num_layers, dtype, origin),
            num_hidden_layers=options.num_layers,
            target_hidden_size=shape.hidden_size,
            vocab_size=vocab_size,
            draft_vocab_size=draft_vocab_size,
            layers=layers,
            fc_norm=options.fc_norm,
            norm_output=options.norm_output,
            **own,
        )

    def to_json(self, options: Any) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            **named_class({"qk_norm": self.qk_norm}, self.architecture),
            "num_hidden_layers": self.num_hidden_layers,
            **self.shared_json(),
            "mlp_bias": self.mlp_bias,
            "norm_before_residual": self.norm_before_residual,
            "norm_before_fc": self.norm_before_fc,
            **self.shape_json(),
            # vLLM and llama.cpp take an id as the *input* of that block, SGLang (nested) as its
            # output.
            "eagle_aux_hidden_state_layer_ids": as_block_inputs(self.layers),
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": list(self.layers),
            },
            SECTION: self.own_json(self.draft, options),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple[Self, Any]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: the file is not such a draft of this project, or fields are missing.
        """
        found = cls.fields_of(
            raw,
            where,
            kind=f"an {cls.draft}" if cls.draft.startswith("e") else f"a {cls.draft}",
            architectures=(cls.architecture, WITH_QK_NORM),
            needed=("layers", "options"),
        )
        return cls(**found), from_dict(cls.options_class, raw[SECTION]["options"], where=where)
