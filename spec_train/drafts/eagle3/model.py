"""The EAGLE-3 draft as a model (arXiv 2503.01840): decoder layers over (token, carried state).

In: known tokens and features of the target's states. Out: the carried state of every row, which
goes to the LM head and into the next step. The row of slot t reads token x_{t+1} and the states of
token t, has RoPE position t and drafts x_{t+2}. The carried state is the last layer's output before
the final norm, or after it with `norm_output`. The first layer reads token and carried state; later
ones, if there are any, are ordinary layers. One layer is named `midlayer` in a checkpoint, several
are `layers.0`, `layers.1`, ..., as engines name them.

B packs, T slots, n captured layers, H hidden size, h / g query / key-value heads, d head size,
r rotary dimensions, V / Vd target / draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_data.shards.layer_ids import as_block_inputs
from spec_data.shards.position_data import Positions
from spec_data.terminal.config import from_dict
from spec_train.drafts.config import AuxConfig
from spec_train.drafts.draft_caches import LayerCaches
from spec_train.drafts.layered_draft import AuxDraft
from spec_train.drafts.layers import Attend, Attention, DecoderLayer, GatedMLP, RMSNorm
from spec_train.drafts.targets import (
    resolve_eagle3_draft_spec,
    target_shape,
    warn_of_last_layer,
)
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.write import EAGLE3, WITH_QK_NORM, named_class
from spec_train.options.draft_options import Eagle3Options

# -- config ----------------------------------------------------------------------------------------
# Configuration of an EAGLE-3 draft (arXiv 2503.01840): derived from the target's config.json.
#
# In: the target's config.json, or the draft's own. Out: `Eagle3Config`, and the draft's
# config.json. Every engine can read that file: `architectures`, both keys for the layer ids
# (engines disagree on the meaning of an id), no null fields. Keys that only this project needs are
# in `spec_train`.


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(AuxConfig):
    """Shapes and arithmetic of the draft. Layer id: block output, counted from 0."""

    draft: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = EAGLE3
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


# -- model -----------------------------------------------------------------------------------------


class Eagle3Layer(nn.Module):
    """The first decoder layer, split at its attention, which the caller computes."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make norms, attention projections (of inputs of width 2H) and MLP."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config.layer_shape, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config.layer_shape)
        self._norm_before_residual = config.norm_before_residual

    def inputs(self, embedding: Tensor, carried: Tensor) -> Tensor:
        """Join embeddings and carried states, both [B, T, H]: attention input [B, T, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(carried)], dim=-1)

    def outputs(self, u: Tensor, carried: Tensor, heads: Tensor) -> Tensor:
        """Return the output [B, T, H] of the attention heads [B, h, T, d].

        `u` [B, T, 2H] is the result of `inputs` for the carried states [B, T, H]. Its second half
        is the normed carried state, which is the residual with `norm_before_residual`.
        """
        residual = u[..., carried.shape[-1] :] if self._norm_before_residual else carried
        middle = residual + self.self_attn.join(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))

    def forward(
        self, embedding: Tensor, carried: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """Map embeddings and carried states, both [B, T, H], to [B, T, H]; cos, sin [B, T, r]."""
        u, attention = self.inputs(embedding, carried), self.self_attn
        q = attention.queries(u, cos, sin)
        return self.outputs(u, carried, attend(q, *attention.keys_values(u, cos, sin)))


class Eagle3Model(AuxDraft):
    """Modules and serving forward pass of an EAGLE-3 draft; the loss is in `eagle3.loss`."""

    name: ClassVar[str] = "eagle3"
    options_class: ClassVar[type] = Eagle3Options
    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config

    def make_layers(self) -> None:
        """Make the layers, under the names of the checkpoint."""
        first, count = Eagle3Layer(self.config), self.config.num_hidden_layers
        if count == 1:
            self.midlayer = first
        else:
            later = (DecoderLayer(self.config.layer_shape) for _ in range(1, count))
            self.layers = nn.ModuleList([first, *later])

    @property
    def decoder_layers(self) -> list[Any]:
        """The layers, the first one an `Eagle3Layer`, the others `DecoderLayer`s."""
        return [self.midlayer] if self.config.num_hidden_layers == 1 else list(self.layers)

    def feedback(self, output: Tensor) -> Tensor:
        """Map the layer's output [..., H] to the carried state [..., H]."""
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, carried: Tensor) -> Tensor:
        """Map a carried state [..., H] to the input of the LM head [..., H]."""
        return carried if self.config.norm_output else self.norm(carried)

    def logits(self, carried: Tensor) -> Tensor:
        """Map carried states [..., H] to draft logits [..., Vd]."""
        return self.lm_head(self.head_input(carried))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: LayerCaches | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process T new rows as serving does, after the rows in `cache`.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: features of `project`, or the result of an earlier `step`, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: the rows processed so far; the new rows are appended.
            seen: which rows, old and new, a new row sees, bool [T, length] or [B, 1, T, length];
                None: causal.

        Returns:
            Carried states [B, T, H], for `logits` and for the next `step`.
        """
        caches = cache or self.new_cache()
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        inputs: tuple[Tensor, ...] = (self.embed(token_ids), carried)
        layers = zip(self.decoder_layers, caches.layers, self.config.windows, strict=True)
        for layer, held, window in layers:
            attend = partial(held.attend, scale=self.scale, seen=seen, window=window)
            inputs = (layer(*inputs, cos, sin, attend),)
        return self.feedback(inputs[0])

    def new_cache(self) -> LayerCaches:
        """Return an empty cache for every layer."""
        return LayerCaches(self.config.num_hidden_layers)

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.config.head_dim**-0.5
