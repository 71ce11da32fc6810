"""The P-EAGLE draft as a model (arXiv 2602.01469): EAGLE-3's layer, then Llama layers, on elements.

In: tokens and features of elements. Out: one state per element, for the LM head. Element (anchor t,
depth d) has RoPE position t + d and drafts x_{t+2+d}. At depth 0 it holds the known token x_{t+1}
and the target's states of token t. A deeper element holds the mask token and the learned states
`mask_hidden`, projected by the same `fc`. No output is fed back, so one forward pass drafts all
depths. Parameter names are those of the checkpoint: layers.0 is the one with inputs of width 2H.

B packs, T slots, E elements of a pack, n captured layers, H hidden size, h / g query / key-value
heads, d head size, r rotary dimensions, Vd draft vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_train.attention.masked import Attending
from spec_train.attention.masks import AttentionMask
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.draft import AuxDraft
from spec_train.drafts.drafting import KVCache
from spec_train.drafts.eagle3.draft import Eagle3Config, Eagle3Layer
from spec_train.drafts.layers import Attend, DecoderLayer, run_layer
from spec_train.formats.write import PEAGLE, WITH_QK_NORM
from spec_train.options.draft_options import PeagleOptions


@dataclass(frozen=True, kw_only=True)
class PeagleConfig(Eagle3Config):
    """An EAGLE-3 configuration with more layers and a mask token.

    The file has vLLM's flat form (`method: eagle3` with `parallel_drafting: true`), because no
    other engine drafts in parallel. The architecture name is `Eagle3LlamaForCausalLM`. vLLM puts
    "Eagle3" before every name that neither starts nor ends with it, also before
    PeagleLlamaForCausalLM, and then does not know the result. That leaves two names for a Llama
    draft. This is the one that neither the EAGLE-3 drafts of this project nor SGLang use; SGLang
    would feed the draft its own states. Both keys for the mask token are written: vLLM reads the
    first that it finds.
    """

    draft: ClassVar[str] = "peagle"
    architectures: ClassVar[tuple[str, ...]] = (PEAGLE, WITH_QK_NORM)

    mask_token_id: int

    def to_json(self, options: PeagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        out = super().to_json(options)
        out["ptd_token_id"] = self.mask_token_id
        return out


class PeagleModel(AuxDraft):
    """Modules and serving forward pass of a P-EAGLE draft; the loss is in `peagle.loss`."""

    name: ClassVar[str] = "peagle"
    options_class: ClassVar[type[Any]] = PeagleOptions
    config_class: ClassVar[type[DraftConfig]] = PeagleConfig
    config: PeagleConfig
    options: PeagleOptions

    def make_layers(self) -> None:
        """Make the layers, and `mask_hidden` [1, 1, n*H] with unit variance."""
        config, shape = self.config, self.config.layer_shape
        others = (DecoderLayer(shape) for _ in range(1, config.num_hidden_layers))
        self.layers = nn.ModuleList([Eagle3Layer(config), *others])
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, self.fc.in_features))

    @property
    def reach(self) -> int | None:
        """How many positions back an element's state depends on inputs; None: all of them."""
        windows = [window for window in self.config.windows if window is not None]
        return sum(windows) - len(windows) if len(windows) == len(self.layers) else None

    def unknown_inputs(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        """Return mask tokens, int64 [B, count], and projected `mask_hidden`, [B, count, H]."""
        unknown = self.project(self.mask_hidden)
        ids = torch.full((batch, count), self.config.mask_token_id, device=unknown.device)
        return ids, unknown.expand(batch, count, -1)

    def element_inputs(self, known: Tensor, features: Tensor, deeper: int) -> tuple[Tensor, Tensor]:
        """Return tokens, int64 [B, T + deeper], and carried states [B, T + deeper, H].

        The elements of depth 0 come first: known tokens, int64 [B, T], and features [B, T, H]. They
        are followed by the inputs of `deeper` deeper elements.
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
            lengths: tokens of each element's document, int64 [B, E], or None (see `Rotary`).
            attends: the attention of every layer.

        Returns:
            States [B, E, H], for `logits`.
        """
        cos, sin = self.rotary.cos_sin(position_ids, lengths, carried.dtype)
        recompute = self.options.gradient_checkpointing
        inputs: tuple[Tensor, ...] = (self.embed(token_ids), carried)
        for layer, attend in zip(self.layers, attends, strict=True):
            inputs = (run_layer(layer, *inputs, cos, sin, attend, recompute=recompute),)
        return inputs[0]

    def logits(self, states: Tensor) -> Tensor:
        """Map states [..., H] to draft logits [..., Vd]."""
        return self.lm_head(self.norm(states))

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        caches: Sequence[KVCache],
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process rows as serving does: causal, after the rows in `caches` (one per layer).

        The other arguments and the result [B, E, H] are those of `states`. The new rows are
        appended to the caches. `seen` bool [B, 1, E, length]: which rows, old and new, a new row
        sees; None: causal.
        """
        attends = [
            partial(cache.attend, scale=self.scale, seen=seen, window=window)
            for cache, window in zip(caches, self.config.windows, strict=True)
        ]
        return self.states(token_ids, carried, position_ids, None, attends)

    def attendings(self, mask_of: Callable[[int | None], AttentionMask]) -> list[Attending]:
        """Prepare every layer's mask; `mask_of` returns that of a layer with a window."""
        prepared = {
            window: Attending.prepare(mask_of(window), self.config.head_dim, self.attention_backend)
            for window in set(self.config.windows)
        }
        return [prepared[window] for window in self.config.windows]
