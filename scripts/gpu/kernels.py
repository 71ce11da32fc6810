"""The machine's peak, codecs on the device, attention kernels, and the reader's pinned buffers."""

import os
import platform
import shutil
import sysconfig
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpu.bench import Bench
from gpu.target import dataset_of
from spec_data.shards.codecs import Basis, bf16_bits, decode, encode_tensors
from spec_data.shards.shard import CodedRows, StoredRows
from spec_train.attention.flex import Case
from spec_train.attention.fused import fuses
from spec_train.attention.masked import default_backend, small_case
from spec_train.data.mixture import open_documents
from spec_train.data.splits import make_splits
from spec_train.data.stream import BatchStream, BufferOptions
from spec_train.data.upload import Uploads
from spec_train.losses.kernels import GROUPS, SUMS
from spec_train.losses.kernels import kernels as loss_kernels
from spec_train.losses.kernels import small_case as loss_case
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training

NEEDED: dict[str, Callable[[], object]] = {
    "triton": lambda: find_spec("triton"),
    "a C compiler": lambda: shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc"),
    "Python.h": lambda: (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
}
"""What Inductor compiles flex_attention with."""
CARRY = (
    "on a machine with a network, of the same system and Python: `pip download -d wheels triton` "
    "(`apt-get download gcc python3-dev` and what they need for the rest); here: `pip install "
    "--no-index --find-links wheels triton`"
)


def prove_machine(bench: Bench) -> None:
    """Name the machine and measure bf16 matrix products, to which the other rates are compared."""
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if bench.on_gpu:
        free, total = torch.cuda.mem_get_info()
        facts |= {"gpu": torch.cuda.get_device_name(), "free_gb": round(free / 2**30, 1)}
        facts |= {"total_gb": round(total / 2**30, 1)}
    bench.row("machine", "software", None, **facts)
    missing = [name for name, there in NEEDED.items() if bench.on_gpu and not there()]
    carry = {"missing": ", ".join(missing), "carry": CARRY} if missing else {}
    bench.row("machine", "what compiled kernels need", not missing, **carry)

    def peak() -> tuple[bool, dict[str, Any]]:
        size = 256 if bench.tiny else 8192
        a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
        seconds = bench.seconds(lambda: a @ b, 10)
        bench.facts["peak"] = 2 * size**3 / seconds
        return True, {"size": size, "tflops": bench.facts["peak"] / 1e12}

    bench.attempt("machine", "bf16 matrix product", peak)


def prove_codecs(bench: Bench) -> None:
    """The codec on the device must decode to the bits of the CPU, and encode to nearly all."""
    tokens, width = (64, 64) if bench.tiny else (16384, 2048)
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(tokens, width, generator=generator).bfloat16()
    values[::50] *= 300  # massive activations: tokens that escape
    bench.attempt("codecs", "rotated", lambda: _codec(bench, values))


def _codec(bench: Bench, values: torch.Tensor) -> tuple[bool, dict[str, Any]]:
    tables, there = Basis(values).tables(0.5), values.to(bench.device)
    (codes, away), (other, far) = (encode_tensors(v, tables) for v in (values, there))
    differing = int((codes != other.cpu()).sum())
    escaped = away.nonzero()[:, 0]
    rows = escaped.numpy().astype(np.int32)
    stored = StoredRows(codes.numpy(), rows, bf16_bits(values[escaped]))
    states = []
    for place in ("cpu", bench.device):
        pin = bench.on_gpu and place != "cpu"
        buffer = CodedRows(values.shape[1], len(values), pin)
        buffer.add(stored, tables, np.arange(len(values)))
        states.append(buffer.states(len(values), place, torch.bfloat16, pin).cpu())
    decoded = torch.equal(states[0].view(torch.int16), states[1].view(torch.int16))
    encode = bench.seconds(lambda: encode_tensors(there, tables))
    on_device = other if bench.on_gpu else codes
    decode_ = bench.seconds(lambda: decode(on_device, tables))
    # encoding may differ where a coordinate is half-way; decoding may not differ in a bit
    close = differing <= 1e-3 * codes.numel() and torch.equal(away, far.cpu())
    return decoded and close, {
        "decode": "equal bits" if decoded else "OTHER BITS",
        "encode": "equal bits" if not differing else f"{differing} codes differ",
        "escaped": len(escaped),
        "encode_gb_s": values.nbytes / encode / 1e9,
        "decode_gb_s": values.nbytes / decode_ / 1e9,
    }


def prove_kernels(bench: Bench) -> None:
    """Try compiled chains, losses, and both kernels of attention by head size and dtype."""
    device, low, wide = torch.device(bench.device), torch.bfloat16, torch.float32
    if bench.on_gpu:
        bench.row("kernels", "compiled chains of the layers and losses", fuses(device))
        for dtype, kernel in product((low, wide), (*loss_kernels().FORMS, SUMS, GROUPS)):
            losses = partial(loss_case, device, dtype, kernel)
            name = f"losses {kernel} {str(dtype)[6:]}"
            bench.attempt("kernels", name, lambda losses=losses: _judged(losses()))
    cases = [(n, low) for n in (64, 80, 96, 128, 256)] + [(128, wide)]
    cases = cases if bench.on_gpu else [(16, wide)]
    for size, dtype in cases:
        for backend in ("merged", "flex") if bench.on_gpu else ("merged",):
            case = partial(small_case, backend, device, dtype, (4, 2, size))
            name = f"{backend} {str(dtype)[6:]} {size}"
            bench.attempt("kernels", name, lambda case=case: _judged(case()))
        chosen = default_backend(device, dtype, (4, 2, size))
        name = f"chosen for {str(dtype)[6:]} {size}"
        bench.row("kernels", name, chosen != "dense", backend=chosen)


def _judged(case: Case) -> tuple[bool, dict[str, Any]]:
    error = case.error()
    return error <= case.allowed(), {"error": error, "allowed": case.allowed()}


def _stream(bench: Bench, device: torch.device | None, pin: bool) -> tuple[BatchStream, int]:
    """Return the batches of the captured dataset, and how many steps to take of them."""
    config = Training(data=(str(dataset_of(bench)),), out="", seq_len=256, validation=0.0)
    dataset = open_documents(parse_sources(config.data), config.mask)
    plan = make_splits(dataset, config).train
    columns = tuple(c.name for c in dataset.manifest.columns if c.name.startswith("hidden."))
    options = BufferOptions(dtype=torch.bfloat16, pin=pin, decode_on=device)
    stream = BatchStream(dataset, plan, columns, batch_size=2, buffers=options)
    return stream, min(20, plan.count_batches(0))


def prove_ring(bench: Bench) -> None:
    """Batches through page-locked buffers, decoded on the device, equal those of the CPU; and how
    fast they come if nothing is computed.
    """

    def ring() -> tuple[bool, dict[str, Any]]:
        sums = []
        for pin, device in ((False, None), (bench.on_gpu, torch.device(bench.device))):
            stream, steps = _stream(bench, device, pin)
            batches = []
            for step in stream.take(steps):
                for host in step.batches:
                    batch = host.to(device or "cpu", torch.bfloat16, non_blocking=True)
                    batches.append({k: v.cpu().clone() for k, v in batch.hidden.items()})
            sums.append(batches)
        pairs = [(a[k], b[k]) for a, b in zip(*sums, strict=True) for k in a]
        equal = all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)
        return equal and len(sums[0]) > 0, {"batches": len(sums[0]), "columns": len(stream.columns)}

    bench.attempt("ring", "pinned, decoded on the device", ring)

    def alone() -> tuple[None, dict[str, Any]]:
        device, tokens = torch.device(bench.device), 0
        stream, steps = _stream(bench, device, bench.on_gpu)
        uploads = Uploads(device, torch.bfloat16)
        start = bench.synchronised()
        for step in stream.take(steps):
            for host in uploads.batches(step, stream.peek):
                tokens += host.document_ids.numel()
        seconds = bench.synchronised() - start
        return None, {"tokens_s": tokens / seconds, "tokens": tokens}

    bench.attempt("ring", "the loader alone", alone)
