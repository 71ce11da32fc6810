"""The peak learning rate of short runs: held-out lengths of runs of fit, by steps and rate.

    python scripts/bench/rates.py --data quickstart/dataset --steps 50 100 200 400 \\
        --results rates.jsonl

Each run is `fit` from random weights with the rate that its width has (`training.settings`), times
a factor. "length" is that of simulated decoding of the held-out documents at the last step. With
--results every run is a line of that file, and one that stands there is not run again.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from spec_data import open_dataset
from spec_data.terminal.config import to_dict
from spec_data.terminal.given import Options
from spec_train.commands.fit import fit
from spec_train.options.draft_options import DraftOptions
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.options.training import Training
from spec_train.training.settings import default_lr, short_run_factor


def main() -> None:
    """Print a row for each number of steps, with the mean over seeds for each factor."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--draft", default="eagle3", choices=DRAFT_OPTIONS)
    parser.add_argument("--steps", type=int, nargs="+", default=[50, 100, 200, 400])
    parser.add_argument("--factors", type=float, nargs="+", default=[1.0, 2.0, 4.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--optimizer", default="muon", choices=["muon", "adamw"])
    parser.add_argument("--train-head", action="store_true")
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--draft-vocab-size", type=int, default=1024)
    parser.add_argument("--validation", type=float, default=0.05)
    parser.add_argument("--results", help="file of finished runs, a JSON object per line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    usual = default_lr(open_dataset(args.data).manifest.hidden_size, args.optimizer)
    print(f"steps   rule  {'  '.join(f'x{factor:<6g}' for factor in args.factors)}")
    for steps in args.steps:
        means = []
        for factor in args.factors:
            found = [length(args, steps, usual * factor, seed) for seed in args.seeds]
            means.append(sum(found) / len(found))
        row = "  ".join(f"{mean:<7.3f}" for mean in means)
        print(f"{steps:<6}  x{short_run_factor(steps):<4g}  {row}", flush=True)


def length(args: argparse.Namespace, steps: int, lr: float, seed: int) -> float:
    """Return the held-out acceptance length of a draft after some steps."""
    plan = Training(
        data=args.data,
        out="",
        steps=steps,
        lr=lr,
        seed=seed,
        optimizer=args.optimizer,
        seq_len=args.seq_len,
        batch_size=1,
        validation=args.validation,
    )
    given = {"draft_vocab_size": args.draft_vocab_size, "train_head": args.train_head or None}
    options = DRAFT_OPTIONS[args.draft]
    known = {k: v for k, v in given.items() if k in options.__dataclass_fields__ and v is not None}
    return known_length(args.results, plan, options(**known))


def known_length(results: str | None, plan: Training, options: DraftOptions) -> float:
    """Return the length of a run from the file of results, or run it and add its line."""
    run = {"draft": type(options).__name__, **changes(plan), **changes(options)}
    if results is not None and Path(results).exists():
        for line in Path(results).read_text(encoding="utf-8").splitlines():
            known = json.loads(line)
            if known["run"] == run:
                return known["length"]
    length = held_out_length(plan, options)
    if results is not None:
        with Path(results).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"run": run, "length": length}) + "\n")
    return length


def changes(options: Options) -> dict[str, Any]:
    """Return the options that were given, as JSON has them."""
    return {name: to_dict(options)[name] for name in sorted(options.given)}


def held_out_length(plan: Training, options: DraftOptions) -> float:
    """Return the length of simulated decoding of held-out documents after a run of `fit`."""
    with tempfile.TemporaryDirectory() as folder:
        once = {"eval_every": plan.steps, "save_every": plan.steps}
        fit(replace(plan, out=f"{folder}/run", **once), options)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    figures = [json.loads(line) for line in lines]
    return [f["serving_like_length"] for f in figures if "serving_like_length" in f][-1]


if __name__ == "__main__":
    main()
