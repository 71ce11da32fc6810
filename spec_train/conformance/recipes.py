"""The vectors: which drafts, in which published forms, and the mistakes whose numbers are known."""

from collections.abc import Iterator
from typing import Any

from spec_train.conformance import target as tiny
from spec_train.drafts.kind_vectors import Reads, Recipe, Twin, every_vectors

RECIPES = tuple(recipe for kind in every_vectors().values() for recipe in kind.recipes)


def twins_of(recipe: Recipe, config: Any, ids: tuple[int, ...]) -> list[Twin]:
    """Return the mistakes with which a draft of this configuration and vocabulary can be served."""
    kind = every_vectors()[recipe.kind]
    masked = _mask(config) if hasattr(config, "mask_token_id") else ()
    in_ids = _vocabulary(ids) if ids else ()
    return [*_states(config), *kind.carried(config), *in_ids, *masked, *kind.slots(config)]


def _states(config: Any) -> Iterator[Twin]:
    """Yield the mistakes in what a draft reads of its target."""
    for step, where in ((-1, "early"), (1, "late")) if config.reads_layers else ():
        layers = {"layers": tuple(k + step for k in config.layers)}
        meaning = f"every captured layer one block too {where}: inputs and outputs of blocks"
        yield Twin(f"layer-ids{step:+d}", f"{meaning} taken for each other", config=layers)
    meaning = "the target's states one token late: those of the token before"
    yield Twin("state-shift", meaning, Reads(shift=1))
    meaning = "states on the other side of the target's final norm"
    yield Twin("final-norm", meaning, Reads(normed=True))


def _vocabulary(ids: tuple[int, ...]) -> Iterator[Twin]:
    """Yield the mistakes in a reduced vocabulary."""
    others = [i for i in range(tiny.FIRST, tiny.VOCAB) if i not in ids]
    stale = tuple(sorted([*ids[: len(ids) - len(others)], *others]))
    meaning = "rows of the draft's head taken for token ids, without d2t"
    yield Twin("vocabulary-map-ignored", meaning, Reads(ids=tuple(range(len(ids)))))
    meaning = "d2t of another vocabulary of this size"
    yield Twin("vocabulary-map-stale", meaning, vocabulary=stale)


def _mask(config: Any) -> Iterator[Twin]:
    """Yield the mistake in the token of slots that are unknown."""
    other = {"mask_token_id": config.mask_token_id + 1}
    yield Twin("mask-token", "another token in the slots that are unknown", config=other)
