"""Print the results of a quickstart from the files that its commands wrote."""

import argparse
import json
from pathlib import Path
from typing import Any

from spec_data.terminal.text_table import text_table


def read(path: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def rows(out: Path) -> list[tuple[str, str, str]]:
    """Return the rows of the table: name, value, remark."""
    manifest = read(out / "dataset" / "manifest.json")
    untrained, trained = read(out / "untrained.json"), read(out / "run.json")
    totals = manifest["totals"]
    result = [
        ("documents", f"{totals['documents']:,}", ""),
        ("tokens", f"{totals['tokens']:,}", f"{totals['supervised']:,} of them supervised"),
        (
            "bytes per token",
            f"{totals['bytes'] / totals['tokens']:,.0f}",
            f"{totals['bytes'] / 1e6:,.0f} MB in total",
        ),
        ("", "", ""),
        ("acceptance length", "", "tokens per verification of the target"),
    ]
    for name, figures in (("untrained draft", untrained), ("trained draft", trained)):
        simulated = figures["data"]["simulated"]["acceptance_length"]
        result += [
            (f"  {name}", f"{figures['acceptance_length']:.2f}", "real greedy decoding"),
            ("", f"{simulated:.2f}", "simulated on held-out documents, without the target"),
        ]
    remark = f"{trained['speedup']:.2f} times the speed"
    if trained["speedup"] < 1:
        remark += ": drafting saves time if the target is much larger than the draft"
    result += [
        ("", "", ""),
        ("tokens/s, target alone", f"{trained['plain_tokens_per_second']:,.1f}", ""),
        (
            "tokens/s, with the draft",
            f"{trained['tokens_per_second']:,.1f}",
            remark,
        ),
        (
            "same output as alone",
            f"{trained['identical']}/{trained['responses']}",
            f"responses; {trained['ties']} more differ by a tie in rounding",
        ),
    ]
    return result


def main() -> None:
    """Print the table and the paths of the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the quickstart's --out")
    out = parser.parse_args().out
    print(
        f"\n{text_table(rows(out), '<><')}\n"
        f"\ndataset  {out / 'dataset'}\ndraft    {out / 'run' / 'best'}\n"
        f"figures  {out / 'run.json'}, {out / 'untrained.json'}, "
        f"{out / 'run' / 'metrics.jsonl'}"
    )
    pages = [
        page for name in ("report.html", "eval.html") if (page := out / "run" / name).is_file()
    ]
    if pages:
        print(f"look at  {', '.join(map(str, pages))}: open them in a browser")


if __name__ == "__main__":
    main()
