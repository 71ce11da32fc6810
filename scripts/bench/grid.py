"""Settings of a draft on a grid, with several seeds each: which one is accepted longest.

    python scripts/bench/grid.py --data DATASET --out DIR --drafts eagle3 dspark \\
        --grid initializer_range=0,0.02 --seeds 3 --steps 600

Every cell trains through `spec-train fit` and is measured by `spec-train eval` on held-out
documents (simulated, greedy) and, with --target and --prompts, by decoding. All seeds see the same
held-out documents. Everything is kept in --out; run the script again to resume. The table shows the
mean over the seeds and the standard deviation of one seed.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

from drafts import OPTIONS, call

from spec_data.terminal.text_table import text_table
from spec_train.cli import main as spec_train
from spec_train.drafts import DRAFTS

KINDS = {"simulated": "data", "real": "greedy"}


def main() -> None:
    """Train and measure what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--drafts", nargs="+", default=list(OPTIONS), choices=sorted(DRAFTS))
    parser.add_argument("--grid", nargs="*", default=[], metavar="OPTION=V,V", help="of fit")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--limit", type=int, default=64, help="documents, and prompts, measured")
    parser.add_argument("--target", help="decode with it, greedily")
    parser.add_argument("--prompts")
    parser.add_argument("--fit-options", default="--batch-size 1", help="more of `spec-train fit`")
    args = parser.parse_args()
    names = [text.split("=")[0] for text in args.grid]
    axes = [text.split("=")[1].split(",") for text in args.grid]
    rows: list[tuple] = [("draft", *names, *KINDS, "seeds")]
    for draft in args.drafts:
        for values in itertools.product(*axes):
            chosen = dict(zip(names, values, strict=True))
            found = [measured(draft, chosen, seed, args) for seed in range(args.seeds)]
            figures = [spread([one[kind] for one in found if kind in one]) for kind in KINDS]
            rows.append((draft, *values, *figures, args.seeds))
            print(text_table([rows[0], rows[-1]]), flush=True)
    print(f"\n{args.steps} steps, {args.fit_options}\n\n{text_table(rows)}")


def measured(
    draft: str, chosen: dict[str, str], seed: int, args: argparse.Namespace
) -> dict[str, float]:
    """Return the acceptance lengths of one cell and seed; steps whose files exist are skipped."""
    run = args.out / "-".join((draft, *(f"{k}={v}" for k, v in chosen.items()), f"seed={seed}"))
    files = {kind: run.with_name(f"{run.name}.{kind}.json") for kind in KINDS}
    if not files["simulated"].is_file():
        flags = [word for k, v in chosen.items() for word in (f"--{k.replace('_', '-')}", v)]
        often = ["--steps", args.steps, "--eval-every", args.steps, "--save-every", args.steps]
        more = [*args.fit_options.split(), *OPTIONS[draft].split(), *flags, "--seed", seed]
        call(spec_train, "fit", draft, "--data", args.data, "--out", run, *often, *more)
        what = ["--data", args.data, "--split", "validation", "--limit", args.limit]
        call(spec_train, "eval", "--draft", run / "last", *what, "--json", files["simulated"])
    if args.target and not files["real"].is_file():
        what = ["--target", args.target, "--prompts", args.prompts, "--limit", args.limit]
        call(spec_train, "eval", "--draft", run / "last", *what, "--json", files["real"])
    found: dict[str, Any] = {k: json.loads(f.read_text()) for k, f in files.items() if f.is_file()}
    lengths = {"simulated": found["simulated"]["data"]["walk"]["acceptance_length"]}
    if "real" in found:
        lengths["real"] = found["real"]["acceptance_length"]
    return lengths


def spread(values: list[float]) -> str:
    """Return mean and standard deviation of the values as text; "-" for none."""
    if not values:
        return "-"
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.3f} ± {deviation:.3f}"


if __name__ == "__main__":
    main()
