"""How fast hidden states are read: memcpy, preadv, this project's reader and loader, other layouts.

    python scripts/bench/reader.py                    the table, on synthetic data
    python scripts/bench/reader.py --data DIR ...     and on these datasets too, any codec
    python scripts/bench/reader.py --open 100000      first batch, against files per document
    python scripts/bench/reader.py --million          first batch at 1,000,000 documents
    python scripts/bench/reader.py --overhead         CPU time per document besides copying
    python scripts/bench/reader.py --memory           peak anonymous memory at 1x and 4x the data
    python scripts/bench/reader.py --fit              share of a training step spent on data

Passes are interleaved and quick ones repeated, files are in the page cache, figures are medians,
and ratios are medians of the ratios inside a round. Processor time includes child processes;
everything runs with one torch thread. GB are bf16 payload delivered; padding and widening do not
count.
"""

import argparse
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import datasets
import numpy as np
import torch
from reader_rivals import (
    DATALOADER,
    FLOOR,
    OTHER,
    Corpus,
    Pass,
    floors,
    others,
    ours,
    through_datasets,
)
from reader_startup import cpu_seconds, measured, write_files
from synthetic import log_normal_lengths, synthetic_dataset

MEAN_TOKENS, LONGEST = 300, 1024
BATCH_PACKS = 4


def main() -> None:
    """Run what the options ask for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, nargs="*", default=[], help="datasets to read as well")
    parser.add_argument("--size", type=float, default=0.6, help="GB of states per pass")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--docs", type=int, help="number of documents; default: 300 tokens each")
    parser.add_argument("--seq-len", type=int, default=LONGEST, help="tokens of a pack")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.5, help="of the packs for slow layouts")
    parser.add_argument(
        "--open", type=int, metavar="N", help="documents of the start-up comparison"
    )
    for mode in ("million", "memory", "overhead", "fit"):
        parser.add_argument(f"--{mode}", action="store_true")
    parser.add_argument(
        "--work", type=Path, help="where to put the data; default: a temporary folder"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    datasets.disable_progress_bars()
    print(header())
    with folder(args.work) as work:
        if args.open:
            bench_open(work, args.open)
        if args.million:
            bench_million(work)
        if args.memory:
            bench_memory(work, args)
        if args.overhead:
            bench_overhead(work)
        if args.fit:
            bench_fit(work)
        if not (args.open or args.million or args.memory or args.overhead or args.fit):
            bench_passes(work, args)


def header() -> str:
    """Hardware and versions."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((c.split(":")[1].strip() for c in cpus if c.startswith("model name")), "?")
    return (
        f"{os.cpu_count()} x {model}, Linux {platform.release()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, datasets {datasets.__version__}; "
        f"load {os.getloadavg()[0]:.1f}"
    )


@contextlib.contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """Yield a folder for the data; a temporary one is removed afterwards."""
    if given is not None:
        given.mkdir(parents=True, exist_ok=True)
        yield given
        return
    path = Path(tempfile.mkdtemp(prefix="bench_reader_"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


def synthetic(path: Path, args: argparse.Namespace, times: float = 1) -> Path:
    """Return the dataset that the options describe, `times` as large."""
    if path.exists():
        return path
    tokens = args.size * times * 1e9 / (8 * args.hidden)
    count = int(args.docs * times) if args.docs else int(tokens / MEAN_TOKENS)
    lengths = log_normal_lengths(count, tokens / count, args.seq_len)
    return synthetic_dataset(path, lengths, hidden=args.hidden)


# -- the table ------------------------------------------------------------------------------------


def bench_passes(work: Path, args: argparse.Namespace) -> None:
    """Interleaved passes of every layout, and the goals."""
    first = synthetic(work / "synthetic", args)
    layouts = work / "layouts"
    shutil.rmtree(layouts, ignore_errors=True)
    layouts.mkdir()
    corpora = [
        Corpus(path, 1.05 * args.size * 1e9, args.seq_len, BATCH_PACKS)
        for path in [first, *args.data]
    ]
    base = corpora[0]
    print(
        f"{base.tokens:,} tokens, {len(base.plan.rows):,} documents, {len(base.packs):,} packs of "
        f"{args.seq_len}, hidden {args.hidden}, {base.payload:,} bytes per token, "
        f"{args.rounds} rounds"
    )
    passes = list(floors(base, layouts))
    for corpus in corpora:
        passes += ours(corpus)
    passes += others(base, layouts, args.share)
    passes += through_datasets(base, args.share)
    repeats = [repeats_of(one) for one in passes]
    rounds = [
        [timed(one, times) for one, times in zip(passes, repeats, strict=True)]
        for _ in range(args.rounds)
    ]
    show(passes, rounds)
    shutil.rmtree(layouts)


def repeats_of(one: Pass) -> int:
    """Return how often a pass runs in a row: quick ones for about a third of a second."""
    one.run()
    start = time.perf_counter()
    one.run()
    return max(1, min(8, int(0.35 / (time.perf_counter() - start))))


def timed(one: Pass, times: int) -> tuple[float, float, float]:
    """GB/s, GB per CPU-second and tokens/s of some passes."""
    wall, cpu = time.perf_counter(), cpu_seconds()
    tokens = sum(one.run() for _ in range(times))
    wall, cpu = time.perf_counter() - wall, cpu_seconds() - cpu
    size = tokens * one.payload / 1e9
    return size / wall, size / cpu, tokens / wall


def show(passes: list[Pass], rounds: list[list[tuple[float, float, float]]]) -> None:
    """Print the table in Markdown, then the goals."""
    median = [
        [statistics.median(values) for values in zip(*(r[i] for r in rounds), strict=True)]
        for i in range(len(passes))
    ]
    rivals = [i for i, p in enumerate(passes) if p.kind in (OTHER, DATALOADER)]
    best = max(rivals, key=lambda i: median[i][1])

    def ratio(i: int, j: int, k: int = 1) -> float:
        return statistics.median(r[i][k] / r[j][k] for r in rounds)

    print("| layout | GB/s | GB/CPU-s | tokens/s | disk B/token | of memcpy | of best other |")
    print("| --- | --: | --: | --: | --: | --: | --: |")
    for i, one in enumerate(passes):
        wall, cpu, speed = median[i]
        print(
            f"| {one.name} | {wall:.2f} | {cpu:.2f} | {speed:,.0f} | {one.disk:,.0f} | "
            f"{ratio(i, 0):.2f}x | {'' if one.kind == FLOOR else f'{ratio(i, best):.2f}x'} |"
        )
    loader = next(i for i, p in enumerate(passes) if p.name.endswith("whole loader"))
    reader = next(i for i, p in enumerate(passes) if p.name.endswith("planned, 1 thread"))
    print(f"\nbest other per CPU-second: {passes[best].name}")
    print(f"reader of memcpy, per CPU-second: {ratio(reader, 0):.2f}x (goal 0.7x)")
    print(f"loader of memcpy, per CPU-second: {ratio(loader, 0):.2f}x")
    for word in ("datasets", "file", "our documents"):
        group = [i for i, p in enumerate(passes) if p.kind == DATALOADER and group_of(p) == word]
        if group:
            top = max(group, key=lambda i: median[i][2])
            print(
                f"loader against {passes[top].name}: {ratio(loader, top, 2):.1f}x tokens/s, "
                f"{ratio(loader, top):.1f}x per CPU-second (goal 5x tokens/s)"
            )


def group_of(one: Pass) -> str:
    """Which DataLoader comparison a pass belongs to."""
    return next((w for w in ("datasets", "our documents") if w in one.name), "file")


# -- start, memory, training ----------------------------------------------------------------------


def bench_open(work: Path, documents: int) -> None:
    """First batch of the same documents: one dataset against one file per document."""
    tokens, hidden = 64, 16
    data, files = work / f"open-{documents}", work / f"files-{documents}"
    if not data.exists():
        lengths = np.full(documents, tokens)
        synthetic_dataset(data, lengths, hidden=hidden, layers=(1,), shard_tokens=1 << 18)
    if not files.exists():
        write_files(files, documents, tokens, hidden)
    print(f"start to first batch, {documents:,} documents, warm, medians of 3 (seconds)")
    print("| layout | wall | CPU |\n| --- | --: | --: |")
    wall, cpu = {}, {}
    for name, run, path in (
        ("ours: open, split, plan, read", "first_batch", data),
        (
            "a safetensors file per document: list, lengths, plan, read",
            "first_batch_of_files",
            files,
        ),
    ):
        runs = [measured(run, path) for _ in range(3)]
        wall[run], cpu[run] = (statistics.median(r[k] for r in runs) for k in ("wall", "cpu"))
        print(f"| {name} | {wall[run]:.3f} | {cpu[run]:.3f} |")
    for name, values in (("wall", wall), ("CPU", cpu)):
        times = values["first_batch_of_files"] / values["first_batch"]
        print(f"{times:.0f}x sooner in {name} time (goal 50x)")


def bench_million(work: Path) -> None:
    """First batch of a million documents, warm and cold, and what was read for it."""
    data = work / "million"
    if not data.exists():
        lengths = np.random.default_rng(0).integers(4, 13, 1_000_000)
        synthetic_dataset(data, lengths, hidden=16, layers=(1,), shard_tokens=80_000)
    index = (data / "index.arrow").stat().st_size
    shards = [f.stat().st_size for f in (data / "shards").iterdir()]
    print(
        f"1,000,000 documents in {len(shards)} shards: {sum(shards) / 1e6:,.0f} MB, index "
        f"{index / 1e6:,.0f} MB; start to first batch (goal 2 s)"
    )
    print("| page cache | wall s | CPU s | MB read from disk |\n| --- | --: | --: | --: |")
    for name, cold in (("warm", False), ("cold", True)):
        runs = [measured("first_batch", data, cold) for _ in range(3)]
        wall, cpu, read = (statistics.median(r[k] for r in runs) for k in ("wall", "cpu", "read"))
        print(f"| {name} | {wall:.2f} | {cpu:.2f} | {read / 1e6:,.1f} |")


def bench_memory(work: Path, args: argparse.Namespace) -> None:
    """Peak anonymous memory of an epoch over data of two sizes."""
    print(
        "| states | steps | ring MB | peak anonymous MB above imports |\n| --- | --: | --: | --: |"
    )
    for times in (0.5, 2):
        data = synthetic(work / f"memory-{times}", args, times)
        run = measured("peak_memory", data)
        print(
            f"| {args.size * times:.1f} GB | {run['steps']} | {run['ring'] / 1e6:,.0f} | "
            f"{run['peak'] / 1e6:,.0f} |"
        )


def bench_overhead(work: Path) -> None:
    """CPU time per document of reader and loader where there is next to nothing to copy."""
    data = work / "overhead"
    if not data.exists():
        synthetic_dataset(data, log_normal_lengths(3000, MEAN_TOKENS, LONGEST), hidden=8)
    corpus = Corpus(data, 1e12, LONGEST, BATCH_PACKS)
    wanted = {"planned, 1 thread": "reader", "whole loader": "loader"}
    passes = {
        wanted[label]: one
        for one in ours(corpus)
        if (label := one.name.split(", ", 1)[1]) in wanted
    }
    seconds: dict[str, list[float]] = {name: [] for name in passes}
    for _ in range(10):
        for name, one in passes.items():
            start = time.process_time()
            one.run()
            seconds[name].append(time.process_time() - start)
    print("| | CPU-microseconds per document of 8 columns |\n| --- | --: |")
    for name, values in seconds.items():
        print(f"| {name} | {min(values) / len(corpus.plan.rows) * 1e6:.0f} |")


def bench_fit(work: Path) -> None:
    """`spec-train fit eagle3` on the CPU at hidden 1024, a few steps: its own data_wait."""
    data, run = work / "fit", work / "run"
    if not data.exists():
        lengths = log_normal_lengths(200, 200, 512)
        synthetic_dataset(data, lengths, hidden=1024, vocab=4096)
    shutil.rmtree(run, ignore_errors=True)
    options = {
        "data": data, "out": run, "steps": 6, "seq-len": 512, "batch-size": 1, "ttt-steps": 3,
        "validation": 0, "log-every": 1, "device": "cpu",
    }  # fmt: skip
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    program = "import sys; from spec_train.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "fit", "eagle3", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if line["split"] == "train"]
    print("| step | tokens/s | data wait |\n| --- | --: | --: |")
    for line in lines:
        print(f"| {line['step']} | {line['tokens_per_second']:,.0f} | {line['data_wait']:.2%} |")
    wait = statistics.mean(line["data_wait"] for line in lines)
    print(f"mean data wait {wait:.2%} (goal: under 2 %)")


if __name__ == "__main__":
    main()
