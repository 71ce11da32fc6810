"""What the drafts over captured layers share: EAGLE-3 and P-EAGLE add their own layers.

Feature projection, final norm and an LM head of its own over the draft vocabulary. Parameter names
are the checkpoint's.

B rows, T slots, n captured layers, H hidden size, V / Vd target / draft vocabulary.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DatasetError, DraftError
from spec_data.shards.schema import FINAL, SUPERVISED, Manifest
from spec_train.drafts.base import BaseDraft
from spec_train.drafts.config import AuxConfig
from spec_train.drafts.layers import RMSNorm, Rotary
from spec_train.head import TargetHead
from spec_train.origin import origin_of

LOGITS = "logits"
"""The column, and the supervision, of a dataset that holds all logits of the target."""


def check_teachers(manifest: Manifest, options: Any) -> None:
    """Refuse a dataset that does not hold the teachers of the slots that are asked for.

    A teacher is the target's distribution over the whole draft vocabulary: final states and the
    head give it, all logits do, the K largest logits do not. A slot needs the one of its known
    token. Slots "serving" have a supervised token after it, which is where `--final supervised`
    keeps states; "shifted" has slots that do not.

    Raises:
        DatasetError: the dataset has no such distributions.
        DraftError: some teachers would be zero.
    """
    if manifest.supervision.startswith("topk"):
        raise DatasetError(
            f"{manifest.where}: --supervision {manifest.supervision} keeps too few logits to learn "
            "from: the draft needs the target's distribution over its whole vocabulary. Generate "
            "with --supervision final-hidden, or logits where the target's head rules that out"
        )
    if manifest.final == SUPERVISED and options.slots != "serving":
        raise DraftError(
            f"--slots {options.slots} needs hidden.final at the end of every turn too, and "
            f"{manifest.where} keeps it only where the next token is supervised; use --slots "
            "serving, or generate with --final all"
        )


class AuxDraft(BaseDraft):
    """Shared modules; `make_layers` is the subclass's."""

    config_class: ClassVar[type[Any]]

    def __init__(self, config: AuxConfig, options: Any = None) -> None:
        """Make a draft with random weights and the first Vd tokens as draft vocabulary."""
        super().__init__()
        self.config: Any = config
        self.options: Any = options or self.options_class()
        size, eps = config.hidden_size, config.rms_norm_eps
        count, width = len(config.layers), config.target_hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.embed_tokens.weight.requires_grad_(False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, size, bias=False)
        self.make_layers()
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.rotary = Rotary(config.rope)
        self.attention_backend = "auto"  # or one of attention.BACKENDS
        self.make_vocabulary()

    def make_layers(self) -> None:
        """Make the layers between `fc` and `norm`."""
        raise NotImplementedError

    def project(self, aux: Tensor) -> Tensor:
        """Aux states [B, T, n*H] -> features [B, T, H]."""
        aux = self.cast(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Known tokens [B, T] -> [B, T, H]."""
        return self.cast(self.embed_tokens(token_ids))

    # -- fitting ----------------------------------------------------------------------------------

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Refuse a dataset that lacks teachers or layers.

        Raises:
            DatasetError, DraftError: what is missing, and how to generate it.
        """
        check_teachers(manifest, options)
        options.layer_ids(manifest.layers)

    @classmethod
    def make_config(
        cls,
        options: Any,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> Any:
        """The configuration of a fresh draft for a dataset."""
        vocab = head.spec.vocab_size
        return cls.config_class.from_target(
            target_config,
            layers=options.layer_ids(manifest.layers),
            vocab_size=vocab,
            draft_vocab_size=min(options.draft_vocab_size or vocab, vocab),
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
            **cls.own_settings(options, target_config, manifest, head, token_counts),
        )

    @classmethod
    def own_settings(
        cls,
        options: Any,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        counts: Tensor | None,
    ) -> dict[str, Any]:
        """Fields of the config that only this kind of draft has."""
        return {}

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the target's embedding (shared with `head`) and, if asked, its head rows."""
        self.share(head)
        if self.options.head_init == "target":
            rows = head.head_weight[self.draft_ids] * head.spec.scale
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.dtype))

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads of a dataset with that supervision."""
        teacher = LOGITS if supervision == LOGITS else FINAL
        return ("input_ids", "loss_mask", *self.state_columns, teacher, "target_argmax")

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Configuration and options of a config.json of this kind of draft."""
        return cls.config_class.from_json(raw, where)
