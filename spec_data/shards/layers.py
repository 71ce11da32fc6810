"""Which blocks to capture, spread over a target's depth. Layer id k is the output of block k."""

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
