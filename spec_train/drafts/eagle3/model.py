"""The EAGLE-3 draft as a model (arXiv 2503.01840): decoder layers over (token, carried state).

In: known tokens and features of the target's states. Out: the carried state of every row, which
goes to the LM head and into the next step. The row of slot t reads token x_{t+1} and the states of
token t, has RoPE position t and drafts x_{t+2}. The carried state is the last layer's output before
the final norm, or after it with `norm_output`. The first layer reads token and carried state; later
ones, if there are any, are ordinary layers. One layer is named `midlayer` in a checkpoint, several
are `layers.0`, `layers.1`, ..., as engines name them.

B packs, T slots, H hidden size, h query heads, d head size, r rotary dimensions, Vd draft
vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.models.families import TargetShape
from spec_data.shards.layer_ids import as_block_inputs
from spec_train.data.batch import DraftBatch
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import AuxDraft
from spec_train.drafts.layers import Attend, Attention, DecoderLayer, GatedMLP, RMSNorm
from spec_train.drafts.unroll import AutoregressiveDraft
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.write import EAGLE3, WITH_QK_NORM, named_class
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import Eagle3Options


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(DraftConfig):
    """Shapes and arithmetic of the draft.

    Every engine can read its config.json: `architectures`, both keys for the layer ids (engines
    disagree on the meaning of an id), no null fields.
    """

    draft: ClassVar[str] = "eagle3"
    architectures: ClassVar[tuple[str, ...]] = (EAGLE3, WITH_QK_NORM)
    switches: ClassVar[tuple[str, ...]] = (
        *DraftConfig.switches,
        *("norm_before_fc", "norm_before_residual"),
    )

    num_hidden_layers: int = 1  # only the first one reads the token and the features
    fc_norm: bool = False  # an RMSNorm per captured layer
    norm_output: bool = False  # the carried state is normed
    norm_before_fc: bool = False  # one RMSNorm over all captured layers
    norm_before_residual: bool = False  # the first layer adds to its normalised input

    @classmethod
    def from_options(cls, options: Any, shape: TargetShape) -> dict[str, Any]:
        """Return the switches of the norms."""
        return {"fc_norm": options.fc_norm, "norm_output": options.norm_output}

    def to_json(self, options: Any) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            **named_class({"qk_norm": self.qk_norm}, self.architectures[0]),
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
            SECTION: self.own_json(options),
        }


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


class Eagle3Model(AuxDraft, AutoregressiveDraft):
    """Modules and serving forward pass of an EAGLE-3 draft."""

    name: ClassVar[str] = "eagle3"
    options_class: ClassVar[type[Any]] = Eagle3Options
    config_class: ClassVar[type[DraftConfig]] = Eagle3Config

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

    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Return embeddings and carried states, both [B, T, H]."""
        return self.embed(token_ids), carried

    def feedback(self, output: Tensor) -> Tensor:
        """Map the last layer's output [..., H] to the carried state [..., H]."""
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, carried: Tensor) -> Tensor:
        """Map a carried state [..., H] to the input of the LM head [..., H]."""
        return carried if self.config.norm_output else self.norm(carried)

    def logits(self, carried: Tensor) -> Tensor:
        """Map carried states [..., H] to draft logits [..., Vd]."""
        return self.lm_head(self.head_input(carried))

    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return `logits`: the draft has its own head."""
        return self.logits

    def states_of(self, batch: DraftBatch) -> Tensor:
        """Return the captured layers of a batch [B, T, n*H]."""
        return batch.aux(self.config.layers)
