"""Where the parts of a loaded model compute, and their tensors as wholes.

A model may lie on one device, on several, partly in memory or on disk until a part runs
(accelerate's hooks), or in shards on several processes (tensor parallelism).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

_META = torch.device("meta")


def device_of(module: Any) -> torch.device:
    """Return the device on which a module computes; a module has tensors, or a hook names it."""
    for hook in _hooks(module):
        if getattr(hook, "execution_device", None) is not None:
            return torch.device(hook.execution_device)
    first = next(module.parameters(), None)
    if first is None:
        first = next(module.buffers())
    return first.device


def devices_of(model: Any) -> list[torch.device]:
    """Return every device on which a part of a model computes, in a fixed order."""
    devices = {device_of(m) for m in model.modules() if any(True for _ in m.parameters(False))}
    return sorted(devices, key=str)


def whole(module: Any, name: str) -> Tensor | None:
    """Return the tensor `name` of a module: the parameter itself if all of it is in place.

    One that is offloaded is read from memory or disk, to the device on which the module computes.
    One in shards is gathered, which all processes must do together. None if it has none.
    """
    value = getattr(module, name, None)
    if isinstance(value, DTensor):
        return value.full_tensor()
    if value is None or value.device != _META:
        return value
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            return hook.weights_map[name].to(device_of(module), value.dtype)
    return value


def in_place(module: Any, name: str) -> bool:
    """Whether `whole` returns the parameter itself."""
    value = getattr(module, name, None)
    return not isinstance(value, DTensor) and (value is None or value.device != _META)


def is_offloaded(module: Any) -> bool:
    """Whether the tensors of a module are in memory or on disk until it runs."""
    return any(getattr(hook, "weights_map", None) is not None for hook in _hooks(module))


def shares_weight(head: Any, embedding: Any) -> bool:
    """Whether the weight of a head is that of an embedding.

    Offloading and shards keep no common tensor, so the values are compared there.
    """
    if head.weight is embedding.weight:
        return True
    if in_place(head, "weight") and in_place(embedding, "weight"):
        return head.weight.data_ptr() == embedding.weight.data_ptr()
    one, other = whole(head, "weight"), whole(embedding, "weight")
    if one is None or other is None or one.shape != other.shape:
        return False
    return torch.equal(one, other.to(one.device))


def _hooks(module: Any) -> Iterator[Any]:
    """The hooks of accelerate on a module."""
    hook = getattr(module, "_hf_hook", None)
    if hook is not None:
        yield from getattr(hook, "hooks", (hook,))
