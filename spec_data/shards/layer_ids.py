"""Which blocks to capture, spread over a target's depth. Layer id k is the output of block k."""

from collections.abc import Sequence

from spec_data.shards.errors import TargetError


def build_target_layer_ids(num_target_layers: int, num_feature_layers: int) -> list[int]:
    """Strictly increasing, evenly spread layer ids in [1, L-1]; a single one is the last block's.

    Raises:
        TargetError: there are not that many blocks.
    """
    return _spread(1, num_target_layers - 1, num_feature_layers, num_target_layers)


def capturable_layer_ids(num_target_layers: int, num_feature_layers: int) -> list[int]:
    """The same within [1, L-2]: engines disagree on what the last block's output is.

    Raises:
        TargetError: there are not that many blocks.
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
    # gaps are at least 1, so rounding keeps the ids apart
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


EMBEDDING = -1


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Layer ids from "auto" (the EAGLE-3 recipe 1, L/2-1, L-4), "spread:5" or "1,3,5", ascending.

    Raises:
        TargetError: not numbers, repeated, or outside -1..L-1; a target too shallow for "auto".
    """
    if text == "auto":
        ids = (1, num_layers // 2 - 1, num_layers - 4)
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
        layers = [int(part) for part in text.split(",")]
    except ValueError:
        raise TargetError(
            f'--layers {text!r}: expected "auto", "spread:5" or ids like 1,3,5'
        ) from None
    check_layers(layers, num_layers)
    return tuple(sorted(layers))


def _suggested(num_layers: int) -> list[int]:
    last = max(num_layers - 2, 0)
    return sorted({0, last // 2, last})


def check_layers(layers: Sequence[int], num_layers: int) -> None:
    """Refuse layer ids that repeat or do not exist."""
    if len(set(layers)) != len(layers):
        raise TargetError(f"layer ids {list(layers)} repeat; name each once")
    wrong = [k for k in layers if not EMBEDDING <= k < num_layers]
    if wrong or not layers:
        raise TargetError(
            f"layer ids {wrong or 'none'} do not exist: the target has blocks 0 to "
            f"{num_layers - 1} (id k is the output of block k; -1 is the embedding output)"
        )
