"""Print the results of a quickstart (its --out is the argument) from the files that it wrote."""

import json
import sys
from pathlib import Path

from spec_data.terminal.text_table import text_table

out = Path(sys.argv[1])
totals = json.loads((out / "dataset" / "manifest.json").read_text())["totals"]
rows = [
    ("documents", f"{totals['documents']:,}", ""),
    ("tokens", f"{totals['tokens']:,}", f"{totals['supervised']:,} of them supervised"),
    (
        "bytes per token",
        f"{totals['bytes'] / totals['tokens']:,.0f}",
        f"{totals['bytes'] / 1e6:,.0f} MB in total",
    ),
    ("acceptance length", "", "tokens per verification of the target"),
]
figures = {}
for name, file in (("untrained draft", "untrained.json"), ("trained draft", "run.json")):
    figures = json.loads((out / file).read_text())
    simulated = figures["data"]["simulated"]["acceptance_length"]
    rows += [
        (f"  {name}", f"{figures['acceptance_length']:.2f}", "real greedy decoding"),
        ("", f"{simulated:.2f}", "simulated on held-out documents, without the target"),
    ]
remark = f"{figures['speedup']:.2f} times the speed"
if figures["speedup"] < 1:
    remark += ": drafting saves time if the target is much larger than the draft"
rows += [
    ("tokens/s, target alone", f"{figures['plain_tokens_per_second']:,.1f}", ""),
    ("tokens/s, with the draft", f"{figures['tokens_per_second']:,.1f}", remark),
    (
        "same output as alone",
        f"{figures['identical']}/{figures['responses']}",
        f"responses; {figures['ties']} more differ by a tie in rounding",
    ),
]
print(f"\n{text_table(rows, '<><')}\n\ndataset  {out / 'dataset'}\ndraft    {out / 'run' / 'best'}")
print(f"figures  {out / 'run.json'}, {out / 'untrained.json'}, {out / 'run' / 'metrics.jsonl'}")
for page in ("report.html", "eval.html"):
    print(f"look at  {out / 'run' / page}: open it in a browser")
