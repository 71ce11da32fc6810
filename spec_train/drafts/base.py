"""What all drafts share: the vocabulary, the settings, building and joining to a target, the files.

Every draft has an `fc` and the target's embedding. The embedding stays frozen, because engines
replace it with the target's own; with `train_embeddings` it is the draft's own and is trained. The
checkpoint holds the parameters under their module names. If the draft cannot propose every token,
it also holds `d2t` int64 [Vd], which are *offsets* (target id = i + d2t[i]), and `t2d` bool [V].

V / Vd target / draft vocabulary.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.position_data import Positions
from spec_data.shards.schema import Manifest
from spec_train.data.batch import DraftBatch
from spec_train.drafts.protocol import DraftLoss
from spec_train.formats.draft_files import DraftFiles, check_tensors, read_files, write_files
from spec_train.formats.origin import (
    embedding_warnings,
    origin_of,
    origin_warnings,
    require_same_embedding,
)
from spec_train.losses.head import TargetHead

# -- initial ---------------------------------------------------------------------------------------
# Initial weights of a new draft's matrices: normal with one standard deviation, or torch's own.


@torch.no_grad()
def draw_weights(draft: nn.Module, deviation: float) -> None:
    """Draw the matrices of all trained linear layers, [out, in], from N(0, deviation ** 2).

    Biases become zero. Norms, tables of embeddings, vectors of their own and frozen weights stay as
    they are. 0 leaves everything as torch made it: uniform, standard deviation 1 / sqrt(3 in).
    Random numbers come from torch's default generator.
    """
    if not deviation:
        return
    for module in draft.modules():
        if isinstance(module, nn.Linear) and module.weight.requires_grad:
            module.weight.normal_(0.0, deviation)
            if module.bias is not None:
                module.bias.zero_()


# -- base ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DatasetFacts:
    """What a fresh draft is built from."""

    target_config: dict[str, Any]  # the target's config.json
    manifest: Manifest
    head: TargetHead
    token_counts: Tensor | None  # supervised tokens by id, int64 [V], if known
    positions: Positions | None = None  # of the target; None: the dataset does not record them
    vocabulary: Tensor | None = None  # target ids of the draft vocabulary, int64 [Vd]; None: all


class BaseDraft(nn.Module):
    """A subclass adds modules, a loss, and the dataset columns that it reads."""

    name: ClassVar[str]
    options_class: ClassVar[type]
    config: Any
    options: Any
    embed_tokens: nn.Embedding
    fc: nn.Linear
    attention_backend: str = "auto"  # see `use_attention`
    # The vocabulary; a draft over the target's full vocabulary may skip `make_vocabulary`.
    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor  # int64 [Vd], ascending
    draft_index: Tensor  # int64 [V]: draft index of a target id, or -1

    # -- settings ---------------------------------------------------------------------------------

    def use_options(self, options: Any) -> None:
        """Replace the training options; those that decide a shape must stay the same."""
        self.options = options

    def update_config(self, **changes: Any) -> None:
        """Replace fields of the configuration that decide no tensor's shape."""
        self.config = dataclasses.replace(self.config, **changes)

    def use_attention(self, backend: str) -> None:
        """Choose the attention back end: "auto", or one of `BACKENDS` of the attention module.

        The loss and `chains` use it. All back ends compute the same function.
        """
        self.attention_backend = backend

    def stop_below(self, confidence: float) -> None:
        """Accept 0 only: without a confidence head, no draft ends early (see protocol.Draft)."""
        if confidence:
            raise ConfigError("has no confidence head")

    # -- vocabulary -------------------------------------------------------------------------------

    def make_vocabulary(self) -> None:
        """Start with the first Vd tokens."""
        for name in ("d2t", "t2d", "draft_ids", "draft_index"):
            self.register_buffer(name, None, persistent=False)
        self.set_vocabulary(torch.arange(self.config.draft_vocab_size))

    @property
    def full_vocabulary(self) -> bool:
        """Whether the draft can propose every token of the target; no map is saved then."""
        return self.config.draft_vocab_size == self.config.vocab_size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids of the draft vocabulary, ascending int64 [Vd].

        Raises:
            DraftError: the ids are not Vd ascending unique numbers in 0..V-1.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        ids = ids.to(self.fc.weight.device, torch.long)
        ascending = bool((ids[1:] > ids[:-1]).all())
        if ids.shape != (size,) or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise DraftError(
                f"draft vocabulary: expected {size} ascending unique ids in 0..{vocab - 1}, "
                f"found a tensor of shape {tuple(ids.shape)} that is not; the map was damaged"
            )
        rows = torch.arange(size, device=ids.device)
        self.draft_ids = ids
        self.d2t = ids - rows
        self.draft_index = torch.full((vocab,), -1, device=ids.device)
        self.draft_index[ids] = rows
        self.t2d = self.draft_index >= 0

    def cast(self, x: Tensor) -> Tensor:
        """Cast `x` [...] to the dtype of the weights. Under autocast, return it as it is."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return x if autocast else x.to(self.fc.weight.dtype)

    # -- loss -------------------------------------------------------------------------------------

    def loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch (see protocol.Draft).

        `counts` are the float64 [S] of `slot_counts`; None: those of this batch.
        """
        raise NotImplementedError

    def forward(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss: a distributed wrapper calls `forward`."""
        return self.loss(batch, head, counts)

    def zero_loss(self) -> Tensor:
        """Return a loss of zero [] that is connected to every trainable parameter.

        For a batch without a supervised slot: optimizers and all-reduces then see zero gradients
        instead of missing ones.
        """
        return sum((p.flatten()[0] * 0 for p in self.trainable_parameters()), torch.zeros(()))

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return all parameters except the target's, in a fixed order."""
        return [p for p in self.parameters() if p.requires_grad]

    # -- building ---------------------------------------------------------------------------------

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise an error if the draft cannot be trained on a dataset (see protocol.Draft)."""
        raise NotImplementedError

    @classmethod
    def choose_vocabulary(
        cls, options: Any, facts: DatasetFacts, counts: Tensor | None
    ) -> Tensor | None:
        """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all tokens.

        `counts` are how often each token is a supervised token, int64 [V], if known.
        """
        return None

    @classmethod
    def make_config(cls, options: Any, facts: DatasetFacts) -> Any:
        """Return the configuration of a fresh draft for a dataset."""
        raise NotImplementedError

    @classmethod
    def build(
        cls,
        options: Any,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
        vocabulary_counts: Tensor | None = None,
        positions: Positions | None = None,
    ) -> Self:
        """Make a fresh float32 draft for a dataset, with the frozen weights of its target.

        Random weights come from torch's default generator: seed it first. `token_counts` are the
        supervised tokens by id, int64 [V]; a draft vocabulary smaller than V is chosen by them, or
        by `vocabulary_counts`. `positions` are those of the target, None if the dataset does not
        record them.

        Raises:
            DraftError: options, target config and dataset do not fit together.
        """
        cls.check_data(options, manifest)
        facts = DatasetFacts(
            target_config=target_config,
            manifest=manifest,
            head=head,
            token_counts=token_counts,
            positions=positions,
        )
        counts = token_counts if vocabulary_counts is None else vocabulary_counts
        facts = dataclasses.replace(facts, vocabulary=cls.choose_vocabulary(options, facts, counts))
        config = cls.make_config(options, facts)
        if config.hidden_size != head.spec.hidden_size:
            raise DraftError(
                f"the dataset mixes two targets: target/config.json has hidden size "
                f"{config.hidden_size}, target/head.safetensors has {head.spec.hidden_size}; "
                "generate it again"
            )
        draft = cls(config, options)
        draw_weights(draft, options.initializer_range)
        draft.to(head.head_weight.device)
        if facts.vocabulary is not None:
            draft.set_vocabulary(facts.vocabulary)
        draft.adopt(head)
        return draft

    @torch.no_grad()
    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Connect a draft to the target of a dataset; share the frozen weights of its `head`.

        `where` is the path that the draft was read from, for messages. Returns warnings.

        Raises:
            DraftError: the draft belongs to another target.
        """
        own, whose = self.embed_tokens.weight, str(Path(manifest.where).parent)
        warnings = []
        if self.config.train_embeddings and own.shape == head.embed_weight.shape:
            warnings = embedding_warnings(own, head.embed_weight, trained=True)
        else:
            require_same_embedding(own, head.embed_weight, where, whose)
        warnings += origin_warnings(self.config.origin, manifest)
        self.update_config(origin=origin_of(manifest))
        self.share(head)
        return warnings

    def share(self, head: TargetHead) -> None:
        """Use the target's embedding, frozen, without a copy; a trained one stays as it is."""
        if self.config.train_embeddings:
            return
        self.embed_tokens.weight = nn.Parameter(head.embed_weight, requires_grad=False)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the weights from the target that a fresh draft starts with."""
        if self.config.train_embeddings:
            own = self.embed_tokens.weight
            own.copy_(head.embed_weight.to(own.dtype))
        self.share(head)

    # -- files ------------------------------------------------------------------------------------

    def config_json(self) -> dict[str, Any]:
        """Return config.json, except for the dtype of the weights."""
        return self.config.to_json(self.options)

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Return configuration and options of a config.json that `config_json` wrote."""
        raise NotImplementedError

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of model.safetensors, on the CPU; floats in `dtype`."""
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        if not self.full_vocabulary:
            tensors["d2t"], tensors["t2d"] = self.d2t.cpu(), self.t2d.cpu()
        return tensors

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write config.json and model.safetensors, each atomically, with weights in `dtype`.

        None: the target's dtype, so that the saved embedding equals the target's bit for bit.
        """
        dtype = dtype or getattr(torch, self.config.dtype)
        write_files(self.files(dtype, str(directory)), directory)

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """Return what `save_pretrained` writes to the directory `where`."""
        raw = self.config_json()
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
        """Make a draft from files in the form of `save_pretrained`, in their dtype.

        Raises:
            DraftError: tensors are missing, unexpected or of another shape; all are named.
        """
        config, options = cls.read_config(files.config, files.config_path)
        draft, tensors = cls(config, options), dict(files.tensors)
        expected = {k: tuple(v.shape) for k, v in draft.state_dict().items()}
        if not draft.full_vocabulary:
            expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_tensors(tensors, expected, files.weights_path)
        if not draft.full_vocabulary:
            d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
            try:
                draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            except DraftError as error:
                raise DraftError(f"{files.weights_path}: {error}") from None
            if not torch.equal(draft.t2d, t2d):
                raise DraftError(
                    f"{files.weights_path}: d2t and t2d name different tokens of the draft "
                    "vocabulary; the file was edited or damaged"
                )
        draft.to(tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        return draft
