"""The EAGLE-1/2 draft as a model (arXiv 2401.15077): layers over W_fc [embedding ; final hidden].

In: known tokens and final hidden states. Out: predicted final hidden states. The row of slot t
reads token x_{t+1} and the final hidden state f_t, has RoPE position t, and predicts f_{t+1}. The
target's head turns the prediction into a draft of x_{t+2}, and the next step reads it instead of
f_{t+1}. The first layer has no norm before its attention, and there is no final norm: f is taken
after the target's final norm, so its prediction enters the head directly. (Drafts of some trainers
have either norm.) The embedding is the target's and stays frozen; the head is not stored.

B packs, T slots, H hidden size, V target vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DatasetError
from spec_data.shards.schema import FINAL, Manifest, data_problem
from spec_train.data.batch import DraftBatch
from spec_train.drafts.config import DraftConfig
from spec_train.drafts.layers import DecoderLayer, RMSNorm, Rotary, make_embedding
from spec_train.drafts.unroll import AutoregressiveDraft
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.write import EAGLE
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import EagleOptions


@dataclass(frozen=True, kw_only=True)
class EagleConfig(DraftConfig):
    """Shapes and arithmetic of the draft.

    The engines (vLLM's and SGLang's `llama_eagle.py`, SafeAILab's `cnets1.py`) read `fc.weight` [H,
    2H] over [embedding ; state], the embedding first; `layers.N.*` of plain Llama layers, of which
    the first has **no** `input_layernorm`; no final norm; and the target's own embedding and head.
    `architectures` is vLLM's name. vLLM 0.32 loads drafts of one and of two layers unchanged, and
    every round accepts the tokens that `spec_train.decoding.chains` accepts (measured).

    The engines differ in the bias of `fc`. SafeAILab's loader makes one unless config.json has
    `"bias": false`. vLLM has none and refuses a file with one. SGLang always has one and leaves it
    at *random values* if the file has none. Drafts that are fitted here have no bias and write
    `"bias": false`. For SGLang the file needs an `fc.bias` of zeros and the architecture name
    `LlamaForCausalLMEagle`; it refuses the file as written here.

    Drafts of other trainers may have the bias, a norm before the first layer's attention, and a
    norm of the prediction (AutoModel has both norms, under ModelOpt's names of the keys). Such a
    draft is read and can be fitted further; no option makes a new one.
    """

    draft: ClassVar[str] = "eagle"
    architectures: ClassVar[tuple[str, ...]] = (EAGLE,)
    reads_layers: ClassVar[bool] = False
    not_keys: ClassVar[tuple[str, ...]] = (
        *DraftConfig.not_keys,
        *("target_hidden_size", "draft_vocab_size"),
    )
    of_files: ClassVar[tuple[str, ...]] = (
        *("bias", "use_input_layernorm_in_first_layer", "use_last_layernorm"),
    )
    switches: ClassVar[tuple[str, ...]] = (*DraftConfig.switches, *of_files)

    bias: bool = False  # of fc
    use_input_layernorm_in_first_layer: bool = False
    use_last_layernorm: bool = False  # of the prediction

    def to_json(self, options: EagleOptions) -> dict[str, Any]:
        """Return config.json of the draft."""
        return {
            "architectures": [EAGLE],
            "model_type": "llama",
            **self.shared_json(),
            "bias": self.bias,  # SafeAILab's loader makes one if there is no such key
            "mlp_bias": self.mlp_bias,
            **self.shape_json(),
            SECTION: self.own_json(options),
        }


class EagleModel(AutoregressiveDraft):
    """Modules, dataset columns and checkpoint of an EAGLE-1/2 draft."""

    name: ClassVar[str] = "eagle"
    options_class: ClassVar[type[Any]] = EagleOptions
    config_class: ClassVar[type[DraftConfig]] = EagleConfig

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

    @property
    def decoder_layers(self) -> list[Any]:
        """The layers."""
        return list(self.layers)

    def project(self, states: Tensor) -> Tensor:
        """Cast the target's final hidden states [B, T, H]."""
        return self.cast(states)

    def layer_inputs(self, token_ids: Tensor, carried: Tensor) -> tuple[Tensor, ...]:
        """Join known tokens, int64 [B, T], and carried states [B, T, H]: [B, T, H]."""
        return (self.fc(torch.cat([self.embed(token_ids), self.cast(carried)], dim=-1)),)

    def feedback(self, output: Tensor) -> Tensor:
        """Map the last layer's output [B, T, H] to the predicted states [B, T, H]."""
        return self.norm(output) if self.config.use_last_layernorm else output

    def states_of(self, batch: DraftBatch) -> Tensor:
        """Return the final hidden states of a batch [B, T, H]."""
        return batch.hidden[FINAL]

    def logits_with(self, head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return the logits of the target's head."""
        return head.logits

    @classmethod
    def check_data(cls, options: EagleOptions, manifest: Manifest) -> None:
        """Raise an error if a dataset lacks the final hidden states of some tokens.

        Raises:
            DatasetError: what is missing, and how to generate it.
        """
        if problem := data_problem("eagle", manifest.supervision, manifest.final):
            raise DatasetError(f"{manifest.where}: {problem}")

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The final hidden states."""
        return (FINAL,)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that the loss reads; the same with every supervision."""
        return ("input_ids", "loss_mask", FINAL, "target_argmax")


class EagleWithHead:
    """A draft with its target's head: a `drafting.ChainDraft`."""

    def __init__(self, draft: EagleModel, head: TargetHead) -> None:
        """Combine them without a copy."""
        self._head = head
        self.draft_ids = torch.arange(draft.config.vocab_size, device=draft.fc.weight.device)
        self.project, self.step = draft.project, draft.step

    def logits(self, hidden: Tensor) -> Tensor:
        """Map predicted states [..., H] to the target head's logits, float32 [..., V]."""
        return self._head.logits(hidden)
