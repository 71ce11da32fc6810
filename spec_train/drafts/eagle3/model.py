"""The EAGLE-3 draft as a model (arXiv 2503.01840): one decoder layer over (token, carried state).

In: known tokens and features of the target's states. Out: the carried state of every row, which
goes to the LM head and into the next step. The row of slot t reads token x_{t+1} and the states of
token t, has RoPE position t and drafts x_{t+2}. The carried state is the layer's output before the
final norm, or after it with `norm_output`.

B packs, T slots, n captured layers, H hidden size, h / g query / key-value heads, d head size,
r rotary dimensions, V / Vd target / draft vocabulary.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from spec_train.draft_options import Eagle3Options
from spec_train.drafts.aux_draft import AuxDraft
from spec_train.drafts.drafting import DraftCache
from spec_train.drafts.eagle3.config import Eagle3Config
from spec_train.drafts.layers import Attention, GatedMLP, RMSNorm


class Eagle3Layer(nn.Module):
    """The decoder layer, split at its attention, which the caller computes."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make norms, attention projections (of inputs of width 2H) and MLP."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Attention(config.layer_shape, input_size=2 * size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(config.layer_shape)

    def inputs(self, embedding: Tensor, carried: Tensor) -> Tensor:
        """Join embeddings and carried states, both [B, T, H]: attention input [B, T, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(carried)], dim=-1)

    def outputs(self, carried: Tensor, heads: Tensor) -> Tensor:
        """Map the residual [B, T, H] and attention heads [B, h, T, d] to the output [B, T, H]."""
        middle = carried + self.self_attn.join(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Eagle3Model(AuxDraft):
    """Modules and serving forward pass of an EAGLE-3 draft; the loss is in `eagle3.loss`."""

    name: ClassVar[str] = "eagle3"
    options_class: ClassVar[type] = Eagle3Options
    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config

    def make_layers(self) -> None:
        """Make the one layer."""
        self.midlayer = Eagle3Layer(self.config)

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
        cache: DraftCache | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process T new rows as serving does, after the rows in `cache`.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: features of `project`, or the result of an earlier `step`, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: the rows processed so far; the new rows are appended.
            seen: which rows, old and new, a new row sees, bool [T, length]; None: causal.

        Returns:
            Carried states [B, T, H], for `logits` and for the next `step`.
        """
        attention = self.midlayer.self_attn
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        u = self.midlayer.inputs(self.embed(token_ids), carried)
        q = attention.queries(u, cos, sin)
        k, v = attention.keys_values(u, cos, sin)
        window = self.config.windows[0]
        heads = (cache or DraftCache()).attend(q, k, v, attention.scale, seen, window)
        return self.feedback(self.midlayer.outputs(carried, heads))
