"""What EAGLE-3 and P-EAGLE share: feature projection, final norm, and an LM head of their own.

The two add the layers in between. Parameter names are those of the checkpoint. The LM head is over
the draft vocabulary and is trained.

B packs, T slots, n captured layers, H hidden size, V / Vd target / draft vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, nn

from spec_data.shards.schema import Manifest
from spec_train.drafts.config import AuxConfig
from spec_train.drafts.layered_draft import LayeredDraft
from spec_train.drafts.layers import RMSNorm, Rotary, make_embedding
from spec_train.drafts.slots import check_teachers
from spec_train.head import TargetHead


class AuxDraft(LayeredDraft):
    """The shared modules; a subclass implements `make_layers`."""

    def __init__(self, config: AuxConfig, options: Any = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__()
        self.config: Any = config
        self.options: Any = options or self.options_class()
        size, eps = config.hidden_size, config.rms_norm_eps
        count, width = len(config.layers), config.target_hidden_size
        self.embed_tokens = make_embedding(config.vocab_size, size, trained=config.train_embeddings)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, size, bias=False)
        self.make_layers()
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope)
        self.make_vocabulary()

    def make_layers(self) -> None:
        """Make the layers between `fc` and `norm`."""
        raise NotImplementedError

    def project(self, aux: Tensor) -> Tensor:
        """Project aux states [B, T, n*H] to features [B, T, H], in the dtype of the weights."""
        aux = self.cast(aux)
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)  # n times [B, T, H]
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed known tokens, int64 [B, T] -> [B, T, H] in the dtype of the weights."""
        return self.cast(self.embed_tokens(token_ids))

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise an error if a dataset lacks teachers of the slots asked for, or layers.

        A slot needs the teacher of its known token, see `slots.check_teachers`.

        Raises:
            DatasetError, DraftError: what is missing, and how to generate it.
        """
        super().check_data(options, manifest)
        check_teachers(options.slots, manifest)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Share the target's embedding and, with `head_init = "target"`, copy its head rows."""
        super().adopt(head)
        if self.options.head_init == "target":
            rows = head.head_weight[self.draft_ids] * head.spec.scale  # [Vd, H]
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.dtype))

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Return configuration and options of a config.json of this kind of draft."""
        return cls.config_class.from_json(raw, where)
