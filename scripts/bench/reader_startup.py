"""Start to first batch, and memory, each measured in a process of its own.

`first_batch` opens a dataset as `spec-train fit` does: select, split, plan, read one step.
`first_batch_of_files` does the same for one file per document: list and stat the files, and read
every length before packing. Imports are not counted.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.data.order import BatchPlan
from spec_train.data.stream import BatchStream
from spec_train.options.training import Training
from spec_train.training.setup import make_splits

SEQ_LEN, PACKS = 2048, 4


def cpu_seconds() -> float:
    """Return CPU-seconds of this process and of its finished children."""
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(process)[:2]) for process in processes)


def anonymous_bytes() -> int:
    """Return resident memory that no file backs, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no RssAnon")


def storage_reads() -> int:
    """Return the bytes that the kernel fetched from disk for this process, read-ahead included."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def evict(folder: Path) -> None:
    """Drop every file of a folder from the page cache."""
    os.sync()
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def columns_of(dataset: HiddenStatesDataset) -> list[str]:
    """Return the columns that a draft reads."""
    return [c for c in dataset.columns if c.startswith(("hidden.", "target_"))]


def make_stream(path: Path) -> BatchStream:
    """Do what `fit` does with a dataset before it reads a batch."""
    dataset = HiddenStatesDataset(path)
    config = Training(data=str(path), out="none", seq_len=SEQ_LEN, batch_size=PACKS)
    plan = make_splits(dataset, config).train
    return BatchStream(dataset, plan, columns_of(dataset), batch_size=PACKS)


def first_batch(path: Path) -> dict[str, Any]:
    """Open, select, split, plan, first step."""
    stream = make_stream(path)
    steps = stream.take(1)
    tokens = sum(batch.tokens for batch in next(steps).batches)
    steps.close()
    return {"documents": len(stream.dataset), "tokens": tokens}


def first_batch_of_files(path: Path) -> dict[str, Any]:
    """List, stat, read every length, plan, load and join the documents of the first step."""
    entries = sorted((e for e in os.scandir(path)), key=lambda e: e.name)
    listed = time.perf_counter()
    sizes = [entry.stat().st_size for entry in entries]
    lengths = np.zeros(len(sizes), dtype=np.int64)
    for i, entry in enumerate(entries):
        with safe_open(entry.path, "pt") as file:
            lengths[i] = file.get_slice("input_ids").get_shape()[0]
    scanned = time.perf_counter() - listed
    usable = np.ones(len(lengths), dtype=bool)
    plan = BatchPlan(lengths, usable, seq_len=SEQ_LEN, packs_per_batch=PACKS)
    rows = [row for pack in next(plan.iter_batches(0)) for row in pack]
    parts = [load_file(entries[row].path) for row in rows]
    batch = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return {"documents": len(sizes), "tokens": len(batch["input_ids"]), "scan": scanned}


def peak_memory(path: Path) -> dict[str, Any]:
    """Return the peak of anonymous memory over an epoch, above that of the imports."""
    before = anonymous_bytes()
    stream = make_stream(path)
    peak = 0
    steps = stream.plan.count_batches(0)
    for _ in stream.take(steps):
        peak = max(peak, anonymous_bytes() - before)
    ring = sum(t.nbytes for b in stream._buffers for t in b.tensors.values())
    return {"peak": peak, "ring": ring, "steps": steps}


def write_files(folder: Path, documents: int, tokens: int, hidden: int) -> None:
    """`documents` safetensors files of `tokens` tokens each."""
    folder.mkdir(parents=True)
    item = {
        "input_ids": torch.zeros(tokens, dtype=torch.int64),
        "loss_mask": torch.ones(tokens, dtype=torch.bool),
        "hidden": torch.zeros(tokens, hidden, dtype=torch.bfloat16),
    }
    for number in range(documents):
        save_file(item, folder / f"{number:08d}.safetensors")


RUNS = {
    "first_batch": first_batch,
    "first_batch_of_files": first_batch_of_files,
    "peak_memory": peak_memory,
}


def measured(run: str, path: Path, cold: bool = False) -> dict[str, Any]:
    """Run one of RUNS in a fresh process; adds wall and CPU seconds and bytes read from disk."""
    command = [sys.executable, __file__, run, str(path), *(["--cold"] if cold else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Print the figures of one run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("path", type=Path)
    parser.add_argument("--cold", action="store_true", help="evict the files first")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.cold:
        evict(args.path)
    read, wall, cpu = storage_reads(), time.perf_counter(), cpu_seconds()
    figures = RUNS[args.run](args.path)
    figures |= {
        "wall": time.perf_counter() - wall,
        "cpu": cpu_seconds() - cpu,
        "read": storage_reads() - read,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
