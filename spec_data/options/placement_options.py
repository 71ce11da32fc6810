"""The options that spread a target over several devices, for every command that loads one."""

import os
from dataclasses import dataclass
from typing import Any

from spec_data.options.option_values import RUNNING, parse_object
from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import option

_POLICIES = ("auto", "balanced", "balanced_low_0", "sequential")


@dataclass(frozen=True, kw_only=True)
class Spread:
    """How a target is spread over devices; without any of these, it lies on --device.

    Attributes:
        device_map: a policy of accelerate, or a device by module name ("cpu" and "disk" offload).
        max_memory: what each device may hold of the weights, by GPU number or "cpu".
        offload_dir: where weights are kept that are offloaded to disk and not stored as they are.
        tensor_parallel: every layer is split over the processes of torchrun.
    """

    device_map: str | dict[str, Any] | None = None
    max_memory: dict[int | str, Any] | None = None
    offload_dir: str | None = None
    tensor_parallel: bool = False

    @property
    def is_one_device(self) -> bool:
        """Whether the whole target lies on one device."""
        return self.device_map is None and not self.tensor_parallel


def backend_option() -> Any:
    """The option --backend."""
    return option(
        "hf",
        help="what runs the target: hf is transformers; vllm is vLLM in this process, for targets "
        "that it serves (pip install vllm)",
        group=RUNNING,
        choices=("hf", "vllm"),
    )


def device_map_option() -> Any:
    """The option --device-map."""
    return option(
        None,
        help="spread the target over the GPUs of this machine, and what does not fit over memory "
        "and disk: auto, balanced or sequential (the policies of accelerate), or a JSON object "
        'that names a device per module, such as {"model": 0, "lm_head": "cpu"}',
        group=RUNNING,
        metavar="MAP",
    )


def max_memory_option() -> Any:
    """The option --max-memory."""
    return option(
        None,
        help="with --device-map: a JSON object of what each GPU and the CPU may hold of the "
        'weights, such as {"0": "60GiB", "cpu": "200GiB"}. Leave room for the states and logits',
        group=RUNNING,
        metavar="JSON",
    )


def offload_dir_option() -> Any:
    """The option --offload-dir."""
    return option(
        None,
        help="with --device-map: a folder for weights that are offloaded to disk and are not "
        "stored as they run (most mixtures of experts). Other weights stay in the target's files",
        group=RUNNING,
        metavar="DIR",
    )


def tp_plan_option() -> Any:
    """The option --tp-plan."""
    return option(
        None,
        help="auto splits every layer of the target over the processes that torchrun starts, by "
        "the plan of its family in transformers; the first process writes the dataset",
        group=RUNNING,
        choices=("auto",),
    )


def vllm_tensor_parallel_option() -> Any:
    """The option --vllm-tensor-parallel."""
    return option(
        1,
        help="with --backend vllm: GPUs that share every layer",
        group=RUNNING,
        metavar="N",
    )


def vllm_memory_option() -> Any:
    """The option --vllm-memory."""
    return option(
        0.8,
        help="with --backend vllm: share of each GPU's memory for weights and the cache of keys "
        "and values. States, logits and a second head need the rest",
        group=RUNNING,
        metavar="SHARE",
    )


def spread_of(config: Any) -> Spread:
    """Return how the options of a command spread its target.

    Raises:
        ConfigError: options that contradict each other or are no JSON, or --tp-plan without
            torchrun.
    """
    found = Spread(
        device_map=_device_map(config.device_map),
        max_memory=_max_memory(config.max_memory),
        offload_dir=config.offload_dir,
        tensor_parallel=config.tp_plan is not None,
    )
    _check_vllm(config, found)
    if found.device_map is None and (found.max_memory or found.offload_dir):
        raise ConfigError("--max-memory and --offload-dir go with --device-map; add it")
    if found.is_one_device:
        return found
    name = "--tp-plan" if found.tensor_parallel else "--device-map"
    if found.tensor_parallel and found.device_map is not None:
        raise ConfigError("--tp-plan and --device-map exclude each other; choose one")
    if found.tensor_parallel and getattr(config, "places_itself", False):
        raise ConfigError(
            "--tp-plan: the processes of torchrun are one worker; leave --engine out, and give "
            "--workers I/N if there are others"
        )
    if config.device != "auto":
        raise ConfigError(f"{name} chooses the devices; leave --device {config.device} out")
    return found


def _check_vllm(config: Any, spread: Spread) -> None:
    """Refuse options of vLLM without it, out of their range, or beside those of transformers.

    Raises:
        ConfigError: the options contradict each other.
    """
    if config.vllm_tensor_parallel < 1 or not 0 < config.vllm_memory < 1:
        raise ConfigError(
            f"--vllm-tensor-parallel {config.vllm_tensor_parallel}, --vllm-memory "
            f"{config.vllm_memory}: expected 1 or more, and a share between 0 and 1"
        )
    packing = getattr(config, "packing", "auto")
    if config.backend != "vllm":
        if config.vllm_tensor_parallel > 1 or packing == "requests":
            raise ConfigError(
                "--vllm-tensor-parallel and --packing requests go with --backend vllm; add it"
            )
        return
    if not spread.is_one_device:
        raise ConfigError(
            "--device-map and --tp-plan are for --backend hf; vLLM spreads a target over GPUs with "
            "--vllm-tensor-parallel N"
        )
    attn = getattr(config, "attn", "auto")
    if attn != "auto" or packing not in ("auto", "rows", "requests"):
        raise ConfigError(
            f"--attn {attn}, --packing {packing}: vLLM has attention of its own and packs requests "
            "itself; leave both auto"
        )


def processes() -> int:
    """Return the number of processes that torchrun started for this command; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _device_map(text: str | None) -> str | dict[str, Any] | None:
    if text is None or text in _POLICIES:
        return text
    if not text.lstrip().startswith("{"):
        raise ConfigError(
            f"--device-map {text}: expected {', '.join(_POLICIES)} or a JSON object such as "
            '{"model": 0, "lm_head": "cpu"}; for one device, use --device'
        )
    return parse_object("--device-map", text)


def _max_memory(text: str | None) -> dict[int | str, Any] | None:
    if text is None:
        return None
    found = parse_object("--max-memory", text)
    return {int(k) if k.isdigit() else k: v for k, v in found.items()}
