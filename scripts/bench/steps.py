"""Speed and memory of every draft's training step, in this checkout and in another commit.

    python scripts/bench/steps.py --against main~20
    python scripts/bench/steps.py --against v1.2 --drafts eagle3 dspark --length 2048

The problem is that of `fit.py`: one document of random states, float32, the last 60 % supervised; a
step is forward, loss, backward and AdamW. For each draft both trees run at the same time, each in a
process, and take turns step by step, so that a busy machine slows both alike. Figures are medians
of CPU-seconds; peaks are resident memory above weights, batch and optimizer state, of a step in a
process of its own. "loss" says whether the two losses are the same number.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def main() -> None:
    """Print a line for each draft, or take turns as one of the trees (--turns)."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--drafts", nargs="+", help="(default: all that both trees have)")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--turns", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turns:
        return turns(args.turns, args.length, args.vocab)
    if not args.against:
        parser.error("--against COMMIT")
    with tempfile.TemporaryDirectory(prefix="steps-") as made:
        other = Path(made) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(other), args.against], check=True)
        try:
            names = args.drafts or sorted(set(kinds(ROOT)) & set(kinds(other)))
            print("draft           s/step   before   ratio   peak MB   before   ratio   loss")
            for name in names:
                line(name, other, args)
        finally:
            subprocess.run([*git, "remove", "--force", str(other)], check=True)
    return None


def kinds(tree: Path) -> list[str]:
    """Return the names of the drafts of a tree."""
    code = "from spec_train.drafts import DRAFTS; print(*DRAFTS)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=of_tree(tree), cwd=tree, check=True, capture_output=True
    )
    return done.stdout.decode().split()


def of_tree(tree: Path) -> dict[str, str]:
    """Return the environment in which a tree's own code is imported, with one thread."""
    path = os.pathsep.join([str(tree), str(tree / "scripts" / "bench")])
    # freed large tensors return to the system, so that peaks count live ones only
    return os.environ | {
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "MALLOC_MMAP_THRESHOLD_": "65536",
    }


class Tree:
    """A process that runs a step of one draft, with a tree's code, for each line that it reads."""

    def __init__(self, tree: Path, name: str, args: argparse.Namespace) -> None:
        """Start it."""
        words = [sys.executable, __file__, "--turns", name]
        words += ["--length", str(args.length), "--vocab", str(args.vocab)]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            words, env=of_tree(tree), cwd=tree, stdin=pipe, stdout=pipe, text=True
        )

    def step(self) -> dict[str, float]:
        """Return loss, CPU-seconds and peak megabytes of one more step."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        said = self.process.stdout.readline()
        if not said:
            raise SystemExit(f"no step: exit {self.process.wait()}")
        return json.loads(said)

    def end(self) -> None:
        """End it."""
        self.process.communicate()


def line(name: str, other: Path, args: argparse.Namespace) -> None:
    """Print the line of one draft."""
    now, before = Tree(ROOT, name, args), Tree(other, name, args)
    first = now.step(), before.step()
    steps = [(now.step(), before.step()) for _ in range(args.rounds)]
    now.end()
    before.end()
    a, b = (statistics.median(step[k]["seconds"] for step in steps) for k in range(2))
    p, q = (found["peak"] for found in first)
    same = "same" if first[0]["loss"] == first[1]["loss"] else "differs"
    print(
        f"{name:<14}{a:>8.3f}{b:>9.3f}{a / b:>8.3f}{p:>10.0f}{q:>9.0f}{p / q:>8.3f}   {same}",
        flush=True,
    )


def turns(name: str, length: int, vocab: int) -> None:
    """Run a step for each line of stdin; the first is the one whose peak counts."""
    import torch
    from fit import WARM, Steps, memory

    torch.set_num_threads(1)
    Steps(name, WARM, vocab, "cpu").run("ours")  # torch loads kernels lazily
    steps = Steps(name, length, vocab, "cpu")
    for _ in sys.stdin:
        before = memory("cpu", reset=True)
        seconds = steps.run("ours")
        peak = memory("cpu") - before
        loss = steps.checked("ours")["loss"]
        print(json.dumps({"seconds": seconds, "peak": peak, "loss": loss}), flush=True)


if __name__ == "__main__":
    main()
