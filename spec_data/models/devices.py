"""Device and dtype choices of both programs: option texts in, torch objects out.

"auto" is the first GPU where PyTorch finds one, else the CPU. Training and evaluation compute in
bfloat16 on a GPU and in float32 on a CPU unless told otherwise.
"""

import os
import resource
import sys
from collections.abc import Mapping

import torch

from spec_data.shards.errors import ConfigError, SpecDataError

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
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


def local_gpu() -> int:
    """Return the GPU of this process, one of several that a launcher has started here.

    A launcher that shows each process its own GPU alone (SLURM's --gpus-per-task) numbers the
    processes of a machine all the same; that GPU is number 0.

    Raises:
        ConfigError: the process sees several GPUs, but fewer than there are processes.
    """
    local, visible = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if visible <= 1:
        return 0
    if local >= visible:
        raise ConfigError(
            f"LOCAL_RANK is {local} (from 0), but only {visible} GPUs are visible: start at most "
            f"{visible} processes on this machine"
        )
    return local


SMALLER_PIECES = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""The setting of PyTorch that lets it use free memory that lies in pieces."""


_ALLOCATORS_SAY = ("out of memory", "DefaultCPUAllocator", "CUBLAS_STATUS_ALLOC_FAILED")


def is_memory_error(error: RuntimeError) -> bool:
    """Tell whether PyTorch could not allocate memory, on a device or on the host.

    Only the allocator of CUDA raises a class of its own.
    """
    said = any(words in str(error) for words in _ALLOCATORS_SAY)
    return isinstance(error, torch.OutOfMemoryError) or (
        said and not isinstance(error, SpecDataError)
    )


def memory_error_text(error: RuntimeError, doing: str = "") -> str:
    """Return what PyTorch says of an allocation that failed, and the notes of it, in one line.

    `doing` names what failed, such as a step of training.
    """
    kind = "out of device memory" if isinstance(error, torch.OutOfMemoryError) else "out of memory"
    kind += f" in {doing}" if doing else ""
    words = str(error).partition(" Of the allocated memory")[0].split("\n")[0]
    return f"{kind} ({'; '.join([words, *getattr(error, '__notes__', [])])})"


def peak_memory(device: torch.device) -> int:
    """Return the largest memory in use so far, in bytes; on a CPU that of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def use_device(name: str) -> torch.device:
    """Return the device of --device, and make it the current one of this thread.

    What names no device of its own, such as page-locked memory, then needs no other GPU.

    Raises:
        ConfigError: the device does not exist or cannot be used on this machine.
    """
    device = usable_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
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
    """Resolve a --dtype of training or evaluation: "auto" is bfloat16 on a GPU, else float32."""
    if name != "auto":
        return name
    return "bfloat16" if device.type == "cuda" else "float32"


def compute_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of a --dtype of training or evaluation; see `compute_dtype_name`."""
    return DTYPES[compute_dtype_name(name, device)]
