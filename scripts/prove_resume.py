"""Prove resuming: a run that is killed several times must end with the metrics of one that is not.

    python scripts/prove_resume.py --data DIR --out DIR --steps 1000 --kills 3

Both runs train at the same time, one thread per process. The second one is killed (SIGKILL) at
random moments and resumed with the same command. After the last kill but one it resumes as two
processes with half the micro-batch each, after the last one as one process. Before the two
processes every metric must be equal to the last bit. Afterwards sums have another order, and
training amplifies rounding: the script prints by how much, and fails beyond --tolerance.
"""

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

TIMING = ("tokens_per_second", "data_wait")


def main() -> None:
    """Run both, then compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--draft", default="eagle3")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument(
        "--tolerance", type=float, default=0.01, help="relative, of held-out figures"
    )
    parser.add_argument("--fit-options", default="", help="more of `spec-train fit`")
    args = parser.parse_args()
    if args.kills < 2:
        parser.error("--kills: at least 2, one before the two processes and one of them")
    if args.out.exists():
        parser.error(f"--out {args.out} exists; pass a new directory")
    args.out.mkdir(parents=True)
    start = time.monotonic()
    whole = launch(args, "whole", 1)
    try:
        exact_until = kill_and_resume(args)
        if whole.wait():
            raise SystemExit(f"the uninterrupted run failed: see {args.out / 'whole.log'}")
    finally:
        whole.kill()
    minutes = (time.monotonic() - start) / 60
    print(f"{minutes:.0f} minutes, {args.steps} steps; exact to the last bit until {exact_until}")
    raise SystemExit(compare(args.out / "whole", args.out / "killed", exact_until, args.tolerance))


def launch(args: argparse.Namespace, name: str, processes: int) -> subprocess.Popen[bytes]:
    """Start `spec-train fit`; each of two processes trains half of the packs."""
    python = [sys.executable, "-m"]
    if processes > 1:
        torchrun = ("torch.distributed.run", "--nproc-per-node", str(processes), "--standalone")
        python += [*torchrun, "-m"]
    command = [*python, "spec_train", "fit", args.draft, "--data", args.data]
    command += ["--out", str(args.out / name), "--steps", str(args.steps)]
    command += ["--batch-size", str(2 // processes), "--save-every", str(max(args.steps // 40, 1))]
    command += ["--eval-every", str(max(args.steps // 10, 1)), *args.fit_options.split()]
    with (args.out / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )


def kill_and_resume(args: argparse.Namespace) -> int:
    """Kill and resume until the run is finished; return the step at which two processes began."""
    draw, run = random.Random(args.seed), args.out / "killed"
    parts = [args.steps * (i + draw.random()) / (args.kills + 1) for i in range(args.kills)]
    exact_until = args.steps
    for number, step in enumerate(parts):
        two = number == args.kills - 1
        if two:
            exact_until = saved_step(run)
        process = launch(args, "killed", 2 if two else 1)
        while last_step(run) < step and process.poll() is None:
            time.sleep(0.5)
        time.sleep(draw.uniform(0, 5))  # in a step, while saving, while measuring
        if process.poll() is not None:
            raise SystemExit(f"ended before it was killed: see {args.out / 'killed.log'}")
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended by itself just now
            for child in psutil.Process(process.pid).children(recursive=True):
                child.kill()  # torchrun's processes are in sessions of their own
        process.kill()
        process.wait()
        left = f"saved at step {saved_step(run)}, {2 if two else 1} process(es)"
        print(f"killed after step {last_step(run)}: {left}", flush=True)
    if launch(args, "killed", 1).wait():
        raise SystemExit(f"the killed run failed: see {args.out / 'killed.log'}")
    return exact_until


def figures(run: Path) -> list[dict[str, Any]]:
    """Return metrics.jsonl without the clock's metrics; the last line may be incomplete."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    parsed = [json.loads(line) for line in lines if line.endswith("\n")]
    return [{k: v for k, v in line.items() if k not in TIMING} for line in parsed]


def last_step(run: Path) -> int:
    """Return the step of the last line of metrics.jsonl."""
    lines = figures(run)
    return lines[-1]["step"] if lines else -1


def saved_step(run: Path) -> int:
    """Return the step of the last complete checkpoint, 0 before the first."""
    last = run / "last"
    return int(last.resolve().name.rpartition("-")[2]) if last.exists() else 0


def compare(one: Path, two: Path, exact_until: int, tolerance: float) -> int:
    """Print how far the runs differ; return 1 if too far."""
    a, b = figures(one), figures(two)
    if [(x["step"], x["split"]) for x in a] != [(x["step"], x["split"]) for x in b]:
        print("the runs did not log the same steps")
        return 1
    unequal = [x["step"] for x, y in zip(a, b, strict=True) if x["step"] <= exact_until and x != y]
    if unequal:
        print(f"figures differ at steps {unequal[:9]}: they should be the same to the last bit")
        return 1
    same = sum(x["step"] <= exact_until for x in a)
    print(f"{same} lines of {len(a)} equal to the last bit")
    worst = 0.0
    for x, y in zip(a, b, strict=True):
        if x["split"] == "train" or not x["step"]:
            continue
        parts = []
        for key in ("loss", "acceptance_length"):
            if x[key] is None or y[key] is None:
                raise SystemExit(f"step {x['step']}: no held-out {key}; use more documents")
            off = abs(y[key] / x[key] - 1)
            parts.append(f"{key} {x[key]:.6f} {y[key]:.6f} ({off:.1e})")
            worst = max(worst, off)
        print(f"step {x['step']:>6}, held out: " + ", ".join(parts))
    states = [load_file(run / "last" / "training_state.safetensors") for run in (one, two)]
    masters = [{k: v for k, v in s.items() if k.startswith("master.")} for s in states]
    apart = sum(float((masters[0][k] - masters[1][k]).square().sum()) for k in masters[0]) ** 0.5
    size = sum(float(v.square().sum()) for v in masters[0].values()) ** 0.5
    print(f"weights: relative distance {apart / size:.1e}")
    return int(worst > tolerance)


if __name__ == "__main__":
    main()
