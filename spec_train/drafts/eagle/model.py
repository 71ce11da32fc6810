"""The EAGLE-1/2 draft as a model (arXiv 2401.15077): layers over W_fc [embedding ; final hidden].

In: known tokens and final hidden states. Out: predicted final hidden states. The row of slot t
reads token x_{t+1} and the final hidden state f_t, has RoPE position t, and predicts f_{t+1}. The
target's head turns the prediction into a draft of x_{t+2}, and the next step reads it instead of
f_{t+1}. The first layer has no norm before its attention, and there is no final norm: f is taken
after the target's final norm, so its prediction enters the head directly. (Drafts of some trainers
have either norm.) `eagle.config` says how engines read the checkpoint. The embedding is the
target's and stays frozen; the head is not stored.

B packs, T slots, H hidden size, V target vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.shards.position_data import Positions
from spec_data.terminal.config import from_dict
from spec_train.drafts.base import BaseDraft
from spec_train.drafts.config import BaseConfig
from spec_train.drafts.draft_caches import LayerCaches
from spec_train.drafts.layers import DecoderLayer, RMSNorm, Rotary, make_embedding
from spec_train.drafts.targets import resolve_eagle1_draft_spec, target_shape
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.write import EAGLE as ARCHITECTURE
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import EagleOptions

# -- config ----------------------------------------------------------------------------------------
# Configuration of an EAGLE-1/2 draft: derived from the target's config.json, and its file.
#
# In: the target's config.json, or the draft's own. Out: `EagleConfig`, and the draft's
# config.json.
#
# The engines (vLLM's and SGLang's `llama_eagle.py`, SafeAILab's `cnets1.py`) read `fc.weight` [H,
# 2H] over [embedding ; state], the embedding first; `layers.N.*` of plain Llama layers, of which
# the first has **no** `input_layernorm`; no final norm; and the target's own embedding and head.
# `architectures` is vLLM's name. vLLM 0.32 loads drafts of one and of two layers unchanged, and
# every round accepts the tokens that `spec_train.decoding.chains` accepts (measured).
#
# The engines differ in the bias of `fc`. SafeAILab's loader makes one unless config.json has
# `"bias": false`. vLLM has none and refuses a file with one. SGLang always has one and leaves it
# at
# *random values* if the file has none. Drafts that are fitted here have no bias and write
# `"bias": false`. For SGLang the file needs an `fc.bias` of zeros and the architecture name
# `LlamaForCausalLMEagle`; it refuses the file as written here.
#
# Drafts of other trainers may have the bias, a norm before the first layer's attention, and a norm
# of the prediction (AutoModel has both norms, under ModelOpt's names of the keys). Such a draft is
# read and can be fitted further; no option makes a new one.


@dataclass(frozen=True, kw_only=True)
class EagleConfig(BaseConfig):
    """Shapes and arithmetic of the draft."""

    of_files: ClassVar[tuple[str, ...]] = (
        *("bias", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    )
    switches: ClassVar[tuple[str, ...]] = (*BaseConfig.switches, *of_files)

    bias: bool = False  # of fc
    use_input_layernorm_in_first_layer: bool = False
    use_last_layernorm: bool = False  # of the prediction

    @classmethod
    def from_target(
        cls,
        target_config: dict[str, Any],
        *,
        vocab_size: int,
        options: EagleOptions,
        dtype: str | None = None,
        origin: dict[str, Any] | None = None,
        positions: Positions | None = None,
    ) -> "EagleConfig":
        """Derive a draft's configuration from the target's config.json.

        `dtype` and `origin` are those of `BaseConfig.of_target`, `positions` those of the dataset.

        Raises:
            DraftError: no draft is registered for the target's family, or a size is missing.
        """
        shape = target_shape(resolve_eagle1_draft_spec, target_config, positions)
        return cls(
            **cls.of_target(target_config, shape, options, options.num_layers, dtype, origin),
            num_hidden_layers=options.num_layers,
            vocab_size=vocab_size,
        )

    @property
    def draft_vocab_size(self) -> int:
        """The full vocabulary: the head is the target's."""
        return self.vocab_size

    @property
    def target_hidden_size(self) -> int:
        """Width of the target's states, which the draft predicts: its own width."""
        return self.hidden_size

    @property
    def layers(self) -> tuple[int, ...]:
        """No captured layer: the draft reads only the final hidden states."""
        return ()

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            **self.shared_json(),
            "bias": self.bias,  # SafeAILab's loader makes one if there is no such key
            "mlp_bias": self.mlp_bias,
            **self.shape_json(),
            SECTION: self.own_json("eagle", options),
        }

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> tuple["EagleConfig", EagleOptions]:
        """Read a config.json that `to_json` wrote.

        Raises:
            DraftError: the file is not an EAGLE-1/2 draft of this project, or fields are missing.
        """
        found = cls.fields_of(raw, where, kind="an EAGLE-1/2", architectures=(ARCHITECTURE,))
        return cls(**found), from_dict(EagleOptions, raw[SECTION]["options"], where=where)


# -- model -----------------------------------------------------------------------------------------


class EagleModel(BaseDraft):
    """Modules, serving forward pass and checkpoint of an EAGLE-1/2 draft."""

    def __init__(self, config: EagleConfig, options: EagleOptions | None = None) -> None:
        """Make a draft with random weights."""
        super().__init__()
        self.config = config
        self.options = options or EagleOptions()
        size = config.hidden_size
        self.embed_tokens = make_embedding(config.vocab_size, size, trained=config.train_embeddings)
        self.fc = nn.Linear(2 * size, size, bias=config.bias)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer_shape) for _ in range(config.num_hidden_layers)
        )
        if not config.use_input_layernorm_in_first_layer:
            self.layers[0].add_module("input_layernorm", nn.Identity())
        if config.use_last_layernorm:
            self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Rotary(config.rope)
        self.scale = config.head_dim**-0.5  # factor on the attention scores

    def fuse(self, token_ids: Tensor, states: Tensor) -> Tensor:
        """Map known tokens, int64 [B, T], and states [B, T, H] to the layers' input [B, T, H]."""
        embedding = self.cast(self.embed_tokens(token_ids))
        return self.fc(torch.cat([embedding, self.cast(states)], dim=-1))

    def predict(self, output: Tensor) -> Tensor:
        """Map the last layer's output [B, T, H] to the predicted states [B, T, H]."""
        return self.norm(output) if self.config.use_last_layernorm else output

    def project(self, states: Tensor) -> Tensor:
        """Cast the target's final hidden states [B, T, H] to the input of `step`."""
        return self.cast(states)

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
            carried: the target's states, or the result of an earlier `step`, [B, T, H].
            position_ids: RoPE positions, int64 [B, T].
            cache: the rows processed so far; the new rows are appended.
            seen: which rows, old and new, a new row sees, bool [T, length] or [B, 1, T, length];
                None: causal.

        Returns:
            Predicted next states [B, T, H], for the target's head and for the next `step`.
        """
        caches = cache or LayerCaches(len(self.layers))
        cos, sin = self.rotary.cos_sin(position_ids, None, carried.dtype)
        x = self.fuse(token_ids, carried)
        windows = self.config.windows
        for layer, held, window in zip(self.layers, caches.layers, windows, strict=True):
            attend = partial(held.attend, scale=self.scale, seen=seen, window=window)
            x = layer(x, cos, sin, attend)
        return self.predict(x)

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Return configuration and options of a config.json of this kind of draft."""
        return EagleConfig.from_json(raw, where)


class HeadedEagle:
    """A draft with its target's head: a `drafting.ChainDraft`."""

    def __init__(self, draft: EagleModel, head: TargetHead) -> None:
        """Combine them without a copy."""
        self._draft, self._head = draft, head
        self.draft_ids = torch.arange(draft.config.vocab_size, device=draft.fc.weight.device)
        self.project, self.step = draft.project, draft.step

    def logits(self, hidden: Tensor) -> Tensor:
        """Map predicted states [..., H] to the target head's logits, float32 [..., V]."""
        return self._head.logits(hidden)
