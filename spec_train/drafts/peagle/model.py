"""The P-EAGLE draft as a model: EAGLE-3's first layer, then ordinary ones, over elements.

Element (anchor t, depth d) sits at RoPE position t + d and drafts x_{t+2+d}. At depth 0 it holds
the known token x_{t+1} and the target's states of token t; deeper ones hold the mask token and the
learned states `mask_hidden`, projected by the same `fc`. Nothing is fed back, so one forward drafts
all depths. Parameter names are the checkpoint's: layers.0 is the one with 2H inputs.

B rows, E elements, H hidden size, h / g query / key-value heads, d head size.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from spec_train.draft_options import PeagleOptions
from spec_train.drafts.aux_draft import AuxDraft
from spec_train.drafts.drafting import DraftCache
from spec_train.drafts.eagle3.config import Eagle3Config
from spec_train.drafts.eagle3.model import Eagle3Layer
from spec_train.drafts.layers import Attend, DecoderLayer, LayerShape, run_layer
from spec_train.drafts.peagle.config import PeagleConfig


class FirstLayer(Eagle3Layer):
    """EAGLE-3's layer, called like a `DecoderLayer`."""

    def forward(
        self, embedding: Tensor, carried: Tensor, cos: Tensor, sin: Tensor, attend: Attend
    ) -> Tensor:
        """Embeddings and features, both [B, E, H], at the positions of cos, sin -> [B, E, H]."""
        u, attention = self.inputs(embedding, carried), self.self_attn
        q = attention.queries(u, cos, sin)
        return self.outputs(carried, attend(q, *attention.keys_values(u, cos, sin)))


class PeagleModel(AuxDraft):
    """Modules and serving forward of a P-EAGLE draft (the loss is in `peagle_loss`)."""

    name: ClassVar[str] = "peagle"
    options_class: ClassVar[type] = PeagleOptions
    config_class: ClassVar[type[Eagle3Config]] = PeagleConfig
    config: PeagleConfig
    options: PeagleOptions

    def make_layers(self) -> None:
        """The layers, and the states of an unknown token, of unit variance."""
        config = self.config
        shape = LayerShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            rms_norm_eps=config.rms_norm_eps,
        )
        others = (DecoderLayer(shape) for _ in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([FirstLayer(config), *others])
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @property
    def scale(self) -> float:
        """Factor on attention scores."""
        return self.config.head_dim**-0.5

    def unknown_inputs(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Mask tokens [B, count] and the features of unknown states [B, count, H]."""
        unknown = self.project(self.mask_hidden)
        ids = torch.full((batch, count), self.config.mask_token_id, device=unknown.device)
        return ids, unknown.expand(batch, count, -1)

    def element_inputs(self, known: Tensor, features: Tensor, deeper: int) -> tuple[Tensor, Tensor]:
        """Tokens [B, T + deeper] and carried states [B, T + deeper, H].

        Elements of depth 0 come first, with their known tokens [B, T] and features [B, T, H]; then
        as many `deeper` ones.
        """
        masks, unknown = self.unknown_inputs(known.shape[0], deeper)
        return torch.cat([known, masks], dim=1), torch.cat([features, unknown], dim=1)

    def states(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        lengths: Tensor | None,
        attends: Sequence[Attend],
    ) -> Tensor:
        """Run the layers over elements.

        Args:
            token_ids: int64 [B, E].
            carried: features, or projected `mask_hidden`, [B, E, H].
            position_ids: RoPE positions, int64 [B, E].
            lengths: tokens of each element's document, or None (see `Rotary`).
            attends: the attention of every layer.

        Returns:
            [B, E, H]: goes to `logits`.
        """
        cos, sin = self.rotary.cos_sin(position_ids, lengths, carried.dtype)
        recompute = self.options.gradient_checkpointing
        inputs: tuple[Tensor, ...] = (self.embed(token_ids), carried)
        for layer, attend in zip(self.layers, attends, strict=True):
            inputs = (run_layer(layer, *inputs, cos, sin, attend, recompute=recompute),)
        return inputs[0]

    def logits(self, states: Tensor) -> Tensor:
        """States [..., H] -> draft logits [..., Vd]."""
        return self.lm_head(self.norm(states))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        caches: Sequence[DraftCache],
    ) -> Tensor:
        """Process rows as serving does: causal among themselves, after what `caches` hold.

        Arguments as for `states`; every layer's cache gets the new rows appended.
        """
        attends = [_causal_after(cache, self.scale) for cache in caches]
        return self.states(token_ids, carried, position_ids, None, attends)

    def new_caches(self) -> list[DraftCache]:
        """An empty cache for every layer."""
        return [DraftCache() for _ in self.layers]


def _causal_after(cache: DraftCache, scale: float) -> Attend:
    """Attention of new rows over the cached ones and, causally, over themselves."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cache.attend(q, k, v, scale)

    return attend
