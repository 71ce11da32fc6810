"""How fast a remote dataset is read: from the storage, and from the blocks on the local disk.

    python scripts/bench/remote_read.py                   a synthetic dataset on memory://
    python scripts/bench/remote_read.py --data URL        another one, with the cache that you have

Every document is read into a reused buffer, in the order of the shards, by one thread; requests go
64 documents ahead. `local` is the same dataset in a directory, mapped, in the page cache. Processor
time includes all threads. Figures are the median of three passes; `cold` is one pass.
"""

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path

import fsspec
import torch
from synthetic import log_normal_lengths, synthetic_dataset

from spec_data.report import table
from spec_data.shards.reader import HiddenStatesDataset

AHEAD = 64  # documents


def read_all(dataset: HiddenStatesDataset) -> tuple[float, float]:
    """Read every wide column of every document; return GB per second, and per CPU-second."""
    columns = [c for c in dataset.manifest.columns if c.name.startswith("hidden.")]
    longest = int(dataset.lengths.max())
    out = {c.name: torch.empty(longest, c.width or 1, dtype=torch.bfloat16) for c in columns}
    total = int(dataset.lengths.sum()) * sum(2 * (c.width or 1) for c in columns)
    clock, cpu = time.perf_counter(), time.process_time()
    for row in range(len(dataset)):
        if dataset.mirror is not None and row + AHEAD < len(dataset):
            dataset.fetch_ahead(row + AHEAD, out)
        dataset.read_into(row, out)
    return (
        total / 1e9 / (time.perf_counter() - clock),
        total / 1e9 / (time.process_time() - cpu),
    )


def measure(place: str) -> list[tuple[str, float, float]]:
    """Read a dataset once, and three times more; return name and figures of each line."""
    dataset = HiddenStatesDataset(place)
    first = read_all(dataset)
    rates = [read_all(HiddenStatesDataset(place)) for _ in range(3)]
    again = tuple(statistics.median(column) for column in zip(*rates, strict=True))
    if dataset.mirror is None:
        return [("local", *again)]
    return [("remote, cold", *first), ("remote, blocks on the disk", *again)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a URL; default: a synthetic dataset")
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--hidden", type=int, default=1024)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        lines, url = [], args.data
        if url is None:
            os.environ["SPEC_DATA_CACHE"] = f"{folder}/cache"
            lengths = log_normal_lengths(args.documents, 400, 2048)
            local = Path(folder) / "data"
            synthetic_dataset(local, lengths, hidden=args.hidden)
            lines += measure(str(local))
            url = "memory://bench/data"
            for file in local.rglob("*"):
                if file.is_file():
                    name = f"/bench/data/{file.relative_to(local)}"
                    fsspec.filesystem("memory").pipe_file(name, file.read_bytes())
        lines += measure(url)
    print(f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}")
    rows = [(name, f"{rate:.2f}", f"{cpu:.2f}") for name, rate, cpu in lines]
    print(table([("", "GB/s", "GB per CPU-s"), *rows]))


if __name__ == "__main__":
    main()
