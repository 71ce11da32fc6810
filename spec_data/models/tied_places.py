"""A head that is tied to the embedding is one tensor, so a device map must keep both together."""

from collections.abc import Callable, Mapping
from typing import Any

from spec_data.models.reading import text_config
from spec_data.shards.errors import ConfigError

_OFFLOADED = ("cpu", "disk")


def asks_to_tie(config: Any) -> bool:
    """Whether a transformers configuration ties the head to the embedding."""
    return any(getattr(c, "tie_word_embeddings", False) for c in (config, text_config(config)))


def check_tied_places(config: Any, device_map: object, empty: Callable[[], Any]) -> None:
    """Refuse a map that offloads the embedding or the head, but not both, if they are tied.

    accelerate would look for a weight of the head, which the files do not hold.

    Args:
        config: the transformers configuration.
        device_map: a device by module name; a policy keeps tied modules together by itself.
        empty: returns the model without weights; called only if it is needed.

    Raises:
        ConfigError: they would lie on different devices.
    """
    if not isinstance(device_map, Mapping) or not asks_to_tie(config):
        return
    model = empty()
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    names = [name for end in ends for name, module in model.named_modules() if module is end]
    places = [_place(name, device_map) for name in names]
    if len(places) < 2 or None in places or places[0] == places[1]:
        return
    if any(str(place) in _OFFLOADED for place in places):
        raise ConfigError(
            f"--device-map puts {names[0]} on {places[0]} and {names[1]} on {places[1]}, but in "
            "this target they are one tensor (tie_word_embeddings): name the same device for both"
        )


def _place(name: str, device_map: Mapping[str, Any]) -> Any:
    """Return the device of a module: that of the longest name in the map which contains it."""
    found = [key for key in device_map if key in ("", name) or name.startswith(f"{key}.")]
    return device_map[max(found, key=len)] if found else None
