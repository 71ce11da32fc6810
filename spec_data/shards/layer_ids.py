"""Layer ids: how they are written, which ones exist, and how other tools count them.

Everywhere in this project, layer id k is the OUTPUT of decoder block k, counted from 0, and -1 is
the output of the embedding. Some engines and libraries name the INPUT of a block instead: the
output of block k is the input of block k + 1. `as_block_inputs` and `from_block_inputs` are the
only places that convert between the two.
"""

from collections.abc import Iterable, Sequence

from spec_data.shards.errors import DraftError, TargetError

EMBEDDING = -1
"""Layer id of the embedding output."""


def as_block_inputs(layers: Iterable[int]) -> list[int]:
    """Convert layer ids (outputs of blocks) to the numbers of the blocks that take them as input.

    vLLM, llama.cpp and the speculators library count like this: layer 1 becomes 2, -1 becomes 0.
    """
    return [layer + 1 for layer in layers]


def from_block_inputs(blocks: Iterable[int]) -> list[int]:
    """Convert numbers of blocks, whose inputs are meant, to layer ids (outputs of blocks)."""
    return [block - 1 for block in blocks]


def build_target_layer_ids(num_target_layers: int, num_feature_layers: int) -> list[int]:
    """Spread layer ids evenly over [1, L-1], strictly increasing; a single id is L-1.

    Raises:
        TargetError: the target has too few blocks.
    """
    return _spread(1, num_target_layers - 1, num_feature_layers, num_target_layers)


def capturable_layer_ids(num_target_layers: int, num_feature_layers: int) -> list[int]:
    """Spread layer ids evenly over [1, L-2]: engines disagree on the output of the last block.

    Raises:
        TargetError: the target has too few blocks.
    """
    return _spread(1, num_target_layers - 2, num_feature_layers, num_target_layers)


def _spread(first: int, last: int, count: int, blocks: int) -> list[int]:
    if not 1 <= count <= last - first + 1:
        raise TargetError(
            f"{count} layers cannot be spread over blocks {first} to {last} of a target with "
            f"{blocks} blocks; ask for 1 to {max(last - first + 1, 0)}"
        )
    if count == 1:
        return [last]
    # neighbouring ids are at least 1 apart before rounding, so rounding never makes two equal
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def eagle3_layers(num_layers: int) -> tuple[int, int, int]:
    """Return the layer ids of the EAGLE-3 recipe, 1, L/2-1 and L-4, without checking them."""
    return 1, num_layers // 2 - 1, num_layers - 4


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Read the layers to capture: "auto" (`eagle3_layers`), "spread:5" or "1,3,5"; ascending.

    Raises:
        TargetError: not numbers, an id twice, an id outside -1..L-1, or a target that has too few
            blocks for "auto".
    """
    if text == "auto":
        ids = eagle3_layers(num_layers)
        if not 0 <= ids[0] < ids[1] < ids[2]:
            raise TargetError(
                f"--layers auto takes blocks 1, L/2-1 and L-4, which are {ids} for a target of "
                f"L={num_layers} blocks; name three different ones, e.g. --layers "
                f"{','.join(map(str, _suggested(num_layers)))}"
            )
        return ids
    if text.startswith("spread:") and text[7:].isdecimal():
        return tuple(capturable_layer_ids(num_layers, int(text[7:])))
    try:
        layers = _parse_ids(text)
    except ValueError:
        raise TargetError(
            f'--layers {text!r}: expected "auto", "spread:5" or ids like 1,3,5'
        ) from None
    check_layers(layers, num_layers)
    return tuple(sorted(layers))


def chosen_layers(text: str, captured: tuple[int, ...]) -> tuple[int, ...]:
    """Read the layers that a draft uses: "auto" (all of `captured`) or "1,3,5"; ascending.

    Raises:
        DraftError: an id is not a number, or is not among the `captured` layers.
    """
    if text == "auto":
        return tuple(sorted(captured))
    try:
        wanted = sorted(set(_parse_ids(text)))
    except ValueError:
        raise DraftError(f"layers = {text!r}: write ids with commas, as 1,3,5") from None
    missing = [k for k in wanted if k not in captured]
    if missing:
        raise DraftError(
            f"layers = {text}: the dataset has no layer {missing}, only {list(captured)}"
        )
    return tuple(wanted)


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Check that layer ids are unique and exist in a target of `num_layers` blocks.

    Raises:
        TargetError: no id at all, an id twice, or an id outside -1..L-1.
    """
    if len(set(layers)) != len(layers):
        raise TargetError(f"layer ids {list(layers)} repeat; name each once")
    wrong = [k for k in layers if not EMBEDDING <= k < num_layers]
    if wrong or not layers:
        raise TargetError(
            f"layer ids {wrong or 'none'} do not exist: the target has blocks 0 to "
            f"{num_layers - 1} (id k is the output of block k; -1 is the embedding output)"
        )


def _parse_ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _suggested(num_layers: int) -> list[int]:
    last = max(num_layers - 2, 0)
    return sorted({0, last // 2, last})
