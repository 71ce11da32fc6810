"""Prove the CUDA paths on one GPU: one command, no network; the same command goes on.

    python scripts/prove_gpu.py                              everything, on the first GPU
    python scripts/prove_gpu.py --only codecs,drafts         some parts
    python scripts/prove_gpu.py --device cpu --tiny          shows that the script itself works

The parts run in order of importance. What does not hold is a failed row of the table, not the end
of the script. After every row, --out/rows.json holds all rows so far: a run that is cut off loses
nothing, and the next one does the parts that are not done, or all if code, torch or GPU changed. A
part starts only if its usual time is left of --budget-seconds; one of many rows starts always, and
the next run does the rows that are left. After a row that broke CUDA for this process, the script
starts itself again and goes on without that row.

Nothing is installed and nothing is downloaded: the target is made here, with random weights. The
first row names what compiled kernels lack on the machine, and how to carry it there.
Exit code 0: every row holds. 1: a row failed. 2: no such device, or a package is missing. 3: parts
were left out.
"""

import argparse
import logging
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "scripts" / "bench")]

try:
    from gpu import commands, drafts, kernels, peers
    from gpu.bench import BY_ROW, Bench
except ModuleNotFoundError as error:
    print(
        f"{error}. On a machine with a network, of the same system and Python, in this folder: "
        "`pip wheel -w wheels .`; here: `pip install --no-index wheels/*.whl`",
        file=sys.stderr,
    )
    raise SystemExit(2) from None

PARTS: dict[str, tuple[Callable[[Bench], None], int]] = {
    "machine": (kernels.prove_machine, 15),
    "codecs": (kernels.prove_codecs, 15),
    "kernels": (kernels.prove_kernels, 120),
    "drafts": (drafts.prove_drafts, 400),
    "capture": (commands.prove_capture, 70),
    "ring": (kernels.prove_ring, 15),
    "fit": (commands.prove_fit, 60),
    "checkpoint": (commands.prove_checkpoint, 20),
    "decoding": (commands.prove_decoding, 45),
    "resume": (commands.prove_resume, 60),
    "throughput": (commands.prove_throughput, 40),
    "peers": (peers.prove_peers, 20),
    "speed": (drafts.prove_speed, 900),
}
"""The parts, the most important first, and the seconds to allow for each: no GPU has run them."""
WHOLE = "the part itself"
"""The row of a part that failed between its rows."""


def main(words: Sequence[str] | None = None) -> None:
    """Run the parts and print the table; `words` are those of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help=f"parts to run, with commas: {', '.join(PARTS)}")
    parser.add_argument("--budget-seconds", type=float, default=3600)
    parser.add_argument("--out", type=Path, default=Path("gpu-proof"), help="rows.json, and files")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU: a few seconds")
    args = parser.parse_args(words)
    parts = list(PARTS) if args.only is None else args.only.split(",")
    if unknown := [name for name in parts if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(PARTS)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        print(
            "--device cuda: PyTorch finds no GPU; --device cpu --tiny tries the script",
            file=sys.stderr,
        )
        raise SystemExit(2)
    logging.getLogger("spec_data").setLevel(logging.ERROR)
    raise SystemExit(run(parts, args))


def run(parts: list[str], args: argparse.Namespace) -> int:
    """Run `parts`; return the exit code."""
    args.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(args.device, args.tiny, args.out, time.monotonic() + args.budget_seconds)
    for name in parts:
        if name in bench.done or bench.broke(name, WHOLE):
            print(f"[{name}: done before]", flush=True)
            continue
        prove, usual = PARTS[name]
        usual = 0 if args.tiny or name in BY_ROW else usual
        if bench.left() < usual:
            bench.skip(name, f"{bench.left():.0f} s left of the budget, it usually takes {usual} s")
            continue
        started = time.monotonic()
        try:
            prove(bench)
        except Exception as error:  # whatever happens is a row
            bench.fail(name, WHOLE, error, traceback.format_exc())
        bench.end(name)
        print(f"[{name}: {time.monotonic() - started:.0f} s]", flush=True)
    print("\n" + bench.table())
    failed = [row for row in bench.rows if row["ok"] is False]
    absent = [row for row in bench.rows if "why" in row]
    print(
        f"\n{len(bench.rows)} rows, {len(failed)} failed, {len(absent)} left out (the same command "
        f"goes on); {args.out / 'rows.json'}"
    )
    return 1 if failed else 3 if absent else 0


if __name__ == "__main__":
    main()
