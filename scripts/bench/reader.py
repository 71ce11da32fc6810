"""How fast hidden states are read: memcpy, this project's reader and loader, and other layouts.

    python scripts/bench/reader.py                    the table, on synthetic data
    python scripts/bench/reader.py --data DIR ...     and on these datasets too, any codec
    python scripts/bench/reader.py --open 100000      first batch, against files per document

Every pass delivers the same documents once. Passes are interleaved, files are in the page cache,
figures are medians of rounds, and ratios are medians of the ratios inside a round. Processor time
includes child processes; everything runs with one torch thread.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from synthetic import log_normal_lengths, synthetic_dataset
from torch import Tensor
from torch.utils.data import DataLoader

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL
from spec_data.terminal.text_table import text_table
from spec_train.data.order import BatchPlan
from spec_train.data.splits import make_splits
from spec_train.data.stream import BatchStream, BufferOptions
from spec_train.options.training import Training

MEAN_TOKENS, LONGEST, PACKS = 300, 1024, 4


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="datasets to read as well")
    parser.add_argument("--size", type=float, default=0.6, help="GB of states per pass")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--open", type=int, metavar="N", help="documents of the first batch")
    parser.add_argument("--first-batch", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    if args.first_batch:
        first_batch(*args.first_batch)
        return
    with tempfile.TemporaryDirectory(prefix="bench_reader_") as folder:
        if args.open:
            bench_open(Path(folder), args.open)
        else:
            bench_passes(Path(folder), args)


def cpu_seconds() -> float:
    """Return CPU-seconds of this process and of its finished children."""
    processes = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    return sum(sum(resource.getrusage(process)[:2]) for process in processes)


# -- passes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One line of the table: `run` delivers every document and returns how many tokens it read."""

    name: str
    run: Callable[[], int]
    disk: float  # bytes per token on disk


class Corpus:
    """The documents that every pass reads: a dataset, its plan, its packs, its columns."""

    def __init__(self, path: Path, max_bytes: float) -> None:
        """Take documents of the dataset at `path` until `max_bytes` of states, in packs."""
        self.dataset = HiddenStatesDataset(path)
        self.columns = {c.name: c for c in self.dataset.manifest.columns}
        self.states = [name for name in self.columns if name.startswith("hidden.")]
        each = sum(2 * (self.columns[name].width or 1) for name in self.states)
        self.lengths = np.minimum(self.dataset.lengths, LONGEST)
        usable = np.cumsum(self.lengths) * each <= max_bytes
        self.plan = BatchPlan(self.lengths, usable, seq_len=LONGEST, packs_per_batch=PACKS)
        self.packs = [pack for batch in self.plan.batches(0) for pack in batch]
        self.tokens = sum(int(self.lengths[pack].sum()) for pack in self.packs)
        self.payload = each
        self.disk = size_of(path / "shards") / int(self.dataset.lengths.sum())

    def slots(self) -> dict[str, Tensor]:
        """Return a buffer for one batch of packs, in the dtypes of a trainer."""
        dtypes = {c: torch.bfloat16 for c in self.states}
        return {
            name: torch.zeros(
                (LONGEST * PACKS, c.width) if c.width else LONGEST * PACKS,
                dtype=dtypes.get(name, c.coder.logical),
            )
            for name, c in self.columns.items()
        }

    def document(self, row: int) -> dict[str, Tensor]:
        """Return a document as other tools store it: aux states concatenated, final ones apart."""
        item, count = self.dataset[row], int(self.lengths[row])
        aux = torch.cat([item[name] for name in self.states if name != FINAL], -1)
        values = {name: item[name] for name in ("input_ids", "loss_mask")}
        values |= {"aux": aux, "final": item[FINAL]}
        return {name: value[:count].contiguous() for name, value in values.items()}

    def spans(self, packs: list[list[int]]) -> Iterator[tuple[int, int, int]]:
        """Yield `(row, tokens, first slot)` of every document, batch by batch."""
        for number, pack in enumerate(packs):
            start = number % PACKS * LONGEST
            for row in pack:
                count = int(self.lengths[row])
                yield row, count, start
                start += count


def size_of(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def memcpy(corpus: Corpus) -> Pass:
    """Copies of the same number of bytes, document by document, into reused slots."""
    each = corpus.payload
    source = torch.randint(-(2**62), 2**62, (corpus.tokens * each // 8 + 1,)).view(torch.uint8)
    slots = torch.zeros(LONGEST * PACKS * each, dtype=torch.uint8)

    def copy() -> int:
        done = 0
        for _, count, start in corpus.spans(corpus.packs):
            size = count * each
            slots[start * each : start * each + size].copy_(source[done : done + size])
            done += size
        return corpus.tokens

    return Pass(name="memcpy", run=copy, disk=0)


def ours(corpus: Corpus) -> Iterator[Pass]:
    """`read_into` in the order of the plan, and the whole loader."""
    buffers = [corpus.slots(), corpus.slots()]
    pool = ThreadPoolExecutor(2)
    path = corpus.dataset.path

    def read(dataset: HiddenStatesDataset, packs: list[list[int]], out: dict[str, Tensor]) -> int:
        for row, count, start in corpus.spans(packs):
            dataset.read_into(row, out, start, count)
        return corpus.tokens

    def two_threads() -> int:
        parts = [pool.submit(read, corpus.dataset, corpus.packs[i::2], buffers[i]) for i in (0, 1)]
        return max(part.result() for part in parts)

    columns = [name for name in corpus.columns if name not in ("input_ids", "loss_mask")]
    options = BufferOptions(dtype=torch.bfloat16)
    stream = BatchStream(corpus.dataset, corpus.plan, columns, batch_size=PACKS, buffers=options)

    def loader() -> int:
        stream.load_state_dict(corpus.plan.state(0, 0))
        return sum(
            batch.tokens for s in stream.take(len(corpus.plan.batches(0))) for batch in s.batches
        )

    codec = "+".join(dict.fromkeys(corpus.columns[name].codec for name in corpus.states))
    for name, run in {
        "one thread": lambda: read(corpus.dataset, corpus.packs, buffers[0]),
        "one thread, opened again: every chunk is checked": lambda: read(
            HiddenStatesDataset(path), corpus.packs, buffers[0]
        ),
        "two threads": two_threads,
        "whole loader": loader,
    }.items():
        yield Pass(name=f"ours {codec}, {name}", run=run, disk=corpus.disk)


def others(corpus: Corpus, folder: Path) -> Iterator[Pass]:
    """One safetensors file per document, and `datasets` in torch format, through a DataLoader."""
    folder.mkdir()
    for row in corpus.plan.rows.tolist():
        save_file(corpus.document(row), folder / f"{row}.safetensors")
    batches = [
        [row for pack in corpus.packs[i : i + PACKS] for row in pack]
        for i in range(0, len(corpus.packs), PACKS)
    ]
    disk = size_of(folder) / corpus.tokens
    files = [load_file, [folder / f"{row}.safetensors" for row in range(len(corpus.lengths))]]
    for workers in (0, 2):
        name = f"safetensors per document, DataLoader, {workers} workers"
        yield Pass(name=name, run=dataloader(files, batches, corpus, workers), disk=disk)
    opened = datasets.load_from_disk(str(corpus.dataset.path))
    table = opened.with_format("torch", columns=list(corpus.columns))
    part = batches[: max(1, len(batches) // 8)]  # it is slow
    rows = [table.__getitem__, range(len(table))]
    name = "datasets in torch format, DataLoader, 0 workers"
    yield Pass(name=name, run=dataloader(rows, part, corpus, 0), disk=corpus.disk)


def dataloader(
    source: list, batches: list[list[int]], corpus: Corpus, workers: int
) -> Callable[[], int]:
    """Return a pass of a DataLoader over a list that `source` = [load, names] reads."""
    load, names = source

    class Documents(torch.utils.data.Dataset):
        def __getitem__(self, row: int) -> dict[str, Tensor]:
            return load(names[row])

    loader = DataLoader(
        Documents(),
        batch_sampler=batches,
        collate_fn=lambda rows: {n: torch.cat([row[n] for row in rows]) for n in rows[0]},
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    tokens = int(sum(corpus.lengths[batch].sum() for batch in batches))

    def run() -> int:
        for _ in loader:
            pass
        return tokens

    return run


def bench_passes(work: Path, args: argparse.Namespace) -> None:
    """Time interleaved passes of every layout and print the table."""
    tokens = args.size * 1e9 / (8 * args.hidden)
    lengths = log_normal_lengths(int(tokens / MEAN_TOKENS), MEAN_TOKENS, LONGEST)
    made = synthetic_dataset(work / "synthetic", lengths, hidden=args.hidden)
    corpora = [Corpus(path, 1.05 * args.size * 1e9) for path in [made, *args.data]]
    passes = [memcpy(corpora[0])]
    for corpus in corpora:
        passes += ours(corpus)
    passes += others(corpora[0], work / "files")
    for one in passes:
        one.run()
    rounds = [[timed(one) for one in passes] for _ in range(args.rounds)]
    rows: list[tuple] = [("layout", "tokens/s", "disk bytes/token", "of memcpy, per CPU-second")]
    for i, one in enumerate(passes):
        speed = statistics.median(line[i][0] for line in rounds)
        ratio = statistics.median(line[i][1] / line[0][1] for line in rounds)
        rows.append((one.name, f"{speed:,.0f}", f"{one.disk:,.0f}", f"{ratio:.2f}"))
    print(f"{corpora[0].tokens:,} tokens, hidden {args.hidden}, {args.rounds} rounds")
    print(text_table(rows))


def timed(one: Pass) -> tuple[float, float]:
    """Return tokens per second and per CPU-second."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = one.run()
    return tokens / (time.perf_counter() - wall), tokens / (cpu_seconds() - cpu)


# -- the first batch ------------------------------------------------------------------------------


def bench_open(work: Path, documents: int) -> None:
    """CPU-seconds to the first batch: one dataset against one file per document."""
    length, hidden, files = 64, 16, work / "files"
    synthetic_dataset(work / "data", np.full(documents, length), hidden=hidden, layers=(1,))
    files.mkdir()
    item = {"input_ids": torch.zeros(length, dtype=torch.int64)}
    item["hidden"] = torch.zeros(length, hidden, dtype=torch.bfloat16)
    for number in range(documents):
        save_file(item, files / f"{number:08d}.safetensors")
    for layout in ("data", "files"):
        command = [sys.executable, __file__, "--first-batch", layout, str(work / layout)]
        runs = [subprocess.run(command, stdout=subprocess.PIPE, check=True) for _ in range(3)]
        seconds = statistics.median(json.loads(run.stdout) for run in runs)
        print(f"{layout:6} {documents:,} documents: {seconds:.3f} CPU-s to the first batch")


def first_batch(layout: str, path: str) -> None:
    """Print the CPU-seconds from an open process to the first batch."""
    start = cpu_seconds()
    if layout == "data":  # as `spec-train fit`: open, split, plan, read
        dataset = HiddenStatesDataset(path)
        options = Training(data=path, out="none", seq_len=2048, batch_size=PACKS)
        columns = [c for c in dataset.columns if c.startswith(("hidden.", "target_"))]
        plan = make_splits(dataset, options).train
        next(iter(BatchStream(dataset, plan, columns, batch_size=PACKS).take(1)))
    else:  # list the files, read every length, pack, load
        files = sorted(entry.path for entry in os.scandir(path))
        lengths = []
        for name in files:
            with safe_open(name, "pt") as file:
                lengths.append(file.get_slice("input_ids").get_shape()[0])
        usable = np.ones(len(files), bool)
        plan = BatchPlan(np.array(lengths), usable, seq_len=2048, packs_per_batch=PACKS)
        parts = [load_file(files[row]) for pack in next(plan.iter_batches(0)) for row in pack]
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    print(cpu_seconds() - start)


if __name__ == "__main__":
    main()
