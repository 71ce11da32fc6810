"""What the drafts over captured layers share: EAGLE-3 and P-EAGLE add their own layers.

Embedding, feature projection, final norm, LM head and draft vocabulary; the way such a draft is
made for a dataset and joined to its target; its files. Parameter names are the checkpoint's; the
embedding is the target's and stays frozen, because engines replace it.

B rows, T slots, n captured layers, H hidden size, V / Vd target / draft vocabulary.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_data.shards.errors import DatasetError, DraftError
from spec_data.shards.schema import FINAL, SUPERVISED, Manifest, layer_column
from spec_train.drafts.eagle3_config import Eagle3Config
from spec_train.drafts.layers import RMSNorm, Rotary
from spec_train.drafts.shape import special_ids
from spec_train.drafts.vocabulary import WithVocabulary
from spec_train.exports.files import DraftFiles, check_tensors, read_files, write_files
from spec_train.head import TargetHead, choose_draft_vocabulary
from spec_train.origin import origin_of, require_same_embedding, weights_warning

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


class AuxDraft(WithVocabulary):
    """Shared modules, fitting and files; `make_layers` is the subclass's."""

    name: ClassVar[str]
    options_class: ClassVar[type]
    config_class: ClassVar[type[Eagle3Config]]
    embed_tokens: nn.Embedding

    def __init__(self, config: Eagle3Config, options: Any = None) -> None:
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
        aux = self._cast(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Known tokens [B, T] -> [B, T, H]."""
        return self._cast(self.embed_tokens(token_ids))

    def _cast(self, x: Tensor) -> Tensor:
        """To the dtype of the weights; autocast does that itself."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return x if autocast else x.to(self.fc.weight.dtype)

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
    def build(
        cls,
        options: Any,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
    ) -> Self:
        """Make a fresh draft for a dataset, float32, with the target's embedding and head rows.

        Random weights come from torch's default generator: seed it first.

        Raises:
            DraftError: options, target config and dataset do not go together.
        """
        cls.check_data(options, manifest)
        vocab = head.spec.vocab_size
        size = min(options.draft_vocab_size or vocab, vocab)
        config = cls.config_class.from_target(
            target_config,
            layers=options.layer_ids(manifest.layers),
            vocab_size=vocab,
            draft_vocab_size=size,
            options=options,
            dtype=manifest.target.get("dtype"),
            origin=origin_of(manifest),
            **cls.own_settings(options, target_config, manifest, head, token_counts),
        )
        if config.hidden_size != head.spec.hidden_size:
            raise DraftError(
                f"the target's config.json has hidden size {config.hidden_size}, its head "
                f"{head.spec.hidden_size}; the dataset mixes two targets"
            )
        draft = cls(config, options)
        draft.to(head.head_weight.device)
        if size < vocab:
            if token_counts is None:
                raise DraftError("a draft vocabulary needs the counts of the supervised tokens")
            special = special_ids(target_config)
            draft.set_vocabulary(choose_draft_vocabulary(token_counts, size, special))
        draft.adopt(head)
        return draft

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
    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Go on with the target of a dataset, sharing the embedding of its `head`.

        Gives warnings. `where` is what the draft was read from.

        Raises:
            DraftError: it is another target.
        """
        whose = str(Path(manifest.where).parent)
        require_same_embedding(self.embed_tokens.weight, head.embed_weight, where, whose)
        warnings = weights_warning(self.config.origin, manifest)
        self.config = dataclasses.replace(self.config, origin=origin_of(manifest))
        self._share_embedding(head)
        return warnings

    def _share_embedding(self, head: TargetHead) -> None:
        self.embed_tokens.weight = torch.nn.Parameter(head.embed_weight, requires_grad=False)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the target's embedding (shared with `head`) and, if asked, its head rows."""
        self._share_embedding(head)
        if self.options.head_init == "target":
            rows = head.head_weight[self.draft_ids] * head.spec.scale
            self.lm_head.weight.copy_(rows.to(self.lm_head.weight.dtype))

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The aux states, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Columns that the loss reads of a dataset with that supervision."""
        teacher = LOGITS if supervision == LOGITS else FINAL
        return ("input_ids", "loss_mask", *self.state_columns, teacher, "target_argmax")

    # -- files ------------------------------------------------------------------------------------

    def trainable_parameters(self) -> list[nn.Parameter]:
        """All parameters but the frozen embedding."""
        return [p for p in self.parameters() if p.requires_grad]

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors of model.safetensors, on the CPU."""
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        if not self.full_vocabulary:
            tensors["d2t"], tensors["t2d"] = self.d2t.cpu(), self.t2d.cpu()
        return tensors

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors, each in one step, weights in `dtype`.

        By default the dtype is the target's, so that the embedding is the target's bit for bit.
        """
        dtype = dtype or getattr(torch, self.config.dtype)
        write_files(self.files(dtype, str(directory)), directory)

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """What `save_pretrained` writes to the directory `where`."""
        raw = self.config.to_json(self.options)
        raw["dtype"] = raw["torch_dtype"] = str(dtype).removeprefix("torch.")
        return DraftFiles(raw, self.checkpoint_tensors(dtype), where)

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> Self:
        """Read a draft that `save_pretrained` wrote, in its stored dtype.

        Raises:
            MissingError: a file is absent.
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        return cls.from_files(read_files(directory))

    @classmethod
    def from_files(cls, files: DraftFiles) -> Self:
        """Make a draft of files in the form of `save_pretrained`, in their dtype.

        Raises:
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        config, options = cls.config_class.from_json(files.config, files.config_path)
        draft, tensors = cls(config, options), dict(files.tensors)
        expected = {k: tuple(v.shape) for k, v in draft.state_dict().items()}
        if not draft.full_vocabulary:
            expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_tensors(tensors, expected, files.weights_path)
        if not draft.full_vocabulary:
            d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
            draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            if not torch.equal(draft.t2d, t2d):
                raise DraftError(f"{files.weights_path}: d2t and t2d disagree")
        draft.to(tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        return draft
