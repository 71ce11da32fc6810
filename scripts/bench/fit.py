"""Speed and memory of training steps, against the formulations of public trainers.

    python scripts/bench/fit.py                four drafts, T = 512 ... 4096, two vocabularies
    python scripts/bench/fit.py --drafts peagle dspark --lengths 2048 --vocabs 32768

One row of T tokens is one document, its last 60 % supervised, float32. A step is forward, loss,
backward and AdamW. "baseline": the same loss with torch's attention under an additive mask, and the
logits of every slot (`fit_baselines.py`). "recomputed": ours with --gradient-checkpointing. Losses
must agree within 1e-5, gradients within 1e-3 of their norm. All ways of one line take turns in one
process; the figure is the median of CPU-seconds per step. Peaks are resident memory above weights,
batch and optimizer state, each from a process of its own, because a peak is per process.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from fit_baselines import BASELINES  # noqa: E402
from fit_problem import SIZE, fresh_draft, random_batch  # noqa: E402

from spec_train.drafts import DRAFTS  # noqa: E402

WARM = 16  # tokens of the unmeasured first step


def main() -> None:
    """Print the table, or measure one line or cell of it (--cell)."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--drafts", nargs="+", choices=BASELINES, default=list(BASELINES))
    parser.add_argument("--lengths", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--vocabs", nargs="+", type=int, default=[4096, SIZE.vocab])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--cell", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.cell:
        draft, ways, length, vocab = args.cell
        found = measure(draft, ways.split(","), int(length), int(vocab), args)
        print(json.dumps(found))
        return
    print(
        f"hidden {SIZE.hidden}, vocabulary {SIZE.vocab}, torch {torch.__version__}, {args.device}\n"
    )
    for name in args.drafts:
        for vocab in args.vocabs if has_option(name, "draft_vocab_size") else [SIZE.vocab]:
            rows(name, vocab, args)
            print()


def rows(name: str, vocab: int, args: argparse.Namespace) -> None:
    """Print the lines of one draft and draft vocabulary."""
    print(f"{name}, draft vocabulary {vocab}")
    print("     T   tok/cpu-s   peak MB   baseline's      recomputed")
    print("                               speed  memory   speed  memory")
    for length in args.lengths:
        line(name, length, vocab, args)


def line(name: str, length: int, vocab: int, args: argparse.Namespace) -> None:
    """Print one line: our step, and the others as multiples."""
    ways = ["ours", "baseline"] + ["recomputed"] * has_option(name, "gradient_checkpointing")
    speeds = in_process(name, ways, length, vocab, args)
    peaks = {w: in_process(name, [w], length, vocab, args, peak=True)["peak"] for w in ways}
    text = f"{length:>6} {length / speeds['ours']:>11,.0f} {peaks['ours']:>9,.0f}   "
    for way in ways[1:]:
        sign = 1 if way == "baseline" else -1  # of the baseline's, and recomputed ones of ours
        text += f"{(speeds[way] / speeds['ours']) ** sign:>5.2f}x "
        text += f"{(peaks['ours'] / peaks[way]) ** sign:>6.2f}x   "
    print(text, flush=True)


def has_option(name: str, option: str) -> bool:
    """Return whether a draft has an option."""
    return option in {field.name for field in fields(DRAFTS[name].options_class)}


def in_process(
    name: str,
    ways: list[str],
    length: int,
    vocab: int,
    args: argparse.Namespace,
    peak: bool = False,
) -> Any:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--device", args.device, "--threads", str(args.threads)]
    command += ["--rounds", "0" if peak else str(args.rounds)]
    command += ["--cell", name, ",".join(ways), str(length), str(vocab)]
    env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
    if peak:  # freed large tensors return to the system, so that the peak counts live ones only
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(
    name: str, ways: list[str], length: int, vocab: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Return the seconds of every way; with 0 rounds, the peak of the only one."""
    device = args.device
    warm = Steps(name, WARM, vocab, device)  # torch loads kernels lazily
    for way in ways:
        warm.run(way)
    steps = Steps(name, length, vocab, device)
    if not args.rounds:
        before = memory(device, reset=True)
        steps.run(ways[0])
        return {"peak": memory(device) - before}
    compare({way: steps.checked(way) for way in ways})
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(args.rounds):
        for way in ways:
            seconds[way].append(steps.run(way))
    return {way: statistics.median(seconds[way]) for way in ways}


def compare(found: dict[str, Any]) -> None:
    """Refuse to compare steps of unequal losses or gradients."""
    ours = found["ours"]
    for way, other in found.items():
        if abs(other["loss"] - ours["loss"]) > 1e-5 * abs(ours["loss"]):
            raise SystemExit(f"{way}: loss {other['loss']}, but ours is {ours['loss']}")
        for a, b in zip(ours["gradients"], other["gradients"], strict=True):
            if (a - b).norm() > 1e-3 * max(a.norm(), b.norm()) + 1e-9:
                raise SystemExit(f"{way}: another gradient: {b.norm()}, but ours is {a.norm()}")


class Steps:
    """Training steps of one draft and batch; the learning rate is 0, so all steps are equal."""

    def __init__(self, name: str, length: int, vocab: int, device: str) -> None:
        """Make draft, batch and optimizer with its state."""
        self.name, self.device = name, device
        size = replace(SIZE, tokens=length, draft_vocab=vocab)
        head, batch = random_batch(size)
        draft = fresh_draft(name, head, size, published=True)
        self.draft, self.head, self.batch = draft.to(device), head.to(device), batch.to(device)
        self.parameters = self.draft.trainable_parameters()
        self.optimizer = torch.optim.AdamW(self.parameters, lr=0.0, fused=True)
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss(self, way: str) -> Tensor:
        """Return the loss, with a graph, computed in one of the ways."""
        torch.manual_seed(0)  # drafts that sample draw the same numbers
        draft, head, batch = self.draft, self.head, self.batch
        if way == "baseline":
            return BASELINES[self.name](draft, batch, head)
        if has_option(self.name, "gradient_checkpointing"):
            recompute = way == "recomputed"
            draft.use_options(replace(draft.options, gradient_checkpointing=recompute))
        return draft.loss(batch, head, draft.slot_counts(batch)).loss

    def run(self, way: str) -> float:
        """Return the seconds of a step."""
        start = clock(self.device)
        self.loss(way).backward()
        self.optimizer.step()
        seconds = clock(self.device) - start
        self.optimizer.zero_grad()
        return seconds

    def checked(self, way: str) -> dict[str, Any]:
        """Return loss and gradients of a step."""
        loss = self.loss(way)
        loss.backward()
        gradients = [torch.zeros(()) if p.grad is None else p.grad.clone() for p in self.parameters]
        self.optimizer.zero_grad()
        return {"loss": loss.item(), "gradients": gradients}


def clock(device: str) -> float:
    """Processor seconds of this process, or synchronised wall seconds on a GPU."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def memory(device: str, reset: bool = False) -> float:
    """MB: now, after a reset of the peak; else the peak since then."""
    if device != "cpu":
        if reset:
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated() / 2**20
        return torch.cuda.max_memory_allocated() / 2**20
    if reset and Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    key = "VmRSS" if reset else "VmHWM"
    return int(status.read_text().split(key + ":")[1].split()[0]) / 1024


if __name__ == "__main__":
    main()
