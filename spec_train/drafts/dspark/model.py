"""The DSpark draft as a model: blocks of slots that attend to the verified positions.

In: aux states of verified positions, and token ids of blocks. Out: one state per slot.

The states of a verified token become c = RMSNorm(fc(states)). Every layer projects c to keys and
values of that position, without an input norm; the layers do not change c. A block consists of the
last known token (the anchor) and mask tokens, at the anchor's position and the following ones. Its
slots see the context before the anchor, and each other in both directions; in a layer with a window
they see less (`BlockWindow`). With
`sample_from_anchor`, slot k drafts the token after its position. Without it, slots 1, 2, .. draft
the tokens of their own positions.

Embedding and LM head are the target's, frozen. The head is in `TargetHead`; the draft has a copy of
some of its rows if the draft vocabulary is a selection. If the target scales, biases or caps its
logits, the draft leaves that out, as the engines do.

B packs, T tokens, Q slots of blocks, n captured layers, H hidden size, h / g query / key-value
heads, d head size, r Markov rank, V / Vd target / draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DraftError
from spec_train.attention.masks import BlockWindow
from spec_train.drafts.dspark.config import DSparkConfig
from spec_train.drafts.dspark.heads import ConfidenceHead, MarkovHead
from spec_train.drafts.layered_draft import LayeredDraft
from spec_train.drafts.layers import DecoderLayer, RMSNorm, Rotary, make_embedding, run_layer
from spec_train.head import TargetHead
from spec_train.options.draft_options import BlockOptions, DSparkOptions

Context = Sequence[tuple[Tensor, Tensor]]
"""Keys and values [B, g, T, d] of verified positions, one pair per layer."""

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Queries [B, h, Q, d], keys and values [B, g, T + Q, d], scale -> heads [B, h, Q, d]."""


class DSparkModel(LayeredDraft):
    """Modules, forward pass and checkpoint of a block draft; the loss is in `dspark.loss`."""

    name: ClassVar[str] = "dspark"
    config_class: ClassVar[type[DSparkConfig]] = DSparkConfig

    def __init__(self, config: DSparkConfig, options: BlockOptions | None = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__()
        self.config = config
        self.options: Any = options or DSparkOptions()
        size, eps, rank = config.hidden_size, config.rms_norm_eps, config.markov_rank
        self.embed_tokens = make_embedding(config.vocab_size, size, trained=config.train_embeddings)
        self.fc = nn.Linear(len(config.layers) * config.target_hidden_size, size, bias=False)
        self.hidden_norm = RMSNorm(size, eps)
        layers = [DecoderLayer(config.layer_shape) for _ in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps)
        self.markov_head: MarkovHead | None = None
        if rank:
            sizes = config.vocab_size, config.draft_vocab_size, rank, size
            self.markov_head = MarkovHead(*sizes, config.markov_head_type)
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(
                size, rank if config.confidence_head_with_markov else 0
            )
        self.lm_head: nn.Linear | None = None
        if not self.full_vocabulary:
            self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
            self.lm_head.weight.requires_grad_(False)
        self.rotary = Rotary(config.rope)
        self.make_vocabulary()

    def head_rows(self, head: TargetHead) -> Tensor:
        """Return the frozen head rows [Vd, H] that map states to logits; `head` is the target's."""
        return head.head_weight if self.lm_head is None else self.lm_head.weight

    # -- forward ----------------------------------------------------------------------------------

    def context(
        self, aux: Tensor, position_ids: Tensor, lengths: Tensor | None = None
    ) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values [B, g, T, d] of verified positions, one pair per layer.

        Args:
            aux: their aux states [B, T, n*H].
            position_ids: int64 [B, T].
            lengths: tokens of each position's document, int64 [B, T], or None (see `Rotary`).
        """
        c = self.hidden_norm(self.fc(self.cast(aux)))  # [B, T, H]
        cos, sin = self.rotary.cos_sin(position_ids, lengths, c.dtype)
        return [layer.self_attn.keys_values(c, cos, sin) for layer in self._decoder_layers()]

    def forward_blocks(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        context: Context,
        attends: Sequence[Attend],
        lengths: Tensor | None = None,
    ) -> Tensor:
        """Return the states y [B, Q, H] of the slots of blocks, after the final norm.

        Args:
            token_ids: of the slots, int64 [B, Q].
            position_ids: of the slots, int64 [B, Q].
            context: keys and values of T positions, as `context` returns them.
            attends: per layer, the attention of the Q slots over the T context positions and then
                the Q slots.
            lengths: tokens of each slot's document, int64 [B, Q], or None (see `Rotary`).
        """
        x = self.cast(self.embed_tokens(token_ids))  # [B, Q, H]
        cos, sin = self.rotary.cos_sin(position_ids, lengths, x.dtype)
        for layer, (k0, v0), attend in zip(self._decoder_layers(), context, attends, strict=True):
            attention = _over_context(attend, k0, v0, layer.self_attn.scale)
            recompute = self.options.gradient_checkpointing
            x = run_layer(layer, x, cos, sin, attention, recompute=recompute)
        return self.norm(x)

    def per_layer(self, make: Callable[[BlockWindow | None], Attend]) -> list[Attend]:
        """Return the attention of every layer; `make` is called once for every different window."""
        windows = self.config.block_windows
        made = {window: make(window) for window in dict.fromkeys(windows)}
        return [made[window] for window in windows]

    def _decoder_layers(self) -> list[DecoderLayer]:
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def previous(self, token_ids: Tensor) -> Tensor | None:
        """Return W1 [..., r] of previous tokens, int64 [...]; None without a Markov head."""
        return None if self.markov_head is None else self.markov_head.markov_w1(token_ids)

    def config_json(self) -> dict[str, Any]:
        """Return config.json, except for the dtype of the weights."""
        return self.config.to_json(self.options, self.name)

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Return configuration and options of a config.json of this kind of draft.

        Raises:
            DraftError: the file is not a draft of this kind.
        """
        config, name, options = DSparkConfig.from_json(raw, where)
        if name != cls.name:
            raise DraftError(f"{where}: a draft of kind {name}, not {cls.name}")
        return config, options


def _over_context(
    attend: Attend, k0: Tensor, v0: Tensor, scale: float
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return a layer's attention: keys and values of the context, then those of its own slots.

    `k0`, `v0` are [B, g, T, d]; see `layers.Attend` for the shapes of the result.
    """

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # Under autocast, norms return float32 and projections bfloat16; kernels need one dtype.
        keys, values = torch.cat([k0, k], dim=2).to(v.dtype), torch.cat([v0, v], dim=2)
        return attend(q.to(v.dtype), keys, values, scale)

    return attention
