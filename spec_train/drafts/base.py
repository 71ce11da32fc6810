"""What every draft does alike: its vocabulary, how it is made and joined to a target, its files.

A draft has an `fc` and the target's embedding, which stays frozen, because engines replace it.
Files hold its parameters under the checkpoint's names and, where it cannot propose every token,
`d2t` int64 [Vd], *offsets* (target id = i + d2t[i]), and `t2d` bool [V].

V / Vd target / draft vocabulary.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.schema import Manifest, layer_column
from spec_train.drafts.targets import special_ids
from spec_train.formats.draft_files import DraftFiles, check_tensors, read_files, write_files
from spec_train.head import TargetHead, choose_draft_vocabulary
from spec_train.origin import origin_of, require_same_embedding, weights_warning


class BaseDraft(nn.Module):
    """A subclass makes modules and loss, and says what it reads of a dataset."""

    name: ClassVar[str]
    options_class: ClassVar[type]
    config: Any
    options: Any
    embed_tokens: nn.Embedding
    fc: nn.Linear
    # of the vocabulary; a draft that speaks the target's whole one may leave it unmade
    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor  # int64 [Vd], ascending
    draft_index: Tensor  # int64 [V], row of a target id or -1

    # -- vocabulary -------------------------------------------------------------------------------

    def make_vocabulary(self) -> None:
        """Begin with the first Vd tokens."""
        for name in ("d2t", "t2d", "draft_ids", "draft_index"):
            self.register_buffer(name, None, persistent=False)
        self.set_vocabulary(torch.arange(self.config.draft_vocab_size))

    @property
    def full_vocabulary(self) -> bool:
        """Whether the draft can propose every token of the target (no map is saved then)."""
        return self.config.draft_vocab_size == self.config.vocab_size

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids of the draft vocabulary, ascending int64 [Vd].

        Raises:
            DraftError: ids are not ascending, unique, within 0..V-1 and Vd in number.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        ids = ids.to(self.fc.weight.device, torch.long)
        ascending = bool((ids[1:] > ids[:-1]).all())
        if ids.shape != (size,) or not ascending or int(ids[0]) < 0 or int(ids[-1]) >= vocab:
            raise DraftError(
                f"draft vocabulary: {tuple(ids.shape)} ids must be {size} ascending unique ids "
                f"in 0..{vocab - 1}"
            )
        rows = torch.arange(size, device=ids.device)
        self.draft_ids = ids
        self.d2t = ids - rows
        self.draft_index = torch.full((vocab,), -1, device=ids.device)
        self.draft_index[ids] = rows
        self.t2d = self.draft_index >= 0

    def cast(self, x: Tensor) -> Tensor:
        """To the dtype of the weights; autocast does that itself."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return x if autocast else x.to(self.fc.weight.dtype)

    # -- fitting ----------------------------------------------------------------------------------

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Refuse a dataset that cannot be learned from (see protocol.Draft)."""
        raise NotImplementedError

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
    ) -> Self:
        """Make a fresh draft for a dataset, float32, with what it takes from the target.

        Random weights come from torch's default generator: seed it first.

        Raises:
            DraftError: options, target config and dataset do not go together.
        """
        cls.check_data(options, manifest)
        config = cls.make_config(options, target_config, manifest, head, token_counts)
        if config.hidden_size != head.spec.hidden_size:
            raise DraftError(
                f"the target's config.json has hidden size {config.hidden_size}, its head "
                f"{head.spec.hidden_size}; the dataset mixes two targets"
            )
        draft = cls(config, options)
        draft.to(head.head_weight.device)
        if not draft.full_vocabulary:
            if token_counts is None:
                raise DraftError("a draft vocabulary needs the counts of the supervised tokens")
            special = special_ids(target_config)
            size = config.draft_vocab_size
            draft.set_vocabulary(choose_draft_vocabulary(token_counts, size, special))
        draft.adopt(head)
        return draft

    @torch.no_grad()
    def join(self, head: TargetHead, manifest: Manifest, where: str) -> list[str]:
        """Go on with the target of a dataset, sharing the frozen weights of its `head`.

        Gives warnings. `where` is what the draft was read from.

        Raises:
            DraftError: it is another target.
        """
        whose = str(Path(manifest.where).parent)
        require_same_embedding(self.embed_tokens.weight, head.embed_weight, where, whose)
        warnings = weights_warning(self.config.origin, manifest)
        self.replace_config(origin=origin_of(manifest))
        self.share(head)
        return warnings

    def set_options(self, options: Any) -> None:
        """Replace the options, for example those that a resumed run may change."""
        self.options = options

    def replace_config(self, **changes: Any) -> None:
        """Replace fields of the configuration that do not affect what the draft computes."""
        self.config = dataclasses.replace(self.config, **changes)

    def set_confidence_threshold(self, threshold: float) -> None:
        """Refuse a threshold above 0: this draft has no confidence head (see protocol.Draft)."""
        if threshold:
            raise ConfigError(
                f"--confidence-threshold {threshold}: this {self.name} draft has no confidence "
                "head; leave it out"
            )

    def share(self, head: TargetHead) -> None:
        """Hold the target's frozen weights without a copy: its embedding."""
        self.embed_tokens.weight = nn.Parameter(head.embed_weight, requires_grad=False)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take from the target what a fresh draft begins with."""
        self.share(head)

    def trainable_parameters(self) -> list[nn.Parameter]:
        """All parameters but the target's."""
        return [p for p in self.parameters() if p.requires_grad]

    @property
    def state_columns(self) -> tuple[str, ...]:
        """The aux states, ascending."""
        return tuple(layer_column(k) for k in self.config.layers)

    # -- files ------------------------------------------------------------------------------------

    def config_json(self) -> dict[str, Any]:
        """config.json, but for the dtype of the weights."""
        return self.config.to_json(self.options)

    @classmethod
    def read_config(cls, raw: dict[str, Any], where: str) -> tuple[Any, Any]:
        """Configuration and options of a config.json that `config_json` wrote."""
        raise NotImplementedError

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
        """Make a draft of files in the form of `save_pretrained`, in their dtype.

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
            draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            if not torch.equal(draft.t2d, t2d):
                raise DraftError(f"{files.weights_path}: d2t and t2d disagree")
        draft.to(tensors["fc.weight"].dtype)
        draft.load_state_dict(tensors)
        return draft
