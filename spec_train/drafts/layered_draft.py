"""What all drafts over captured layers share: every kind except EAGLE-1/2.

In: a dataset's manifest and training options. Out: the checks of a dataset, the configuration of a
fresh draft, and the columns that are read. A teacher is the target's distribution over the draft
vocabulary, from the final hidden states with the head, from all logits, or from the K largest.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.shards.layer_ids import recorded_layers
from spec_data.shards.schema import FINAL, Manifest, layer_column
from spec_train.drafts.base import BaseDraft, DatasetFacts
from spec_train.drafts.config import AuxConfig
from spec_train.drafts.layers import RMSNorm, Rotary, make_embedding
from spec_train.drafts.slots import check_teachers
from spec_train.drafts.targets import special_ids
from spec_train.drafts.teacher import LOGITS, TOPK
from spec_train.drafts.vocabulary import choose_vocabulary
from spec_train.formats.origin import origin_of
from spec_train.losses.head import TargetHead


class LayeredDraft(BaseDraft):
    """A draft that reads captured layers, and one column for its teachers."""

    config_class: ClassVar[type[Any]]

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise an error if a dataset lacks the layers of the draft.

        Every supervision supplies teachers.

        Raises:
            DraftError: what is missing, and how to generate it.
        """
        cls.layers_of(options, manifest)

    @classmethod
    def layers_of(cls, options: Any, manifest: Manifest) -> tuple[int, ...]:
        """Return the ascending layer ids that a fresh draft reads of a dataset.

        Raises:
            DraftError: the dataset does not have them.
        """
        recorded = recorded_layers(manifest.raw).get(cls.name)
        return options.layer_ids(manifest.layers, recorded)

    @classmethod
    def why_layers(cls, options: Any, manifest: Manifest) -> str:
        """Say why a fresh draft reads the layers of `layers_of`."""
        if options.layers != "auto":
            return "as --layers says"
        if cls.name in recorded_layers(manifest.raw):
            return f"the recipe of {cls.name}, which the dataset was captured for (--for)"
        return f"every captured layer, because the dataset was not captured with --for {cls.name}"

    @classmethod
    def choose_vocabulary(
        cls, options: Any, facts: DatasetFacts, counts: Tensor | None
    ) -> Tensor | None:
        """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all tokens.

        Raises:
            DraftError: the options cannot be met, see `drafts.vocabulary`.
        """
        special = special_ids(facts.target_config)
        return choose_vocabulary(options, facts.head.spec.vocab_size, counts, special)

    @classmethod
    def make_config(cls, options: Any, facts: DatasetFacts) -> Any:
        """Return the configuration of a fresh draft for a dataset."""
        vocab, manifest = facts.head.spec.vocab_size, facts.manifest
        chosen = facts.vocabulary
        return cls.config_class.from_target(
            facts.target_config,
            layers=cls.layers_of(options, manifest),
            vocab_size=vocab,
            draft_vocab_size=vocab if chosen is None else len(chosen),
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
            positions=facts.positions,
            **cls.own_settings(options, facts),
        )

    @classmethod
    def own_settings(cls, options: Any, facts: DatasetFacts) -> dict[str, Any]:
        """Return the configuration fields that only this kind of draft has."""
        return {}

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The columns of the captured layers, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that the loss reads of a dataset with that supervision."""
        teachers: tuple[str, ...] = (LOGITS if supervision == LOGITS else FINAL, "target_argmax")
        if supervision.startswith("topk"):
            teachers = (*TOPK, "target_argmax", "target_logsumexp")
        return ("input_ids", "loss_mask", *self.state_columns, *teachers)


# -- aux draft -------------------------------------------------------------------------------------
# What EAGLE-3 and P-EAGLE share: feature projection, final norm, and an LM head of their own.
#
# The two add the layers in between. Parameter names are those of the checkpoint. The LM head is
# over the draft vocabulary and is trained.
#
# B packs, T slots, n captured layers, H hidden size, V / Vd target / draft vocabulary.


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
