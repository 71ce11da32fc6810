"""What a kind of draft says for its conformance vectors: which drafts, by which slow reference.

Every kind says it in `vectors.py` of its folder. The general code (`spec_train.conformance`) asks
for it by the name of the kind, and names none itself.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from spec_train.drafts.slow_layer import Document, Sizes
from spec_train.options.kinds import BUILT_IN, folder_of


@dataclass(frozen=True)
class Recipe:
    """One vector."""

    name: str
    kind: str
    what: str
    target: str
    forms: tuple[str, ...]  # of `spec-train export`
    options: dict[str, Any]
    vocabulary: int = 0  # tokens that the draft can propose; 0: all


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What an engine does with a draft's files; the defaults are right, other values mistakes."""

    shift: int = 0  # the states of so many tokens earlier
    normed: bool = False  # states after the target's final norm; of a draft of those: before it
    ids: tuple[int, ...] = ()  # target ids of the draft vocabulary, if they are not the file's
    fields: tuple[tuple[str, Any], ...] = ()  # of the reference's config


@dataclass(frozen=True)
class Twin:
    """A mistake; its name begins with the code of the same failure in `spec-train doctor`."""

    name: str
    meaning: str
    reads: Reads = field(default_factory=Reads)
    config: dict[str, Any] = field(default_factory=dict)  # changes that a file can make as well
    vocabulary: tuple[int, ...] = ()  # of such a file
    edit: Callable[[Any], None] | None = None  # of the weights of such a file

    @property
    def in_file(self) -> bool:
        """Whether a draft directory has the mistake baked in."""
        return bool(self.config or self.vocabulary or self.edit)


@dataclass(frozen=True)
class Drafted:
    """What a draft proposes after the last known token."""

    tokens: list[int]
    logits: Tensor  # [K, V or Vd], of candidates alone where a second stage chooses
    states: Sequence[Tensor] = ()  # of a chain of predicted states: what the head reads, K of [H]


@dataclass(frozen=True, kw_only=True)
class SlowDraft:
    """A draft for the slow reference of its kind."""

    depth: int
    config: Any  # a DraftConfig
    state: Mapping[str, Any]  # the tensors of its checkpoint, float64
    sizes: Mapping[str, Any]  # fields of `Sizes` and the windows of its layers
    target: Sizes
    head: Tensor  # of the target [V, H]


def of_this_size(x: Tensor) -> Tensor:
    """Return a state [H] or states [.., H] with the root mean square that tiny drafts have."""
    return x / (x.square().mean(-1, True).sqrt() / 2)


def _of_last(draft: SlowDraft, last: Tensor, normed: Tensor) -> Tensor:
    return of_this_size(last)


@dataclass(frozen=True, kw_only=True)
class KindVectors:
    """The vectors of a kind of draft."""

    recipes: tuple[Recipe, ...]
    reference: Callable[[SlowDraft], Any]
    """The configuration of its slow reference."""
    drafted: Callable[[SlowDraft, Any, Document, int, bool, list[int]], Drafted]
    """(draft, that configuration, a document, anchor, known, target ids of its vocabulary): drafts
    after the anchor's token. `known`: after the document's later tokens, not after its own ones."""
    carried: Callable[[Any], Iterator[Twin]] = lambda config: iter(())
    """Mistakes in its own arithmetic, such as in what a step hands to the next."""
    slots: Callable[[Any], Iterator[Twin]] = lambda config: iter(())
    """Mistakes in the slots of a block."""
    wanted: Callable[[SlowDraft, Tensor, Tensor], Tensor] = _of_last
    """(draft, states [T, H] before the target's final norm, after it): what it is fitted to."""
    added: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    """What a block draft adds to the logits of its slots, by the name of a tensor of it: see
    `parts_of` in `drafts/block/reference.py`."""
    passes: int = 1
    """More than 1 where inputs of the fitted matrix, or what follows it, depend on the matrix."""
    own_head: bool = False
    """It trains a head: a random one, as that of the target would draft nonsense."""
    own_norm: bool = False
    """Its last norm is not that of the target."""


@functools.cache
def every_vectors() -> dict[str, KindVectors]:
    """Return the vectors of the kinds of this project, by name, in their order."""
    modules = {kind: f"{folder_of(kind)}.vectors" for kind in BUILT_IN}
    return {kind: importlib.import_module(name).VECTORS for kind, name in modules.items()}
