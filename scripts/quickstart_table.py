"""Print what a quickstart made (arguments: its --out, its seconds) from the files that it wrote."""

import json
import sys
from pathlib import Path

from spec_data.terminal.text_table import text_table

out, seconds = Path(sys.argv[1]), int(sys.argv[2])
manifest = json.loads((out / "dataset" / "manifest.json").read_text())
decoded = json.loads((out / "eval.json").read_text())
totals, target, modelled = manifest["totals"], manifest["target"], decoded["modelled"]
states = [c for c in manifest["columns"] if c["name"].startswith("hidden.")]
stored = totals["bytes"] / totals["tokens"]
exact = sum(2 * column["width"] for column in states)


def between(interval: list[float] | None) -> str:
    """Return the words of an interval; none of too few prompts."""
    return "{:.2f} to {:.2f} (95%); ".format(*interval) if interval else ""


def shown(number: float | None) -> str:
    """Return a number; nothing was verified where there is none."""
    return "-" if number is None else f"{number:.2f}"


rows = [
    ("target", target["name"], f"{target['num_layers']} blocks"),
    (
        "its own answers",
        f"{totals['documents']:,}",
        f"{totals['supervised']:,} tokens to learn from; {totals['tokens']:,} with the prompts",
    ),
    (
        "bytes per token",
        f"{stored:,.0f}",
        f"{totals['bytes'] / 1e6:,.1f} MB in all; hidden states alone in bf16: {exact:,}",
    ),
    (
        "acceptance length",
        shown(decoded["acceptance_length"]),
        f"tokens per verification, {between(decoded['interval'])}{decoded['prompts']} prompts, "
        "greedy",
    ),
    (
        "lossless",
        f"{decoded['identical']}/{decoded['responses']}",
        "responses are the target's own, token for token"
        + (f"; {decoded['ties']} differ by a tie in rounding" if decoded["ties"] else ""),
    ),
    (
        "measured speed-up",
        shown(decoded["speedup"]) + "x",
        f"{between(decoded['speedup_interval'])}with this decoder, in Python, on this machine",
    ),
    (
        "modelled speed-up",
        shown(modelled["speedup"]) + "x",
        f"if a verification costs one pass of the target and a draft pass "
        f"{modelled['cost_ratio']:g} of it",
    ),
]
print(f"\nEAGLE-3, from nothing to a measured draft in {seconds // 60} min {seconds % 60} s")
print(text_table(rows, "<><"))
print(f"\ndraft  {out / 'run' / 'best'}\npages  {out / 'run'}/report.html and eval.html")
