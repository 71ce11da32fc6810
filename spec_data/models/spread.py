"""How a target is spread over several devices, as the options say. No torch here: for --help."""

import json
import os
from dataclasses import dataclass
from typing import Any

from spec_data.shards.errors import ConfigError

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a target is spread over devices; without any of these, it lies on --device.

    Attributes:
        device_map: a policy of accelerate, or a device by module name ("cpu" and "disk" offload).
        max_memory: what each device may hold of the weights, by GPU number or "cpu".
        tensor_parallel: every layer is split over the processes of torchrun.
    """

    device_map: str | dict[str, Any] | None = None
    max_memory: dict[int | str, Any] | None = None
    tensor_parallel: bool = False

    @property
    def is_one_device(self) -> bool:
        """Whether the whole target lies on one device."""
        return self.device_map is None and not self.tensor_parallel


def parse_spread(
    device_map: str | None, max_memory: dict[str, Any] | None, tp_plan: str | None
) -> Spread:
    """Return how --device-map, --max-memory and --tp-plan spread a target.

    Raises:
        ConfigError: they contradict each other, or --device-map is neither a policy nor JSON.
    """
    if device_map is None and max_memory:
        raise ConfigError("--max-memory goes with --device-map; add it")
    if device_map is not None and tp_plan is not None:
        raise ConfigError("--tp-plan and --device-map exclude each other; choose one")
    table: Any = device_map
    if device_map is not None and device_map not in _POLICIES:
        try:
            table = json.loads(device_map)
        except ValueError:
            table = None
        if not isinstance(table, dict):
            raise ConfigError(
                f"--device-map {device_map}: expected {', '.join(_POLICIES)} or a JSON object such "
                'as {"model": 0, "lm_head": "cpu"}; for one device, use --device'
            )
    memory = {int(k) if k.isdigit() else k: v for k, v in (max_memory or {}).items()}
    return Spread(device_map=table, max_memory=memory or None, tensor_parallel=tp_plan is not None)


def processes() -> int:
    """Return the number of processes that torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
