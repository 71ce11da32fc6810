"""CUDA tensors for a machine without CUDA: they name `CUDA` as their device, and hold real numbers.

`FakeCuda` is a context in which `device="cuda"` works in factories and in `Tensor.to`. Its tensors
take the same paths as on a GPU: code that asks for the device type, torch's autocast for CUDA, and
code whose work depends on values. It raises `MixedDevices` where a GPU would, and notes every host
sync, an operation for which the host waits until the GPU has done all work before it, with the
function of this project that asked for it.

What it cannot do: backward passes by autograd (torch's engine has no queue for the device and ends
the process; call the backward of a custom function as a plain function), kernels' own arithmetic
(the CPU's is used; `kernels` has those that only CUDA has). Copies that do not block run late, see
`late_streams`; one from memory that is not page-locked is noted, as a GPU has it wait.
"""

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.gpu.kernels import KERNELS
from tests.gpu.late_streams import COMPUTING, copied_late, current

CUDA = torch.device("cuda:0")  # where tensors are; the current device is always cuda:0
PACKAGES = ("spec_data", "spec_train")
aten = torch.ops.aten

WAITING = {
    aten._local_scalar_dense: "read a number",
    aten.nonzero: "count true elements",
    aten.masked_select: "count true elements",
    aten.equal: "read a number",
    aten.unique_consecutive: "count distinct elements",
    aten._unique2: "count distinct elements",
    aten.bincount: "read a number",
}
"""Operations whose result the host must know: a number, or the size of a tensor."""


class MixedDevices(RuntimeError):
    """An operation of tensors on two devices, which a GPU refuses."""


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0; `held` are its numbers, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "CudaTensor":
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(),
            dtype=held.dtype, device=CUDA, requires_grad=held.requires_grad,
        )  # fmt: skip

    def __init__(self, held: Tensor) -> None:
        self.held = held.detach()

    def __repr__(self, **_: Any) -> str:
        return f"CudaTensor({self.held})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


Syncs = Counter[tuple[str, str]]
"""How often a function of this project made the host wait, by function and reason."""
_noted: list[tuple[int, Syncs]] = []  # with the thread that counts: a writer runs beside it


def _note(reason: str) -> None:
    for thread, syncs in _noted:
        if thread == threading.get_ident():
            syncs[_asked_by(), reason] += 1


def _asked_by() -> str:
    """Return the function of this project that is running: its module and name."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in PACKAGES:
            name = frame.f_code.co_qualname.split(".<locals>")[0]
            return f"{module}.{name}"
        frame = frame.f_back
    return "(test)"


@contextmanager
def counting() -> Iterator[Syncs]:
    """Note the host syncs inside, of this thread."""
    syncs: Syncs = Counter()
    _noted.append((threading.get_ident(), syncs))
    try:
        yield syncs
    finally:
        _noted.pop()


_pinned: dict[int, Tensor] = {}  # by address, alive: an address must not be used again


def page_locked(x: Tensor) -> Tensor:
    """Note that the memory of a tensor is page-locked."""
    _pinned[x.untyped_storage().data_ptr()] = x
    return x


def _uploaded(source: Tensor, dtype: torch.dtype | None, blocking: bool) -> "CudaTensor":
    """Copy from the CPU, late unless the copy blocks."""
    dtype = dtype or source.dtype
    if blocking:
        if source.ndim:
            _note("upload")
        return CudaTensor(source.to(dtype, copy=True))
    if source.numel() and source.untyped_storage().data_ptr() not in _pinned:
        _note("upload of pageable memory")
        return CudaTensor(source.to(dtype, copy=True))
    if dtype != source.dtype or not source.is_contiguous():  # torch makes a pageable copy first
        _note("upload of another dtype, or not contiguous")
        return CudaTensor(source.to(dtype, copy=True))
    made = CudaTensor(torch.empty_like(source, dtype=dtype))
    copied_late(made.held, lambda: source)
    return made


def tree_map(change: Callable[[Any], Any], x: Any) -> Any:
    """As torch does, of tuples, lists and tables; its own looks every type up in a register."""
    if isinstance(x, (tuple, list)) and not isinstance(x, torch.Size):
        made = [tree_map(change, part) for part in x]
        return type(x)(*made) if hasattr(x, "_fields") else type(x)(made)
    if isinstance(x, dict):
        return {name: tree_map(change, part) for name, part in x.items()}
    return change(x)


def leaves(x: Any) -> list[Any]:
    """Return what is in tuples, lists and tables of arguments."""
    found: list[Any] = []
    tree_map(found.append, x)
    return found


def upload(x: Any) -> Any:
    """Return tensors of any structure on cuda:0, without noting it."""
    return tree_map(lambda t: CudaTensor(t.detach().clone()) if _on_cpu(t) else t, x)


def download(x: Any) -> Any:
    """Return tensors of any structure on the CPU, without noting it."""
    COMPUTING.run()
    return tree_map(lambda t: t.held.clone() if isinstance(t, CudaTensor) else t, x)


def move(module: torch.nn.Module) -> torch.nn.Module:
    """Move the parameters and buffers of a module in place; they need no gradient then."""
    for part in module.modules():
        for name, value in part._parameters.items():
            if value is not None:
                part._parameters[name] = torch.nn.Parameter(upload(value.data), False)
        for name, value in part._buffers.items():
            if value is not None:
                part._buffers[name] = upload(value)
    return module


def on_cuda(device: Any) -> bool:
    """Return whether a device is the GPU; refuse one that is another GPU, or the current one."""
    device = torch.device("cuda" if device is None else device)
    if device.type == "cuda" and (device.index or 0) != CUDA.index:
        raise MixedDevices(f"{device} is not {CUDA}")
    return device.type == "cuda"


def _on_cpu(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, CudaTensor)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers, after the checks of a GPU."""
    current().run()
    packet = func.overloadpacket
    if packet not in WAITING and func._can_decompose():
        with _Factories():
            return func.decompose(*args, **kwargs)
    if packet in KERNELS:
        held = tree_map(lambda x: x.held if isinstance(x, CudaTensor) else x, (args, kwargs))
        made = KERNELS[packet](*held[0], **held[1])
        return tree_map(lambda x: CudaTensor(x) if isinstance(x, Tensor) else x, made)
    if packet in (aten._to_copy, aten.copy_):
        return _copied(packet, args, kwargs)
    tensors = [x for x in leaves((args, kwargs)) if isinstance(x, Tensor)]
    indices = args[1] if packet in (aten.index, aten.index_put_, aten._index_put_impl_) else ()
    _check(func, tensors, [x for x in indices if x is not None])
    if packet in WAITING:
        _note(WAITING[packet])
    if kwargs.get("device") is not None and on_cuda(kwargs["device"]):
        kwargs = kwargs | {"device": "cpu"}
    held = tree_map(lambda x: x.held if isinstance(x, CudaTensor) else x, (args, kwargs))
    out = func(*held[0], **held[1])
    if not func._schema.returns:
        return None
    if func._schema.name.endswith("_") and not func._schema.name.endswith("__"):
        return args[0]
    if "out" in kwargs:
        return kwargs["out"]
    return tree_map(lambda x: CudaTensor(x) if isinstance(x, Tensor) else x, out)


def _check(func: Any, tensors: list[Tensor], indices: list[Tensor]) -> None:
    """Refuse tensors of two devices; note indices that a GPU must look at or fetch."""
    for index in indices:
        if _on_cpu(index) and index.ndim:
            _note("upload")  # an index may be on the CPU
        if index.dtype in (torch.bool, torch.uint8):
            _note("count true elements")
    others = [x for x in tensors if _on_cpu(x) and x.ndim and not any(x is i for i in indices)]
    if others:
        raise MixedDevices(f"{func}: tensors on cuda:0 and cpu")


def _indexed(x: CudaTensor, index: Any, *value: Any) -> Any:
    """Read or write `x[index]`, which torch's Python binding does with a guard of the device."""
    current().run()
    parts = [i for i in leaves(index) if isinstance(i, Tensor)]
    masks = [i for i in parts if i.dtype == torch.bool]
    # one number written at a mask is a masked_fill, whose size is known
    fill = len(parts) == len(masks) == 1 and bool(value) and not _ndim(value[0])
    if not fill:
        _check("indexing", [], parts)
    place = tree_map(lambda i: i.held if isinstance(i, CudaTensor) else i, index)
    if not value:
        return CudaTensor(x.held[place])
    if _on_cpu(value[0]) and _ndim(value[0]):
        raise MixedDevices("writing a CPU tensor to a part of a tensor on cuda:0")
    x.held[place] = value[0].held if isinstance(value[0], CudaTensor) else value[0]
    return None


_NUMBERS = {"__int__": int, "__index__": int, "__float__": float, "__bool__": bool}
_GUARDED = {"__invert__": "bitwise_not"} | {n: n for n in ("nonzero", "contiguous", "copy_")}


def _guarded(name: str, x: CudaTensor, *args: Any, **kwargs: Any) -> Any:
    """Call a method whose Python binding makes a guard of the device, around that binding."""
    apart = kwargs.pop("as_tuple", False)
    out = getattr(aten, _GUARDED[name])(x, *args, **kwargs)
    return out.unbind(1) if apart else out


def _ndim(x: Any) -> int:
    return x.ndim if isinstance(x, Tensor) else 0


def _copied(packet: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Copy between devices or dtypes; the host waits for a copy between devices that blocks."""
    if packet is aten.copy_:
        into, source = args[0], args[1]
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if _on_cpu(into) != _on_cpu(source) and (source.ndim or not _on_cpu(source)) and blocking:
            _note("upload" if _on_cpu(source) else "download")
        a, b = (x if _on_cpu(x) else x.held for x in (into, source))
        if blocking or _on_cpu(into) == _on_cpu(source):
            a.copy_(b)
        else:
            copied_late(a, lambda: b)
        return into
    source, blocking = args[0], not kwargs.pop("non_blocking", False)
    if not on_cuda(kwargs.pop("device", None) or CUDA):
        _note("download")  # without pinned memory the host always waits
        return source.held.to(kwargs.get("dtype"), copy=True)
    if _on_cpu(source):
        return _uploaded(source, kwargs.get("dtype"), blocking)
    return CudaTensor(aten._to_copy(source.held, **kwargs))


class _Factories(TorchDispatchMode):
    """Serves operations that make a tensor on CUDA from nothing, inside other operations."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(x, CudaTensor) for x in leaves((args, kwargs))):
            return _run(func, args, kwargs)
        device = kwargs.get("device")
        if device is None or not on_cuda(device):
            return func(*args, **kwargs)
        if func.overloadpacket is aten._to_copy:
            return _copied(aten._to_copy, args, kwargs)
        return CudaTensor(func(*args, **kwargs | {"device": torch.device("cpu")}))


class FakeCuda(TorchFunctionMode):
    """A context in which `device="cuda"` is a device; see the module."""

    backward: Any = None  # what `Tensor.backward` does

    def __enter__(self) -> Any:
        self._factories = _Factories()
        self._factories.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._factories.__exit__(*error)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if kwargs.pop("pin_memory", False):
            return page_locked(func(*args, **kwargs))
        if name == "backward":
            return self.backward(args[0])
        if name == "_has_compatible_shallow_copy_type":
            return type(args[0]) is type(args[1])
        if getattr(func, "__self__", None) is torch.Tensor.data and len(args) == 2:
            args[0].held = args[1].held
        if name == "new_tensor" and isinstance(args[0], CudaTensor):
            _note("upload")
            return CudaTensor(torch.tensor(*args[1:], **{"dtype": args[0].dtype} | kwargs))
        if name in ("__getitem__", "__setitem__") and isinstance(args[0], CudaTensor):
            return _indexed(*args)
        if name == "detach" and isinstance(args[0], CudaTensor):
            return CudaTensor(args[0].held)
        if name in _NUMBERS and isinstance(args[0], CudaTensor):
            return _NUMBERS[name](args[0].item())
        if name in _GUARDED and isinstance(args[0], CudaTensor):
            return _guarded(name, *args, **kwargs)
        if name in ("tolist", "numpy") and isinstance(args[0], CudaTensor):
            current().run()
            if name == "numpy":
                raise TypeError("numpy of a CUDA tensor: use .cpu() first")
            _note("download")
            return args[0].held.tolist()
        if name in ("to", "cuda") and isinstance(args[0], Tensor):
            return self._moved(func, *args, **kwargs)
        if kwargs.get("device") is None or not on_cuda(kwargs["device"]):
            return func(*args, **kwargs)
        if any(isinstance(x, CudaTensor) for x in args):  # zeros_like, new_full: dispatched
            return func(*args, **{k: v for k, v in kwargs.items() if k != "device"})
        if name in ("tensor", "as_tensor"):
            _note("upload")
        if args and _on_cpu(args[0]) and name.endswith("_like"):
            return CudaTensor(func(*args, **kwargs | {"device": "cpu"}))
        return CudaTensor(func(*args, **kwargs | {"device": "cpu"}))

    def _moved(self, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Do `x.to(...)`: to the other device, or only to a dtype."""
        device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        blocking, copy = not kwargs.pop("non_blocking", False), kwargs.pop("copy", False)
        for arg in args:
            if isinstance(arg, Tensor):
                device, dtype = arg.device, arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, str | torch.device):
                device = arg
        there = on_cuda(x.device if device is None else device)
        if not there or isinstance(x, CudaTensor):
            more = {} if there or not isinstance(x, CudaTensor) else {"device": "cpu"}
            return x.to(dtype=dtype or x.dtype, copy=copy, **more)
        return _uploaded(x, dtype, blocking)


@contextmanager
def cuda_autocast(dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Switch autocast for CUDA on; `torch.autocast` refuses to without a GPU."""
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    torch.autocast_increment_nesting()
    try:
        yield
    finally:
        torch.autocast_decrement_nesting()
        torch.clear_autocast_cache()
        torch.set_autocast_enabled("cuda", False)
