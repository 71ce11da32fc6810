"""Device and dtype choices of both programs: option texts in, torch objects out.

"auto" is the first GPU where PyTorch finds one, else the CPU. Training and evaluation compute in
bfloat16 on a GPU and in float32 on a CPU unless told otherwise.
"""

from collections.abc import Mapping

import torch

from spec_data.shards.errors import ConfigError

DTYPES = {
    **{"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32},
    **{"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32},
}
"""The dtype of every name that an option accepts."""


def _resolved(name: str) -> str:
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_type(name: str) -> str:
    """Return "cpu", "cuda", ... of a --device option, without checking that this machine has it."""
    return _resolved(name).split(":")[0]


def usable_device(name: str, flag: str = "--device") -> torch.device:
    """Return the device of a --device option.

    "cuda" keeps no index, and no context is created on GPU 0: each rank takes a GPU of its own.

    Raises:
        ConfigError: the device does not exist or cannot be used on this machine.
    """
    name = _resolved(name)
    try:
        device = torch.device(name)
        if name != "cuda":
            torch.empty(0, device=device)
        elif not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU")
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"{flag} {name}: not usable on this machine ({reason})") from None
    return device


def check_devices(name: str, device_map: object = None) -> None:
    """Raise ConfigError unless the device of --device, or all of --device-map, can be used here."""
    if not isinstance(device_map, Mapping):
        usable_device(name)
        return
    for device in dict.fromkeys(device_map.values()):
        if device != "disk":
            name = f"cuda:{device}" if isinstance(device, int) else str(device)
            usable_device(name, "--device-map:")


def sent(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a CPU tensor on `device`; for CUDA the copy is queued, and the host does not wait."""
    if device.type != "cuda" or values.device.type != "cpu":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def compute_dtype_name(name: str, device: torch.device) -> str:
    """Resolve a --dtype of training or evaluation: "auto" is "bf16" on a GPU, else "fp32"."""
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" else "fp32"


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a --dtype of training or evaluation; see `compute_dtype_name`."""
    return DTYPES[compute_dtype_name(name, device)]
