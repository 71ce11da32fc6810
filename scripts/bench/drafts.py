"""Every draft from one dataset: equal training tokens, simulated and real acceptance, engines.

    python scripts/bench/drafts.py --target MODEL --corpus FILE --prompts FILE --out DIR

`spec-data generate` makes one dataset (layers spread over the depth) unless --out has it. Each
draft trains for --steps steps of --seq-len tokens through `spec-train fit`, and is measured by
`spec-train eval` on the held-out documents and on prompts, greedy and at temperature 1. Everything
is kept in --out; run the script again to resume. tokens/s are those of training on this machine.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from spec_data.cli import main as spec_data
from spec_data.terminal.text_table import text_table
from spec_train.cli import main as spec_train
from spec_train.drafts import DRAFTS, load_draft

SMALL = "--num-layers 2 --num-anchors 128"
OPTIONS = {
    "eagle": "--depth 7",
    "eagle3": "",
    "peagle": "--num-layers 2 --depths 7",
    "dflash": f"{SMALL} --block-size 7",  # DSpark without its heads
    "dspark": f"{SMALL} --markov-rank 256",
}
"""What each draft is trained with beyond the defaults: a small target gets drafts of two layers."""


def main() -> None:
    """Make what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--drafts", nargs="+", default=list(OPTIONS), choices=sorted(DRAFTS))
    parser.add_argument("--layers", default="spread:3")
    parser.add_argument("--codec", default="")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--limit", type=int, default=64, help="prompts that are decoded")
    parser.add_argument("--fit-options", default="--batch-size 1", help="more of `spec-train fit`")
    args = parser.parse_args()
    data = args.out / "data"
    if not (data / "manifest.json").is_file():
        made = ["--target", args.target, "--corpus", args.corpus, "--layers", args.layers]
        codec = ["--codec", args.codec] if args.codec else []
        call(spec_data, "generate", *made, *codec, "--out", data)
    head = ("draft", "parameters", "train tok/s", "simulated", "greedy", "T=1", "passes/round")
    rows: list[tuple] = [(*head, "accepted by depth, greedy")]
    for name in args.drafts:
        rows.append(line(name, data, args))
        print(text_table(rows[-1:]), flush=True)
    print(
        f"\n{args.steps} steps, {args.limit} prompts, torch {torch.__version__}\n\n"
        + text_table(rows)
    )


def call(program: Any, *words: object) -> None:
    """Run a command of this project in this process."""
    code = program([str(word) for word in words])
    if code:
        raise SystemExit(code)


def line(name: str, data: Path, args: argparse.Namespace) -> tuple:
    """Return the metrics of one draft; steps whose files exist are skipped."""
    run = args.out / name
    results = {kind: args.out / f"{name}.{kind}.json" for kind in ("data", "greedy", "sampled")}
    if not results["data"].is_file():
        often = ["--steps", args.steps, "--eval-every", args.steps, "--save-every", args.steps]
        more = [*args.fit_options.split(), *OPTIONS[name].split()]
        call(spec_train, "fit", name, "--data", data, "--out", run, *often, *more)
        measure = ["--data", data, "--split", "validation", "--json", results["data"]]
        call(spec_train, "eval", "--draft", run / "last", *measure)
    decode = ["--target", args.target, "--prompts", args.prompts, "--limit", args.limit]
    for kind, heat in (("greedy", []), ("sampled", ["--temperature", 1])):
        if not results[kind].is_file():
            where = ["--json", results[kind]]
            call(spec_train, "eval", "--draft", run / "last", *decode, *heat, *where)
    found = {kind: json.loads(path.read_text()) for kind, path in results.items()}
    parameters = sum(p.numel() for p in load_draft(run / "last").trainable_parameters())
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    speeds = sorted(x["tokens_per_second"] for x in lines if x["split"] == "train")
    greedy = found["greedy"]
    return (
        name,
        f"{parameters:,}",
        f"{speeds[len(speeds) // 2]:,.0f}",
        f"{found['data']['data']['simulated']['acceptance_length']:.2f}",
        f"{greedy['acceptance_length']:.2f}",
        f"{found['sampled']['acceptance_length']:.2f}",
        f"{greedy['draft_passes'] / greedy['rounds']:.1f}",
        " ".join("-" if r is None else f"{r:.2f}" for r in greedy["accept_rate"]),
    )


if __name__ == "__main__":
    main()
