"""The EAGLE-3 draft as a model: one decoder layer over (known token, carried state).

Row (token x_{t+1}, states of token t) sits at RoPE position t and drafts x_{t+2}. The state fed
back is the layer's output before the final norm (after it with `norm_output`).

B rows, T slots, n captured layers, H hidden size, h / g query / key-value heads, d head size,
V / Vd target / draft vocabulary.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from spec_train.drafts.aux_draft import AuxDraft
from spec_train.drafts.drafting import DraftCache
from spec_train.drafts.eagle3.config import Eagle3Config, Eagle3Options
from spec_train.drafts.layers import GatedMLP, RMSNorm, rotate


class Eagle3Attention(nn.Module):
    """Projections of the layer's attention; the attention itself is the caller's."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make the projections: inputs are 2H wide."""
        super().__init__()
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        wide, size = 2 * config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(wide, config.num_attention_heads * size, bias=False)
        self.k_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.v_proj = nn.Linear(wide, config.num_key_value_heads * size, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * size, config.hidden_size, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def queries(self, u: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotated queries [B, h, T, d] of layer inputs [B, T, 2H]."""
        return rotate(self._heads(self.q_proj(u)), cos, sin)

    def keys_values(self, u: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, g, T, d] of layer inputs [B, T, 2H]."""
        return rotate(self._heads(self.k_proj(u)), cos, sin), self._heads(self.v_proj(u))

    def join(self, heads: Tensor) -> Tensor:
        """Heads [B, h, T, d] -> [B, T, H]."""
        return self.o_proj(heads.transpose(1, 2).flatten(2))


class Eagle3Layer(nn.Module):
    """The decoder layer, split where the attention sits."""

    def __init__(self, config: Eagle3Config) -> None:
        """Make norms, attention projections and MLP."""
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = GatedMLP(size, config.intermediate_size)

    def inputs(self, embedding: Tensor, carried: Tensor) -> Tensor:
        """Both [B, T, H] -> attention input [B, T, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(carried)], dim=-1)

    def outputs(self, carried: Tensor, heads: Tensor) -> Tensor:
        """Residual [B, T, H] and attention heads [B, h, T, d] -> layer output [B, T, H]."""
        middle = carried + self.self_attn.join(heads)
        return middle + self.mlp(self.post_attention_layernorm(middle))


class Eagle3Model(AuxDraft):
    """Modules and serving forward of an EAGLE-3 draft (the loss is in `eagle3`)."""

    name: ClassVar[str] = "eagle3"
    options_class: ClassVar[type] = Eagle3Options
    config_class: ClassVar[type[Eagle3Config]] = Eagle3Config

    def make_layers(self) -> None:
        """One layer over both inputs."""
        self.midlayer = Eagle3Layer(self.config)

    def feedback(self, output: Tensor) -> Tensor:
        """The layer's output as it is carried to the next step."""
        return self.norm(output) if self.config.norm_output else output

    def head_input(self, carried: Tensor) -> Tensor:
        """A carried state as it enters the LM head."""
        return carried if self.config.norm_output else self.norm(carried)

    def logits(self, carried: Tensor) -> Tensor:
        """Carried states o [..., H] -> draft logits [..., Vd]."""
        return self.lm_head(self.head_input(carried))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: DraftCache | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process rows as serving does, after what `cache` holds.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: features of `project`, or what an earlier `step` returned, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: rows processed so far; the new rows are appended to it.
            seen: which rows, old and new, a new row sees, bool [T, length]; None: causal.

        Returns:
            o [B, T, H]: goes to `logits`, and into the next `step` as `carried`.
        """
        attention = self.midlayer.self_attn
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        u = self.midlayer.inputs(self.embed(token_ids), carried)
        q = attention.queries(u, cos, sin)
        k, v = attention.keys_values(u, cos, sin)
        heads = (cache or DraftCache()).attend(q, k, v, attention.scale, seen)
        return self.feedback(self.midlayer.outputs(carried, heads))
