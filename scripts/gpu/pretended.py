"""A GPU that is not there, for torch's real compiler: what it makes of a function, built by ptxas.

`load` first, before torch is imported. Then fake tensors of the device "cuda" go through Dynamo,
AOTAutograd and Inductor as on a GPU, gradients included; the code that Inductor would load is kept,
and nothing is run. Triton's own ptxas builds it for any card. Needs a CPU build of torch, g++ and
the package triton.
"""

import ctypes
import hashlib
import importlib.util
import linecache
import logging
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

CODE = Path(__file__).with_suffix(".cpp")
KERNEL = re.compile(r"^(triton_\w+) = async_compile\.triton\('(\w+)', '''(.*?)'''", re.S | re.M)
OUTSIDE = re.compile(r"extern_kernels\.(\w+)\(|= torch\.ops\.aten\.(\w+)")


@dataclass(frozen=True)
class Card:
    """What compilers ask of a GPU: compute capability, processors, bytes of shared memory."""

    name: str
    capability: int
    processors: int
    shared: int
    """Of a block, the most that a kernel may ask for."""
    shared_all: int
    threads: int = 2048
    memory: int = 80 << 30


CARDS = {
    "a100": Card("NVIDIA A100-SXM4-80GB", 80, 108, 166912, 167936),
    "l40s": Card("NVIDIA L40S", 89, 142, 101376, 102400, threads=1536, memory=48 << 30),
    "h200": Card("NVIDIA H200", 90, 132, 232448, 233472, memory=141 << 30),
    "b200": Card("NVIDIA B200", 100, 148, 232448, 233472, memory=180 << 30),
}


def load() -> None:
    """Build the guard, once for each torch, and load it.

    Raises:
        RuntimeError: torch is imported already, is a CUDA build, or g++ cannot build the guard.
    """
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # today's default, else a warning
    if "torch" in sys.modules:
        raise RuntimeError("torch is imported already: load the pretended device before")
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise RuntimeError("torch is not installed")
    folder = Path(found.origin).parent
    if (folder / "lib" / "libtorch_cuda.so").exists():
        raise RuntimeError("this torch has CUDA: a pretended device needs a CPU build")
    version = (folder / "version.py").read_bytes()
    digest = hashlib.sha256(CODE.read_bytes() + version).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"pretended-{os.getuid()}" / f"{digest}.so"
    if not library.exists():
        library.parent.mkdir(mode=0o700, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        include = folder / "include"
        command = ["g++", "-std=c++20", "-fPIC", "-shared", "-w", f"-I{include}"]
        command += [f"-I{include}/torch/csrc/api/include", str(CODE), f"-L{folder}/lib"]
        command += ["-lc10", "-ltorch_cpu", "-o", str(made)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ does not build {CODE.name}:\n{done.stderr}")
        made.replace(library)
    for file in (folder / "lib/libc10.so", folder / "lib/libtorch_cpu.so", library):
        ctypes.CDLL(str(file), ctypes.RTLD_GLOBAL)


def pretend(card: Card) -> None:
    """Have torch and Triton see this card, in all that compiling asks; for the whole process."""
    import torch
    import torch._inductor.fx_passes.joint_graph as joint
    import torch._inductor.fx_passes.post_grad as post
    import torch._inductor.utils
    import torch.utils._triton
    from torch._dynamo.device_interface import CudaInterface
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    logging.getLogger("torch._inductor.utils").setLevel(logging.ERROR)  # of folders it keeps
    facts = _properties(card)
    cuda: Any = torch.cuda
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": facts,
        "get_device_capability": divmod(card.capability, 10),
        "get_device_name": card.name,
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "_exchange_device": 0,
        "_maybe_exchange_device": 0,
        "current_stream": SimpleNamespace(
            cuda_stream=0, stream_id=0, device_index=0, device_type=1
        ),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    nothing = ("_lazy_init", "init", "synchronize", "set_device", "empty_cache", "set_rng_state")
    for name, value in (answers | dict.fromkeys(nothing)).items():
        setattr(cuda, name, _answer(value))
    torch.version.cuda = "13.0"
    interface = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_compute_capability": card.capability,
        "is_bf16_supported": True,
        "is_triton_capable": True,
        "exchange_device": 0,
        "maybe_exchange_device": 0,
        "get_raw_stream": 0,
        "get_device_properties": facts,
    }
    for name in ("raise_if_triton_unavailable", "synchronize", "set_device"):
        interface[name] = None
    for name, value in interface.items():
        setattr(CudaInterface, name, staticmethod(_answer(value)))
    for name, value in (
        ("get_device_properties", facts),
        ("current_device", 0),
        ("set_device", None),
    ):
        setattr(CudaInterface.Worker, name, staticmethod(_answer(value)))
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        if not hasattr(torch._C, name):
            setattr(torch._C, name, _answer(0))
    import torch._inductor.scheduler

    for module in (torch.utils._triton, torch._inductor.utils, torch._inductor.scheduler):
        if hasattr(module, "has_triton"):
            module.has_triton = _answer(True)
    for module in (joint, post):  # their patterns compute with real tensors
        module.lazy_init = _answer(None)
    given = {"max_shared_mem": card.shared, "multiprocessor_count": card.processors, "warpSize": 32}
    active = {
        "get_current_target": GPUTarget("cuda", card.capability, 32),
        "get_current_device": 0,
        "get_device_properties": given,
        "get_active_torch_device": torch.device("cuda", 0),
        "get_current_stream": 0,
    }
    driver.set_active(SimpleNamespace(**{name: _answer(x) for name, x in active.items()}))


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _properties(card: Card) -> SimpleNamespace:
    major, minor = divmod(card.capability, 10)
    return SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        total_memory=card.memory,
        multi_processor_count=card.processors,
        warp_size=32,
        max_threads_per_multi_processor=card.threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=65536,
        L2_cache_size=50 << 20,
        shared_memory_per_block=49152,
        shared_memory_per_block_optin=card.shared,
        shared_memory_per_multiprocessor=card.shared_all,
        gcnArchName="",
        is_integrated=False,
        is_multi_gpu_board=False,
        clock_rate=1_980_000,
        memory_clock_rate=3_201_000,
        memory_bus_width=6144,
        uuid="0",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
    )


@dataclass
class Lowered:
    """What Inductor would load for one graph, forward or backward."""

    way: str
    code: str

    def kernels(self) -> list[tuple[str, str]]:
        """Return the names and the Triton of its kernels."""
        return [(name, source) for _, name, source in KERNEL.findall(self.code)]

    def outside(self) -> list[str]:
        """Return the calls of kernels that are not its own, such as a matrix product."""
        return [a or b for a, b in OUTSIDE.findall(self.code)]


class _Recorded(Exception):
    """The code is known; there is nothing to load."""


def recorder(seen: list[Lowered]) -> Callable[..., Any]:
    """Return a backend for `torch.compile` that puts what Inductor makes into `seen`.

    What runs is the graph itself, on fake tensors.
    """
    import torch._inductor.compile_fx as compile_fx
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    def record(self: Any) -> Any:
        way = "backward" if self.is_backward else "no gradient" if self.is_inference else "forward"
        code = self.codegen()[0]
        seen.append(Lowered(way, getattr(code, "value", str(code))))
        raise _Recorded

    def inner(graph: Any, inputs: Any, **given: Any) -> Any:
        before, usual = len(seen), GraphLowering.compile_to_module
        GraphLowering.compile_to_module = record
        try:
            compile_fx.compile_fx_inner(graph, inputs, **given)
        except BaseException:  # Inductor may wrap ours in its own
            if len(seen) == before:
                raise
        finally:
            GraphLowering.compile_to_module = usual

        def run(args: Any) -> Any:
            return graph(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    def backend(graph: Any, inputs: Any) -> Any:
        settings = {"force_disable_caches": True, "compile_threads": 1}
        with config.patch(**settings, joint_graph_constant_folding=False):
            return compile_fx.compile_fx(graph, inputs, inner_compile=inner)

    return backend


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Make tensors without numbers; the device "cuda" holds as many as one likes."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        yield


# -- building --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Built:
    """A kernel for one card: registers and bytes of stack of a thread, bytes of shared memory."""

    registers: int
    stack: int
    shared: int
    doubles: int
    """Instructions of float64 in its PTX."""

    def facts(self) -> dict[str, int]:
        """Return them by name."""
        return asdict(self)


def build(source: str, capability: int) -> Built:
    """Build the Triton of a kernel that Inductor made, in the first of the sizes that it would try.

    Raises:
        Exception: of Triton or ptxas.
    """
    from torch._inductor.runtime import triton_heuristics as heuristics
    from triton.compiler import ASTSource

    found: dict[str, Any] = {}

    def catch(_: Any, configs: Any, *, triton_meta: Any, **__: Any) -> Callable[[Any], Any]:
        def wrap(function: Any) -> Any:
            found.update(config=configs[0], meta=triton_meta, function=function)
            return function

        return wrap

    with tempfile.NamedTemporaryFile("w", suffix=".py") as file, _without_driver():
        file.write(source)  # Triton reads the source of a function from its file
        file.flush()
        linecache.checkcache(file.name)
        usual, heuristics.cached_autotune = heuristics.cached_autotune, catch
        try:
            exec(
                compile(source, file.name, "exec"), {"__name__": "generated", "__file__": file.name}
            )
        finally:
            heuristics.cached_autotune = usual
        config, meta = found["config"], found["meta"]
        constants = {**(meta.get("constants") or {}), **config.kwargs}
        signature = dict(meta["signature"]) | dict.fromkeys(constants, "constexpr")
        known = set(found["function"].arg_names)
        constants = {name: value for name, value in constants.items() if name in known}
        signature = {name: kind for name, kind in signature.items() if name in known}
        program = ASTSource(found["function"], signature, constants, meta["configs"][0])
        return build_program(
            program, capability, num_warps=config.num_warps, num_stages=config.num_stages
        )


@contextmanager
def _without_driver() -> Iterator[None]:
    """Generated code asks for the driver of a GPU; ours is set already."""
    from torch._inductor.runtime import triton_helpers

    usual, triton_helpers.set_driver_to_gpu = triton_helpers.set_driver_to_gpu, _answer(None)
    try:
        yield
    finally:
        triton_helpers.set_driver_to_gpu = usual


def build_program(program: Any, capability: int, **options: int) -> Built:
    """Build a program of Triton; options are its number of warps and stages."""
    import triton
    from triton.backends.compiler import GPUTarget

    made = triton.compile(program, target=GPUTarget("cuda", capability, 32), options=options)
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [str(tools / "cuobjdump"), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert used is not None, text
    doubles = len(re.findall(r"\.f64\b", made.asm["ptx"]))
    return Built(int(used[1]), int(used[2]), made.metadata.shared, doubles)
