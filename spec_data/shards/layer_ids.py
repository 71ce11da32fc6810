"""Layer ids: how they are written, which ones exist, and how other tools count them.

Everywhere in this project, layer id k is the OUTPUT of decoder block k, counted from 0, and -1 is
the output of the embedding. vLLM, llama.cpp and speculators name the block whose INPUT it is: layer
1 is their 2. Only `as_block_inputs` and `from_block_inputs` convert between the two.
"""

import operator
from collections.abc import Iterable, Sequence
from typing import Any

from spec_data.shards.draft_code import outside_draft
from spec_data.shards.draft_kinds import default_kind, draft_kinds
from spec_data.shards.errors import DraftError, TargetError

EMBEDDING = -1
"""Layer id of the embedding output."""

AUTO_DRAFTS = (default_kind(),)
"""The drafts whose recipe `--layers auto` captures."""

SEARCH, SEARCH_LAYERS = "search", 9
"""`--layers search`: so many layers, evenly spread, and those of every recipe. Every second one of
nine is a layer of block drafts."""


def as_block_inputs(layers: Iterable[int]) -> list[int]:
    """Convert layer ids (outputs of blocks) to the numbers of the blocks that read them."""
    return [layer + 1 for layer in layers]


def from_block_inputs(blocks: Iterable[int]) -> list[int]:
    """Convert numbers of blocks, whose inputs are meant, to layer ids (outputs of blocks)."""
    return [block - 1 for block in blocks]


def capturable_layer_ids(num_layers: int, count: int) -> list[int]:
    """Spread layer ids evenly over [1, L-2], strictly increasing; a single one is L-2.

    Engines disagree on the output of the last block, L-1.

    Raises:
        TargetError: the target has too few blocks.
    """
    last = num_layers - 2
    if not 1 <= count <= last:
        raise TargetError(
            f"{count} layers cannot be spread over blocks 1 to {last}; ask for 1 to {max(last, 0)}"
        )
    # neighbouring ids are at least 1 apart before rounding, so rounding never makes two equal
    return [round(1 + i * (last - 1) / (count - 1)) for i in range(count)] if count > 1 else [last]


def low_middle_high(num_layers: int) -> tuple[int, int, int]:
    """Return the layer ids of the EAGLE-3 recipe, which a small target may not have."""
    return 1, num_layers // 2 - 1, num_layers - 4


RECIPES = {name: kind.layers for name, kind in draft_kinds().items() if not kind.target_block}
"""How many layers each draft reads by its recipe; EAGLE-1/2 read the final hidden states alone."""
FINAL_ALONE = next(name for name, count in RECIPES.items() if not count)
"""The draft that stands for all that read no layer."""


def recipe_count(draft: str) -> int | None:
    """Return how many layers a draft reads by its recipe; None: there is no such draft.

    `draft` may be any that the user named, see `draft_code`.
    """
    if draft in RECIPES:
        return RECIPES[draft]
    outside = outside_draft(draft)
    return None if outside is None else outside.layers


def kind_name(draft: str) -> str:
    """Return the kind of draft of a name such as medusa.py:Medusa, as its config.json has it."""
    outside = None if draft in RECIPES else outside_draft(draft)
    return draft if outside is None else outside.name


def _recipe(draft: str, num_layers: int, option: str) -> tuple[int, ...]:
    """Return the layers of a draft's recipe; TargetError: the target has too few blocks."""
    last, wanted = max(num_layers - 2, 0), recipe_count(draft) or 0
    if wanted == 3:
        ids = low_middle_high(num_layers)
        if not 0 <= ids[0] < ids[1] < ids[2]:
            raise TargetError(
                f"{option} takes blocks 1, L/2-1 and L-4, which are {ids} for a target of "
                f"L={num_layers} blocks; name three different ones, e.g. --layers "
                f"{','.join(map(str, sorted({0, last // 2, last})))}"
            )
        return ids
    if wanted and num_layers < 3:
        raise TargetError(
            f"{option} spreads its layers over blocks 1 to L-2, and the target has only "
            f"L={num_layers} blocks; name the layers, e.g. --layers 0"
        )
    count = min(wanted, last)
    return tuple(capturable_layer_ids(num_layers, count)) if count else ()


def recipe_layers(draft: str, num_layers: int) -> tuple[int, ...] | None:
    """Return the layers that a draft reads by its recipe; None if the target has too few blocks."""
    try:
        return _recipe(draft, num_layers, f"--for {draft}")
    except TargetError:
        return None


def search_layers(num_layers: int) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return the layers that `spec-train search` chooses among, and those of every recipe.

    Raises:
        TargetError: the target has too few blocks.
    """
    spread = capturable_layer_ids(num_layers, max(1, min(SEARCH_LAYERS, num_layers - 2)))
    recipes = {draft: recipe_layers(draft, num_layers) for draft in RECIPES}
    by_draft = {draft: layers for draft, layers in recipes.items() if layers is not None}
    return tuple(sorted({*spread, *(k for layers in by_draft.values() for k in layers)})), by_draft


def candidate_layers(
    captured: Sequence[int], recorded: Sequence[int] | None, count: int
) -> list[tuple[int, ...]]:
    """Return the sets of layers that a search tries for a draft whose recipe reads `count`.

    They are the `recorded` ones of its recipe, all that are `captured`, and `count` of them: spread
    evenly, of the lower half, and of the upper half. Each set is named once.
    """
    every = tuple(sorted(captured))
    half = max(min(count, len(every)), (len(every) + 1) // 2)
    parts = (every, every[:half], every[-half:])
    sets = [tuple(recorded or ()), every, *(_spread(part, count) for part in parts)]
    return list(dict.fromkeys(filter(None, sets)))


def _spread(layers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return `count` of some layers, evenly spread; all, if there are fewer."""
    last = len(layers) - 1
    if count > last:
        return layers
    at = [round(i * last / (count - 1)) for i in range(count)] if count > 1 else [last]
    return tuple(layers[i] for i in at)


def choose_layers(
    layers: Sequence[int] | str, drafts: Sequence[str], num_layers: int
) -> tuple[tuple[int, ...], dict[str, tuple[int, ...]]]:
    """Return the layers to capture, ascending, and those that each of `drafts` reads.

    With `drafts`, these are the layers that any of their recipes reads; `layers` must be "auto".
    EAGLE-1/2 ("eagle") read no layer, so there may be none. Without drafts, `layers` are ids, or
    "auto" (`low_middle_high`), "search" (`search_layers`), "spread:5" or "1,3,5".

    Raises:
        TargetError: another text, an id twice or outside -1..L-1, an unknown draft, layers beside
            drafts, or a target that has too few blocks for a recipe.
    """
    if not isinstance(layers, str):
        layers = _as_ids(layers)
    if drafts:
        if layers != "auto":
            raise TargetError(
                f"layers {layers} and drafts {', '.join(drafts)}: give one or the other"
            )
        if unknown := [draft for draft in drafts if recipe_count(draft) is None]:
            raise TargetError(f"unknown drafts {', '.join(unknown)}; known: {', '.join(RECIPES)}")
        by_draft = {
            kind_name(draft): _recipe(draft, num_layers, f"--for {draft}") for draft in drafts
        }
        return tuple(sorted(set().union(*by_draft.values()))), by_draft
    if layers == "auto":
        return _recipe(AUTO_DRAFTS[0], num_layers, "--layers auto"), {}
    if layers == SEARCH:
        return search_layers(num_layers)
    if isinstance(layers, str):
        text = layers
        if text.startswith("spread:") and text[7:].isdecimal():
            return tuple(capturable_layer_ids(num_layers, int(text[7:]))), {}
        try:
            layers = _parse_ids(text)
        except ValueError:
            raise TargetError(
                f'--layers {text!r}: expected "auto", "search", "spread:5" or ids like 1,3,5'
            ) from None
    check_layers(layers, num_layers)
    return tuple(sorted(layers)), {}


def chosen_layers(
    text: str, captured: tuple[int, ...], recorded: tuple[int, ...] | None = None
) -> tuple[int, ...]:
    """Read the layers that a draft uses: "auto" or "1,3,5"; ascending.

    "auto" are the layers `recorded` for the draft (--for); if there are none, all of `captured`.

    Raises:
        DraftError: an id is not a number, or is not among the `captured` layers, or there are none.
    """
    if not captured:
        raise DraftError(
            f"the dataset has no captured layer, only hidden.final, which {FINAL_ALONE} reads; "
            "generate with --for and the name of this draft"
        )
    if text == "auto":
        return tuple(sorted(recorded or captured))
    try:
        wanted = set(_parse_ids(text))
    except ValueError:
        raise DraftError(f"layers = {text!r}: write ids with commas, as 1,3,5") from None
    if missing := sorted(wanted - set(captured)):
        raise DraftError(
            f"layers = {text}: the dataset has no layer {missing}, only {list(captured)}"
        )
    return tuple(sorted(wanted))


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Check that layer ids are unique and in -1..L-1, with a TargetError."""
    if len(set(layers)) != len(layers):
        raise TargetError(f"layer ids {list(layers)} repeat; name each once")
    if wrong := [k for k in layers if not EMBEDDING <= k < num_layers]:
        raise TargetError(
            f"layer ids {wrong} do not exist: the target has blocks 0 to "
            f"{num_layers - 1} (id k is the output of block k; -1 is the embedding output)"
        )


def _as_ids(layers: Iterable[Any]) -> list[int]:
    """Return layer ids that Python, numpy or torch hold as a list of numbers."""
    try:
        return [operator.index(layer) for layer in layers]
    except TypeError:
        raise TargetError(f"layers {layers!r}: expected ids, such as [1, 3, 5]") from None


def _parse_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]
