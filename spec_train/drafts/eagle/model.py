"""The EAGLE-1/2 draft as a model: decoder layers over W_fc [embedding ; final hidden state].

Row (token x_{t+1}, final hidden state f_t) sits at RoPE position t. Its output is the prediction of
f_{t+1}: through the target's head it drafts x_{t+2}, and it is fed back in the place of f_{t+1}.
The first layer norms nothing before its attention, and nothing norms the output: f is after the
target's final norm, so its prediction is what enters the head. See `eagle_config` for how engines
read the checkpoint; the embedding is the target's and stays frozen, the head is never stored.

B rows, T slots, H hidden size, V target vocabulary.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from spec_train.draft_options import EagleOptions
from spec_train.drafts.base import BaseDraft
from spec_train.drafts.drafting import LayerCaches
from spec_train.drafts.eagle.config import EagleConfig
from spec_train.drafts.layers import DecoderLayer, Rotary
from spec_train.head import TargetHead


class EagleModel(BaseDraft):
    """Modules, serving forward and checkpoint of an EAGLE-1/2 draft."""

    def __init__(self, config: EagleConfig, options: EagleOptions | None = None) -> None:
        """Make a draft with random weights."""
        super().__init__()
        self.config = config
        self.options = options or EagleOptions()
        size = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer_shape) for _ in range(config.num_hidden_layers)
        )
        self.layers[0].add_module("input_layernorm", nn.Identity())
        self.rotary = Rotary(config.rope)
        self.scale = config.head_dim**-0.5  # of the attention scores
        self.attention_backend = "auto"  # or one of attention.BACKENDS

    def fuse(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Known tokens [B, T] and states [B, T, H] -> input of the layers [B, T, H]."""
        embedding = self.cast(self.embed_tokens(token_ids))
        return self.fc(torch.cat([embedding, self.cast(states)], dim=-1))

    def project(self, states: Tensor) -> Tensor:
        """The target's final hidden states [B, T, H] as `step` takes them."""
        return self.cast(states)

    def step(
        self,
        token_ids: Tensor,
        carried: Tensor,
        position_ids: Tensor,
        cache: LayerCaches | None = None,
        seen: Tensor | None = None,
    ) -> Tensor:
        """Process rows as serving does, after what `cache` holds.

        Args:
            token_ids: known tokens, int64 [B, T].
            carried: the target's states, or what an earlier `step` returned, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: rows processed so far; the new rows are appended to it.
            seen: which rows, old and new, a new row sees, bool [T, length]; None: causal.

        Returns:
            Predicted next states [B, T, H]: go through the target's head, and into the next `step`.
        """
        caches = cache or LayerCaches(len(self.layers))
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        x = self.fuse(token_ids, carried)
        for layer, held in zip(self.layers, caches.layers, strict=True):
            x = layer(x, cos, sin, partial(held.attend, scale=self.scale, seen=seen))
        return x

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Configuration and options of a config.json of this kind of draft."""
        return EagleConfig.from_json(raw, where)


class HeadedEagle:
    """A draft with its target's head: what drafting chains asks for (see chain.ChainDraft)."""

    def __init__(self, draft: EagleModel, head: TargetHead) -> None:
        """Share both."""
        self._draft, self._head = draft, head
        self.draft_ids = torch.arange(draft.config.vocab_size, device=draft.fc.weight.device)
        self.project, self.step = draft.project, draft.step

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's head over predicted states: [..., H] -> float32 [..., V]."""
        return self._head.logits(hidden)
