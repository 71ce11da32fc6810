"""The draft as the trainer, the evaluation and the export see it: one abstract class.

A kind of draft subclasses `Draft` with its modules, its loss and its drafter, in a package of its
own; nothing else in the training loop or in decoding changes. `LayersDraft` adds what all kinds
share that read captured layers, and `AuxDraft` the modules of EAGLE-3 and P-EAGLE.

Every draft has an `fc` and the target's embedding. The embedding stays frozen, because engines
replace it with the target's own; with `train_embeddings` it is the draft's own and is trained. The
checkpoint holds the parameters under their module names. If the draft cannot propose every token,
it also holds `d2t` int64 [Vd], which are *offsets* (target id = i + d2t[i]), and `t2d` bool [V].

B packs, T slots of a pack, S steps or terms of a loss, n captured layers, H hidden size,
V / Vd target / draft vocabulary.
"""

import contextlib
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spec_data.shards.batch import DraftBatch
from spec_data.shards.documents import Document, Origin
from spec_data.shards.errors import ConfigError, DatasetError, DraftError
from spec_data.shards.identity import OWN_HEAD
from spec_data.shards.position_data import Positions
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, Manifest, data_problem, layer_column
from spec_data.terminal.config import from_dict
from spec_train.attention.masked import default_backend
from spec_train.data.collate import collate, supervision_of
from spec_train.drafts.config import DraftConfig, special_ids
from spec_train.drafts.drafting import Drafter, KVCache
from spec_train.drafts.layers import RMSNorm, Rotary
from spec_train.drafts.mask_token import settle_mask_token
from spec_train.drafts.output import Connected, DraftOutput
from spec_train.drafts.teacher import LOGITS, TOPK
from spec_train.drafts.vocabulary import choose_vocabulary
from spec_train.formats.draft_files import DraftFiles, check_tensors, read_files, write_files
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.origin import (
    embedding_warnings,
    origin_of,
    origin_warnings,
    require_same_embedding,
    require_same_tokens,
)
from spec_train.formats.push import push_folder
from spec_train.losses.head import TargetHead
from spec_train.losses.metrics import summarise
from spec_train.losses.own import Asked, LossFunction, OwnLoss, ScoredRows, asking
from spec_train.options.kinds import DRAFT_OPTIONS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class DraftLoss:
    """A loss, already divided by the counts of the whole optimizer step, and its metrics."""

    loss: Tensor  # scalar with a graph
    sums: dict[str, Tensor]  # float64, no graph, additive; `Draft.summarise` makes metrics of them


@contextlib.contextmanager
def own_numbers(seed: int | None, device: torch.device, keep: bool = False) -> Iterator[None]:
    """Draw random numbers from `seed` inside, and none of the caller's.

    None: draw the caller's; with `keep`, they come again afterwards.
    """
    if seed is None and not keep:
        yield
        return
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        yield


class Draft(nn.Module, ABC):
    """A draft model with its own loss."""

    config_class: ClassVar[type[DraftConfig]]
    options_class: ClassVar[type[Any]]
    name: ClassVar[str]  # the kind of draft, as its configuration has it
    one_step: ClassVar[bool] = False  # trained for one token, it drafts more from its own states
    recipe_layers: ClassVar[int] = 0
    """How many layers `spec-data generate --for` captures; 0: the final hidden states alone. Of a
    draft of this project, `spec_data.shards.layer_ids` says it."""
    architectures: ClassVar[tuple[str, ...]] = ()
    """Of a class that takes the place of one of this project: the targets (`architectures` of their
    config.json) whose drafts of this kind it is."""
    code: ClassVar[str] = ""
    """What a draft from outside is named by, as files say it: medusa.py:Medusa; see `kinds`."""
    not_muon: ClassVar[frozenset[str]] = frozenset()
    """Parts of names of parameters that AdamW moves with --optimizer muon, as it moves those named
    embed_tokens and lm_head: embeddings and heads of other names."""
    _head: tuple[Any, TargetHead] | None = None  # that of the last document; no module of the draft
    loss_fn: OwnLoss | None = None  # instead of the loss of the options
    attention_backend: str = "auto"  # or one of `masked.BACKENDS`: all compute the same
    _logged: frozenset[Any] = frozenset()  # what it was chosen for
    progress: float = 1.0  # share of a run's steps that are done, for losses that change with it
    # The vocabulary; a draft over the target's full vocabulary may skip `make_vocabulary`.
    d2t: Tensor
    t2d: Tensor
    draft_ids: Tensor  # int64 [Vd], ascending
    draft_index: Tensor  # int64 [V]: draft index of a target id, or -1

    def __init_subclass__(cls) -> None:
        """Take the name of the configuration's kind of draft, and its options."""
        super().__init_subclass__()
        if "config_class" in vars(cls):
            cls.name = cls.config_class.draft
            if "options_class" not in vars(cls) and cls.name in DRAFT_OPTIONS:
                cls.options_class = DRAFT_OPTIONS[cls.name]

    def __init__(self, config: Any, options: Any = None) -> None:
        """Make the target's embedding; a subclass makes the other modules."""
        super().__init__()
        self.config: Any = config
        self.options: Any = options or self.options_class()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.train_embeddings)

    def __dir__(self) -> list[str]:
        """Return the public names: of the draft, of its modules, and of `nn.Module`."""
        return [name for name in super().__dir__() if not name.startswith("_")]

    @property
    def main_weight(self) -> Tensor:
        """A weight that has the dtype and the device of the draft's layers."""
        fc: nn.Linear | None = getattr(self, "fc", None)
        if fc is not None:
            return fc.weight
        own = (p for n, p in self.named_parameters() if not n.startswith("embed_tokens."))
        return next(own, self.embed_tokens.weight)

    @property
    def backend(self) -> str:
        """The attention back end, for the device and the dtype in which layers compute now."""
        if self.attention_backend != "auto":
            return self.attention_backend
        weight, shape = self.main_weight, self.config
        kind = weight.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        heads = shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim
        backend = default_backend(weight.device, dtype, heads)
        if (kind, dtype) not in self._logged:
            self._logged |= {(kind, dtype)}
            log.info("draft attention on %s, %s, head size %d: %s", kind, dtype, heads[2], backend)
        return backend

    # -- drafting ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def state_columns(self) -> tuple[str, ...]:
        """Dataset columns of the states that serving feeds the draft, in concatenation order."""

    @property
    def depth(self) -> int:
        """Default number of drafted tokens: the number it was trained for."""
        return int(self.options.round_length)

    @property
    def max_depth(self) -> int | None:
        """Largest number of drafted tokens; None: no limit."""
        return None

    @abstractmethod
    def drafter(self, head: TargetHead) -> Drafter:
        """Start drafting one sequence. `head` is the target's, on the draft's device."""

    @abstractmethod
    def chains(
        self, batch: DraftBatch, head: TargetHead, depth: int, *, scored_only: bool = False
    ) -> Tensor:
        """Draft greedily from every slot as serving would, without the target.

        `scored_only` leaves out most drafts that no metric counts (see `slots.ScoredSlots`): at
        slots outside responses, and after a draft that the target or the document contradicts.

        Returns:
            Target ids, int64 [B, T, depth]. Entry (t, d) is the draft for token t + 2 + d of the
            document, given the tokens up to t + 1. Slots without a known token (the last of a
            document, padding) hold meaningless drafts: ignore them. -1: the draft ended its round
            before that depth, or the draft was left out.
        """

    def stop_below(self, confidence: float) -> None:
        """End a drafted block before its first token of a lower confidence; 0: never.

        Raises:
            ConfigError: the draft has no confidence head.
        """
        if confidence:
            raise ConfigError("has no confidence head")

    # -- training ---------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise DatasetError or DraftError if the draft cannot be trained on a dataset."""

    @classmethod
    def check_fresh(cls, dataset: HiddenStatesDataset) -> None:
        """Raise DatasetError if a dataset lacks what a fresh draft begins with."""

    @abstractmethod
    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that `loss` reads of a dataset with that `supervision` (Manifest)."""

    @abstractmethod
    def slot_counts(self, batch: DraftBatch) -> Tensor:
        """Return the denominators of the loss, float64 [S]; add them over micro-batches and ranks.

        Torch's generator has the same state here as before `loss` of the same batch, so a draft
        that samples slots counts the slots that its loss will use. The batch has no states here,
        and may be padding only (a rank without a batch).
        """

    def forward(
        self,
        batch: DraftBatch | Document | Any,
        head: TargetHead | None = None,
        counts: Tensor | None = None,
        loss_fn: LossFunction | None = None,
    ) -> DraftOutput:
        """Return the loss of a batch, and its rows: logits, labels, teacher and weights.

        Args:
            batch: of a dataset (`loader`, `collate`), of a running target, or documents in any form
                that `collate` takes. It is moved to the draft's device.
            head: of the target; what was read from a dataset brings it.
            counts: denominators of the loss, as `slot_counts`, float64 [S]. None: in training mode
                those of this batch as `fit` has them, otherwise those of its slots.
            loss_fn: called instead of the loss of the options, for some rows at a time: logits
                [n, Vd], teacher (`TeacherRows`: `p` [n, Vd], `label` int64 [n], `mass`, `rest`) and
                weights [n], which hold the denominators; it returns the sum of weights * loss, or
                these products [n].

        Returns:
            `loss`, `sums`, and what is computed at its first use. In several processes, every
            parameter has a gradient.

        Raises:
            DatasetError: a document lacks a column that the draft reads; a batch without a head.
            ConfigError: `loss_fn` does not add up over rows.
        """
        rows: list[ScoredRows] = []
        own = self.loss_fn if loss_fn is None else OwnLoss(loss_fn)
        with asking(Asked(own, rows)):
            found = self._scored(batch, head, counts)
        output = DraftOutput(self._on_all_ranks(found.loss), found.sums)
        size, like = self.config.draft_vocab_size, found.loss
        return output.keep(rows, lambda: like.detach().new_zeros(0, size))

    loss = forward
    """The same by another name: `draft.loss(batch).loss` is the scalar."""

    def counts(self, batch: DraftBatch | Document | Any) -> Tensor:
        """Return what `forward` divides a batch by, float64 [S]: add them up over batches, ranks.

        As `slot_counts`, of all that `forward` takes, with the numbers that it draws.
        """
        if not isinstance(batch, DraftBatch):
            batch = collate(batch, ())
        batch = batch.without_hidden().to(self.embed_tokens.weight.device)
        with own_numbers(batch.seed, batch.input_ids.device, keep=True):
            return self.slot_counts(batch)

    def scored(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch with the draft's `loss_fn`, without keeping its rows."""
        with asking(Asked(self.loss_fn)):
            return self._scored(batch, head, counts)

    def _scored(self, batch: Any, head: TargetHead | None, counts: Tensor | None) -> DraftLoss:
        batch, head = self.inputs(batch, head)
        device = batch.input_ids.device
        if counts is None and self.training:
            counts = self.counts(batch)
        with own_numbers(batch.seed, device):
            return self.batch_loss(batch, head, counts)

    def _on_all_ranks(self, loss: Tensor) -> Tensor:
        """Return a loss that is connected to every parameter, if there are other processes."""
        group = torch.distributed
        alone = not (group.is_available() and group.is_initialized()) or group.get_world_size() == 1
        if alone or not loss.requires_grad:
            return loss
        zero = loss.detach() * 0
        connected: Tensor = Connected.apply(loss, zero, *self.parameters_outside_units())
        return connected

    @abstractmethod
    def batch_loss(self, batch: DraftBatch, head: TargetHead, counts: Tensor | None) -> DraftLoss:
        """Return the loss of a batch over the counts of the whole optimizer step.

        Losses of micro-batches therefore add up. `counts` are those of `slot_counts`, float64 [S];
        None: those of this batch. A padding-only batch has loss zero, and sums of the same names
        and shapes as other batches. Random numbers come from torch's default generator, which the
        trainer seeds by the batch's index in the run: a run that resumes, or uses another number of
        ranks, draws the same numbers.
        """

    @torch.no_grad()
    def propose(self, document: Document | Any, tokens: int = 0) -> Tensor:
        """Draft greedily from every token of a document, as serving would, without the target.

        Args:
            document: `ds[i]`. tokens: how many are drafted; 0: as many as it was trained for.

        Returns:
            Target ids, int64 [T, tokens]: row t has drafts for t + 2, t + 3, ..., given the tokens
            up to t + 1 and the states up to t. -1: the draft ended before. Its last row says
            nothing: no token follows the state there.

        Raises:
            ConfigError: `tokens` is negative, or more than it can draft at once.
            DatasetError: the document lacks a column that the draft reads.
        """
        if tokens < 0:
            raise ConfigError(f"tokens={tokens}: draft at least one token, or 0 for {self.depth}")
        if self.max_depth is not None and tokens > self.max_depth:
            raise ConfigError(f"tokens={tokens}: this draft drafts at most {self.max_depth}")
        batch, head = self.inputs(document, None)
        return self.chains(batch, head, tokens or self.depth)[0]

    def inputs(
        self, batch: DraftBatch | Document | Any, head: TargetHead | None
    ) -> tuple[DraftBatch, Any]:
        """Return a batch where the draft is, and the target's head; both are made if need be.

        States are widened to the dtype of the weights, except under autocast. A draft with a head
        of its own needs no other, if the teacher is no states.

        Raises:
            DatasetError: no documents, or one lacks a column that the draft reads; no head, and no
                dataset that has it.
        """
        weight = self.embed_tokens.weight
        if not isinstance(batch, DraftBatch):
            batch = collate(batch, self.columns(supervision_of(batch)))
        wider = None
        if not torch.is_autocast_enabled(weight.device.type):
            states = [v.dtype for name, v in batch.hidden.items() if name.startswith("hidden.")]
            if any(dtype != torch.promote_types(dtype, weight.dtype) for dtype in states):
                wider = torch.promote_types(states[0], weight.dtype)
        if wider is not None or batch.input_ids.device != weight.device or batch.coded:
            batch = batch.to(weight.device, wider)
        if head is None and batch.origin is not None:
            head = self._head_of(batch.origin)
        if head is None and (FINAL in batch.hidden or getattr(self, "lm_head", None) is None):
            raise DatasetError(
                "a batch needs the target's head: pass spec_train.TargetHead.from_dataset(ds)"
            )
        return batch, head

    def _head_of(self, origin: Origin) -> TargetHead:
        """Return the head of the target of a dataset; that of the last batch is kept."""
        weight = self.embed_tokens.weight
        key = origin.head or origin.fingerprint, weight.dtype, weight.device
        if self._head is None or self._head[0] != key:
            self._head = key, TargetHead.from_dataset(origin.location, weight.dtype, weight.device)
        return self._head[1]

    summarise = staticmethod(summarise)
    """Turns added sums into metrics: "loss", "acceptance_length" and others (see `metrics`)."""

    def zero_loss(self) -> Tensor:
        """Return a loss of zero [] that is connected to every trainable parameter.

        For a batch without a supervised slot: optimizers and all-reduces then see zero gradients
        instead of missing ones. `units` run as in any loss: other ranks gather their weights then.
        """
        connected = [p.flatten()[0] * 0 for p in self.parameters_outside_units()]
        if self.units:
            connected.append(self.states_of_no_slot().sum() * 0)
        return sum(connected, torch.zeros(()))

    @property
    def units(self) -> list[nn.Module]:
        """The layers, if a training loss runs each once, in this order, by its `forward` alone.

        --sharding fsdp2 then gathers the weights of one layer at a time.
        """
        return []

    def states_of_no_slot(self) -> Tensor:
        """Return states [..., H] that mean nothing, made by all `units`."""
        raise NotImplementedError

    def parameters_outside_units(self) -> list[nn.Parameter]:
        """Return the trainable parameters that belong to no unit."""
        inside = {p for unit in self.units for p in unit.parameters()}
        return [p for p in self.trainable_parameters() if p not in inside]

    def trainable_parameters(self) -> list[nn.Parameter]:
        """Return the parameters for the optimizer, in a fixed order."""
        return [p for p in self.parameters() if p.requires_grad]

    # -- settings ---------------------------------------------------------------------------------

    def use_options(self, options: Any) -> None:
        """Replace the training options; those that decide a shape must stay the same."""
        self.options = options

    def update_config(self, **changes: Any) -> None:
        """Replace fields of the configuration that decide no tensor's shape."""
        self.config = dataclasses.replace(self.config, **changes)

    # -- modules ----------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """Factor on the attention scores."""
        return self.config.head_dim**-0.5

    def new_caches(self) -> list[KVCache]:
        return [KVCache() for _ in range(self.config.num_hidden_layers)]

    def cast(self, x: Tensor) -> Tensor:
        """Cast `x` [...] to the dtype of the weights. Under autocast, return it as it is."""
        autocast = torch.is_autocast_enabled(x.device.type)
        return x if autocast else x.to(self.main_weight.dtype)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embed known tokens, int64 [B, T] -> [B, T, H] in the dtype of the weights."""
        return self.cast(self.embed_tokens(token_ids))

    def make_vocabulary(self) -> None:
        """Start with the first Vd tokens."""
        for name in ("d2t", "t2d", "draft_ids", "draft_index"):
            self.register_buffer(name, None, persistent=False)
        self.set_vocabulary(torch.arange(self.config.draft_vocab_size))

    @property
    def full_vocabulary(self) -> bool:
        """Whether the draft can propose every token of the target; no map is saved then."""
        return self.config.draft_vocab_size == self.config.vocab_size

    @property
    def proposed_ids(self) -> Tensor | None:
        """Target ids of the draft vocabulary, int64 [Vd]; None: all of them."""
        return None if self.full_vocabulary else self.draft_ids

    def set_vocabulary(self, ids: Tensor) -> None:
        """Set the target ids of the draft vocabulary, ascending int64 [Vd].

        Raises:
            DraftError: the ids are not Vd ascending unique numbers in 0..V-1.
        """
        size, vocab = self.config.draft_vocab_size, self.config.vocab_size
        ids = ids.to(self.main_weight.device, torch.long)
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

    # -- building ---------------------------------------------------------------------------------

    @classmethod
    def choose_vocabulary(
        cls, options: Any, size: int, config: dict[str, Any], counts: Tensor | None
    ) -> Tensor | None:
        """Return the target ids of the draft vocabulary, int64 [Vd] ascending; None: all `size`.

        `config` is the target's; `counts` are the supervised tokens by id, int64 [V], if known.
        """
        return None

    @classmethod
    def layers_of(cls, options: Any, manifest: Manifest) -> tuple[int, ...]:
        """Return the ascending layer ids that a fresh draft reads of a dataset.

        Raises:
            DraftError: the dataset does not have them.
        """
        return ()

    @classmethod
    def build(
        cls,
        options: Any,
        *,
        target_config: dict[str, Any],
        manifest: Manifest,
        head: TargetHead,
        token_counts: Tensor | None,
        target_dir: Path,
        positions: Positions | None = None,
    ) -> Self:
        """Make a fresh float32 draft for a dataset, with the frozen weights of its target.

        Random weights come from torch's default generator: seed it first. `token_counts` are the
        supervised tokens by id, int64 [V], which choose a draft vocabulary smaller than V.
        `positions` are those of the target, None if the dataset does not record them. `target_dir`
        has the tokenizer; that of a view is in its first source.

        Raises:
            DraftError: options, target config and dataset do not fit together.
        """
        cls.check_data(options, manifest)
        size = head.spec.vocab_size
        chosen = cls.choose_vocabulary(options, size, target_config, token_counts)
        fields = {}
        if hasattr(options, "mask_token_id"):
            wanted = options.mask_token_id
            fields["mask_token_id"] = settle_mask_token(
                wanted, target_dir, target_config, head.embed_weight, token_counts
            )
        config = cls.config_class.from_target(
            target_config,
            options=options,
            vocab_size=size,
            draft_vocab_size=None if chosen is None else len(chosen),
            layers=cls.layers_of(options, manifest),
            dtype=manifest.target.dtype,
            origin=origin_of(manifest),
            positions=positions,
            **fields,
        )
        if config.hidden_size != head.spec.hidden_size:
            raise DraftError(
                f"the dataset mixes two targets: target/config.json has hidden size "
                f"{config.hidden_size}, target/head.safetensors has {head.spec.hidden_size}; "
                "generate it again"
            )
        draft = cls(config, options)
        draft.to(head.head_weight.device)
        if chosen is not None:
            draft.set_vocabulary(chosen)
        draft.adopt(head)
        return draft

    @torch.no_grad()
    def join(
        self, head: TargetHead, manifest: Manifest, where: str, *, moves: bool = False
    ) -> list[str]:
        """Connect a draft to the target of a dataset; share the frozen weights of its `head`.

        `where` is the path that the draft was read from, for messages. With `moves`, the target may
        have other weights than the draft's own, as a fine-tune has: what the draft holds of its own
        target, frozen, is replaced. Returns warnings.

        Raises:
            DraftError: the draft belongs to another target.
        """
        stored, given, origin = self.embed_tokens.weight, head.embed_weight, self.config.origin
        warnings = []
        if self.config.train_embeddings and stored.shape == given.shape:
            warnings = embedding_warnings(stored, given, trained=True)
        elif moves:
            warnings = require_same_tokens(stored, given, origin, manifest, where)
        else:
            require_same_embedding(stored, given, where, str(Path(manifest.where).parent))
        warnings += origin_warnings(origin, manifest, other_weights=bool(warnings))
        own_head = {OWN_HEAD: True} if self.has_own_head(head) else {}
        self.update_config(origin=origin_of(manifest) | own_head)
        if moves and not own_head:
            self.follow_head(head)
        self.share(head)
        return warnings

    def has_own_head(self, head: TargetHead) -> bool:
        """Whether the LM head is not the target's: trained, or that of another trainer."""
        return False

    def follow_head(self, head: TargetHead) -> None:
        """Replace a frozen LM head that is made of the target's rows; `head` has others now."""

    def share(self, head: TargetHead) -> None:
        """Use the target's embedding, frozen, without a copy; a trained one stays as it is."""
        if not self.config.train_embeddings:
            self.embed_tokens.weight = nn.Parameter(head.embed_weight, requires_grad=False)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Take the weights from the target that a fresh draft starts with."""
        if self.config.train_embeddings:
            embedding = self.embed_tokens.weight
            embedding.copy_(head.embed_weight.to(embedding.dtype))
        self.share(head)

    def adopt_target(self, dataset: HiddenStatesDataset) -> None:
        """Take what a dataset holds of its target for this kind of draft; most take nothing.

        Raises:
            DatasetError: the dataset does not hold it.
        """

    # -- files ------------------------------------------------------------------------------------

    def checkpoint_tensors(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return the tensors of model.safetensors, on the CPU; floats in `dtype`."""
        tensors = {
            name: value.detach().to("cpu", dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        if not self.full_vocabulary:
            tensors["d2t"], tensors["t2d"] = self.d2t.cpu(), self.t2d.cpu()
        return tensors

    def files(self, dtype: torch.dtype, where: str) -> DraftFiles:
        """Return what `save_pretrained` writes to the directory `where`."""
        raw = self.config.to_json(self.options)
        raw["dtype"] = raw["torch_dtype"] = str(dtype).removeprefix("torch.")
        if self.code:
            raw[SECTION] = raw[SECTION] | {"code": self.code}
        return DraftFiles(raw, self.checkpoint_tensors(dtype), where)

    def files_beside(
        self, form: str, figures: Mapping[str, Any], *, calibrated: bool
    ) -> dict[str, str]:
        """Return files that an export in `form` has beside the draft, by name.

        `figures` are those of the draft's validation, and `calibrated` whether `calibrate` has used
        them.
        """
        return {}

    def calibrate(self, tensors: dict[str, Tensor], figures: Mapping[str, Any]) -> None:
        """Change tensors of `files` by what a validation measured; most drafts change none."""

    def save_pretrained(
        self,
        directory: str | Path,
        dtype: torch.dtype | None = None,
        figures: Mapping[str, Any] | None = None,
    ) -> None:
        """Write config.json and model.safetensors, each atomically, with weights in `dtype`.

        None: the target's dtype, so that the saved embedding equals the target's bit for bit. With
        the `figures` of a validation, the draft is calibrated by them.
        """
        directory = Path(directory).expanduser()
        files = self.files(dtype or getattr(torch, self.config.dtype), str(directory))
        self.calibrate(files.tensors, figures or {})
        write_files(files, directory)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "Upload draft",
        commit_description: str | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        create_pr: bool = False,
        dtype: torch.dtype | None = None,
    ) -> str:
        """Upload what `save_pretrained` writes to a repository of the Hugging Face Hub.

        The arguments are those of transformers' `push_to_hub`; `dtype` is that of
        `save_pretrained`. The repository is made if need be. For an engine, `export` first.

        Returns:
            The URL of the commit.

        Raises:
            ConfigError: not the name of a repository, or no account.
        """
        return push_folder(
            repo_id,
            partial(self.save_pretrained, dtype=dtype),
            token,
            private=private,
            commit_message=commit_message,
            commit_description=commit_description,
            revision=revision,
            create_pr=create_pr,
        )

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
        config = cls.config_class.from_json(files.config, files.config_path)
        stored = files.config[SECTION]["options"]
        draft = cls(config, from_dict(cls.options_class, stored, files.config_path, given=False))
        tensors = dict(files.tensors)
        expected = {k: tuple(v.shape) for k, v in draft.state_dict().items()}
        if not draft.full_vocabulary:
            expected |= {"d2t": (config.draft_vocab_size,), "t2d": (config.vocab_size,)}
        check_tensors(tensors, expected, files.weights_path)
        if not draft.full_vocabulary:
            d2t, t2d = tensors.pop("d2t"), tensors.pop("t2d")
            try:
                draft.set_vocabulary(torch.arange(config.draft_vocab_size) + d2t)
            except DraftError as error:
                raise files.bad_weights(str(error)) from None
            if not torch.equal(draft.t2d, t2d):
                raise files.bad_weights(
                    "d2t and t2d name different tokens of the draft vocabulary; the file was "
                    "edited or damaged"
                )
        weight, own = draft.main_weight, draft.named_parameters()
        draft.to(tensors[next(name for name, p in own if p is weight)].dtype)
        draft.load_state_dict(tensors)
        return draft


class FinalDraft(Draft):
    """A draft that reads the target's final hidden states, from which its teacher is made too."""

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        """Raise DatasetError if a dataset lacks the final hidden states of some tokens."""
        if problem := data_problem(cls.name, manifest.supervision, manifest.final):
            raise DatasetError(f"{manifest.where}: {problem}")

    @property
    def state_columns(self) -> tuple[str, ...]:
        return (FINAL,)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        """Return the columns that the loss reads; the same with every supervision."""
        return ("input_ids", "loss_mask", FINAL, "target_argmax")


class LayersDraft(Draft):
    """A draft that reads captured layers, and one column for its teachers: all but EAGLE-1/2.

    A teacher is the target's distribution over the draft vocabulary, from the final hidden states
    with the head, from all logits, or from the K largest.
    """

    lm_head: nn.Linear | None  # its head over the draft vocabulary; None: the target's

    @classmethod
    def check_data(cls, options: Any, manifest: Manifest) -> None:
        cls.layers_of(options, manifest)

    @classmethod
    def layers_of(cls, options: Any, manifest: Manifest) -> tuple[int, ...]:
        """Return the layer ids of the options, of the recipe of the capture, or all of them."""
        recorded = manifest.draft_layers.get(cls.name)
        return options.layer_ids(manifest.layers, recorded)

    @classmethod
    def why_layers(cls, options: Any, manifest: Manifest) -> str:
        """Say why a fresh draft reads the layers of `layers_of`."""
        if options.layers != "auto":
            return "as --layers says"
        if cls.name in manifest.draft_layers:
            return f"the recipe of {cls.name}, which the dataset was captured for (--for)"
        return f"every captured layer, because the dataset was not captured with --for {cls.name}"

    @classmethod
    def choose_vocabulary(
        cls, options: Any, size: int, config: dict[str, Any], counts: Tensor | None
    ) -> Tensor | None:
        return choose_vocabulary(options, size, counts, special_ids(config))

    def fc_inputs(self, aux: Tensor) -> Tensor:
        """Return what `fc` reads of aux states [..., n*H], in the dtype of the weights."""
        return self.cast(aux)

    def head_scale(self, head: TargetHead) -> float:
        """Return the factor on the target's rows in the LM head of the draft."""
        return 1.0

    def _target_rows(self, head: TargetHead) -> Tensor:
        """Return the target's rows of the draft vocabulary [Vd, H], scaled as in the draft."""
        ids = self.draft_ids.to(head.head_weight.device)
        return head.head_weight[ids] * self.head_scale(head)

    @torch.no_grad()
    def adopt(self, head: TargetHead) -> None:
        """Share the target's embedding, and start with its head rows."""
        if self.lm_head is not None:
            self.lm_head.weight.copy_(self._target_rows(head))
        super().adopt(head)

    def share(self, head: TargetHead) -> None:
        """Share the target's embedding, and its rows with a frozen LM head that is made of them.

        An LM head of another trainer that is not stays as it is.
        """
        super().share(head)
        if self.lm_head is None or self.lm_head.weight.requires_grad:
            return
        if self._made_of(self._target_rows(head), self.head_scale(head)):
            self.follow_head(head)
        else:
            log.warning(
                "warning[lm-head]: the draft's lm_head is not made of the target's rows: it is "
                "kept, and not trained"
            )

    def follow_head(self, head: TargetHead) -> None:
        if self.lm_head is not None:
            self.lm_head.weight = nn.Parameter(self._target_rows(head), False)

    def has_own_head(self, head: TargetHead) -> bool:
        if self.lm_head is None:
            return False
        if self.lm_head.weight.requires_grad:
            return True
        scale = self.head_scale(head)
        if self._made_of(self._target_rows(head), scale):
            return False
        if origin := self.config.origin:  # a head of ours, which was the target's unless it says so
            return bool(origin.get(OWN_HEAD, False))
        ids = self.draft_ids.to(self.embed_tokens.weight.device)
        return not self._made_of(self.embed_tokens.weight[ids] * scale, scale)  # tied

    def _made_of(self, rows: Tensor, scale: float) -> bool:
        """Whether the LM head is `rows` [Vd, H], a target's times `scale`, but for rounding."""
        assert self.lm_head is not None
        stored = self.lm_head.weight
        coarser = max(rows.dtype, stored.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        if torch.equal(rows.to(stored.device, coarser), stored.to(coarser)):
            return True
        if scale == 1:
            return False
        near = stored.to(rows.device).float()  # in bfloat16 rounded before the factor, too
        return torch.allclose(rows.float(), near, rtol=2**-6, atol=0)

    @property
    def state_columns(self) -> tuple[str, ...]:
        return tuple(layer_column(k) for k in self.config.layers)

    def columns(self, supervision: str = "final-hidden") -> tuple[str, ...]:
        teachers: tuple[str, ...] = (LOGITS if supervision == LOGITS else FINAL, "target_argmax")
        if supervision.startswith("topk"):
            teachers = (*TOPK, "target_argmax", "target_logsumexp")
        return ("input_ids", "loss_mask", *self.state_columns, *teachers)


class AuxDraft(LayersDraft):
    """What EAGLE-3 and P-EAGLE share: feature projection, final norm, and an LM head.

    The LM head is over the draft vocabulary, and trained with --train-head only. Parameter names
    are those of the checkpoint. A subclass implements `make_layers`.
    """

    lm_head: nn.Linear

    def __init__(self, config: Any, options: Any = None) -> None:
        super().__init__(config, options)
        size, eps = config.hidden_size, config.rms_norm_eps
        count, width = len(config.layers), config.target_hidden_size
        if config.norm_before_fc:
            self.input_norm = RMSNorm(count * width, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(count))
        self.fc = nn.Linear(count * width, size, bias=False)
        self.make_layers()
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        self.use_options(self.options)
        self.rotary = Rotary(config)
        self.make_vocabulary()

    def use_options(self, options: Any) -> None:
        super().use_options(options)
        self.lm_head.weight.requires_grad_(options.train_head)

    @abstractmethod
    def make_layers(self) -> None:
        """Make the layers between `fc` and `norm`."""

    def fc_inputs(self, aux: Tensor) -> Tensor:
        aux = self.cast(aux)
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            parts = aux.chunk(len(self.fc_norm), dim=-1)  # n times [B, T, H]
            pairs = zip(self.fc_norm, parts, strict=True)
            aux = torch.cat([norm(part) for norm, part in pairs], dim=-1)
        return aux

    def project(self, aux: Tensor) -> Tensor:
        """Project aux states [B, T, n*H] to features [B, T, H], in the dtype of the weights."""
        return self.fc(self.fc_inputs(aux))

    def head_scale(self, head: TargetHead) -> float:
        return head.spec.scale
