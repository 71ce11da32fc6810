"""Write the figures of README and docs from the results of evidence.py, and the picture.

A block of a page that begins with `<!-- evidence: NAME -->` and ends with `<!-- end -->` holds what
`BLOCKS[NAME]` makes of the results, and nothing else; a test compares them. `--write` renews all
blocks and the pictures of scripts/pictures.py.
"""

import argparse
import html
import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pictures

from spec_data.models.engines import engines

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "evidence"
DRAFTS = {kind: name for kind, name in pictures.NAMES.items() if kind != "mtp"}
VARIANTS = {
    "": "",
    "-published": " (as its authors train it)",
}
DRAFTS = {
    f"{draft}{end}": f"{name}{words}"
    for draft, name in DRAFTS.items()
    for end, words in VARIANTS.items()
} | {"speculators-eagle3": "EAGLE-3, trained by speculators 0.9"}
BLOCK = re.compile(r"(<!-- evidence: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
Results = Mapping[str, Any]


def read_results(folder: Path = RESULTS) -> Results:
    """Return every result by the name of its file, and those of the small target as "toy"."""
    found = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    toy = folder / "toy"
    return found | ({"toy": read_results(toy)} if toy.is_dir() else {})


def runs_of(results: Results) -> dict[str, list[Any]]:
    """Return the decoded runs of each draft, in the order of DRAFTS and of their seeds."""
    runs: dict[str, list[Any]] = {draft: [] for draft in DRAFTS}
    for result in results.values():
        if "decoded" in result:
            runs[result["draft"]].append(result)
    return {d: sorted(some, key=lambda run: run["seed"]) for d, some in runs.items() if some}


def lengths(results: Results) -> str:
    """A row for each draft: lengths of real decoding at its last checkpoint, in all and by kind."""
    runs = runs_of(results)
    kinds = list(next(iter(runs.values()))[0]["decoded"][-1]["kinds"])
    names = (
        "draft",
        "tokens trained",
        "acceptance length",
        *kinds,
        "sampled",
        "same output",
    )
    lines = [row(names), row(("---", *["--:"] * (len(names) - 1)))]
    for draft, some in runs.items():
        last = points(some)
        cells = (
            DRAFTS[draft],
            f"{last[0]['tokens']:,}",
            length_of(last),
            *(f"{statistics.mean(p['kinds'][kind]['length'] for p in last):.2f}" for kind in kinds),
            sampled(last),
            same_output(last),
        )
        lines.append(row(cells))
    return "\n".join([*lines, "", rising(runs), *trained(runs), *captures(runs)])


def matched(results: Results) -> str:
    """A row for each draft on the small target: size, cost, greedy and sampled lengths."""
    runs = runs_of(results["toy"])
    taken = results["toy"].get("speed", {}).get("milliseconds", {})
    names = ("draft", "parameters", "ms per drafted token", "greedy", "sampled", "same output")
    lines = [row(names), row(("---", *["--:"] * (len(names) - 1)))]
    for draft, some in sorted(runs.items(), key=lambda of: -mean(points(of[1]), "length")):
        last = points(some)
        cost = f"{taken[draft]['draft']:.2f}" if draft in taken else "not measured"
        cells = DRAFTS[draft], f"{some[0]['parameters']:,}", cost, length_of(last), sampled(last)
        lines.append(row((*cells, same_output(last))))
    data = results["toy"]["dataset"]["totals"]
    (one, *_) = points(next(iter(runs.values())))
    tokens, responses = one["tokens"], one["responses"]
    said = (
        f"A capture of {data['documents']:,} answers, {data['bytes'] / data['tokens']:,.0f} "
        f"bytes per token; {tokens:,} tokens trained; {responses} held-out prompts."
    )
    times = [time["target"] for time in taken.values()]
    idle = [f"A pass of the target takes {statistics.median(times):.1f} ms."] if times else []
    return "\n".join([*lines, "", said, *idle, rising(runs), *trained(runs), *captures(runs)])


def points(runs: list[Any]) -> list[Any]:
    """Return what the last checkpoint of each run decoded."""
    return [run["decoded"][-1] for run in runs]


def length_of(last: list[Any]) -> str:
    """Return the mean length with the range of its seeds, or the interval of the only one."""
    length = f"**{mean(last, 'length'):.2f}** "
    if len(last) > 1:
        values = [point["length"] for point in last]
        return length + f"({min(values):.2f} to {max(values):.2f}, {len(values)} seeds)"
    return length + "({:.2f} to {:.2f})".format(*last[0]["interval"])


def sampled(last: list[Any]) -> str:
    """Return the length at temperature 1 of the runs that were decoded so."""
    found = [point["sampled"] for point in last if "sampled" in point]
    return length_of(found) if found else "not measured"


def same_output(last: list[Any]) -> str:
    """Return how many responses equal plain decoding, of all seeds."""
    same, ties, of = (sum(p[n] for p in last) for n in ("identical", "ties", "responses"))
    return f"{same}/{of}" + (f", {ties} tie{'s' * (ties > 1)}" if ties else "")


def captures(runs: Mapping[str, list[Any]]) -> list[str]:
    """Say that runs are of several captures, if they are."""
    fits = [
        run["fit"] for some in runs.values() for run in some if isinstance(run.get("fit"), dict)
    ]
    count = len({fit["dataset"] for fit in fits})
    if count < 2:
        return []
    return [f"{count} captures were made; their greedy answers differ in rounding."]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def mean(points: list[Any], name: str) -> float:
    return statistics.mean(point[name] for point in points)


def rising(runs: Mapping[str, list[Any]]) -> str:
    """Say which drafts still gained in the last part of their training."""
    still = [
        DRAFTS[draft] for draft, some in runs.items() if statistics.mean(map(gain, some)) > 0.01
    ]
    fifth = "in the last fifth of the tokens, on held-out documents"
    if not still:
        return f"No length rose by more than 1 % {fifth}."
    return f"Still rising by more than 1 % {fifth}: {', '.join(still)}."


def trained(runs: Mapping[str, list[Any]]) -> list[str]:
    """Say how many prompts share text with training documents, if any do."""
    last = [point for some in runs.values() for point in points(some)]
    point = max(last, key=lambda p: p["trained_prompts"] or 0)
    if not point["trained_prompts"]:
        return []
    shared = f"{point['trained_prompts']} of {point['responses']} prompts"
    return [f"{shared} share 13 tokens in a row with a training document."]


def gain(run: Mapping[str, Any]) -> float:
    """By what share the length grew in the last fifth of a run; 0 without a curve."""
    curve = run["curve"]
    before = [point for point in curve if point["tokens"] <= 0.81 * curve[-1]["tokens"]]
    return float(curve[-1]["length"] / before[-1]["length"] - 1) if before else 0.0


def capture(results: Results) -> str:
    """One line: what was captured, for all drafts at once."""
    answers, data = results["answers"], results["dataset"]
    totals = data["totals"]
    per_token = totals["bytes"] / totals["tokens"]
    return (
        f"{answers['written']:,} answers of {answers['tokens']:,} tokens, captured once for every "
        f"draft: {totals['tokens']:,} tokens, {totals['bytes'] / 1e6:,.0f} MB, {per_token:,.0f} "
        f"bytes per token ({len(data['layers'])} layers and the final states)."
    )


def kept_answer(results: Results) -> dict[str, Any] | None:
    """Return the decoded answer of EAGLE-3 that is shown; None: no run has kept one."""
    runs = [run for draft, some in runs_of(results).items() if "eagle3" in draft for run in some]
    return next((p["answer"] for p in points(runs) if "answer" in p), None)


def answer(results: Results) -> str:
    """Say how the answer of the picture was decoded."""
    if (kept := kept_answer(results)) is None:
        return ""
    return (
        "*SmolLM2-135M-Instruct answers; what EAGLE-3 drafted and the target accepted is marked: "
        f"{kept['length']:.2f} tokens per verification, the median of the answers that `eval` "
        "kept.*"
    )


HOW = {
    "eagle": "token by token",
    "eagle3": "token by token",
    "peagle": "all tokens in one forward",
    "dspark": "a block in one forward, then a choice by the token before",
    "dflash": "a block in one forward",
    "dflash2": "a block in one forward, then a walk over candidates",
    "domino": "a block in one forward, then a GRU over the tokens",
    "lilicorr": "a block in one forward, then a path over candidates",
    "xpress": "a block in one forward, then a correction by the tokens before",
}


def choose(results: Results) -> str:
    """A row for each draft of the real target: how it drafts, its size, its length, engines."""
    table = engines().engine
    names = "draft", "it drafts", "trained parameters", "acceptance length", "read by"
    lines = [row(names), row(("---", "---", "--:", "--:", "---"))]
    for kind, runs in sorted(
        ((kind, runs) for kind, runs in runs_of(results).items() if kind in HOW),
        key=lambda of: -mean(points(of[1]), "length"),
    ):
        size = next((f"{run['parameters']:,}" for run in runs if "parameters" in run), "")
        read = ", ".join(
            name for engine, name in pictures.ENGINES.items() if kind in table[engine].drafts
        )
        lines.append(row((DRAFTS[kind], HOW[kind], size, length_of(points(runs)), read)))
    return "\n".join(lines)


def growth(results: Results) -> str:
    """A row for each number of tokens: simulated lengths of held-out documents on the way."""
    shown = ("eagle3", "peagle", "dspark", "dflash2")
    curves = {k: runs[0]["curve"] for k, runs in runs_of(results).items() if k in shown}
    lines = [row(("tokens trained", *(DRAFTS[k] for k in curves)))]
    lines.append(row(["--:"] * (1 + len(curves))))
    for marks in zip(*curves.values(), strict=True):
        lengths = (f"{mark['length']:.2f}" for mark in marks)
        lines.append(row((f"{marks[0]['tokens']:,}", *lengths)))
    return "\n".join(lines)


BLOCKS: dict[str, Callable[[Results], str]] = {
    "answer": answer,
    "choose": choose,
    "growth": growth,
    "lengths": lengths,
    "matched": matched,
    "capture": capture,
}


def renewed(page: str, results: Results) -> str:
    """Return a page with every block as the results say."""
    return BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]](results)}\n{m[3]}", page)


def pages() -> list[Path]:
    """README and docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def lengths_svg(results: Results) -> str:
    """Return bars of real lengths, longest first: of several seeds the mean and their range.

    All decoded the same prompts. Other trainers have another colour.
    """
    rows = []
    for draft, runs in runs_of(results).items():
        last = points(runs)
        seeds = [point["length"] for point in last]
        ends = (min(seeds), max(seeds)) if len(seeds) > 1 else tuple(last[0]["interval"])
        other = draft.startswith("speculators")
        rows.append((DRAFTS[draft], mean(last, "length"), ends, "b" if other else "a"))
    return pictures.lengths(sorted(rows, key=lambda bar: -bar[1]))


COLUMNS = 84
STYLE = """text { font: 14px ui-monospace, Menlo, Consolas, monospace; fill: #1f2328 }
rect { fill: #c9efd3 }
@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } rect { fill: #1f5a35 } }"""


def answer_svg(results: Results) -> str:
    """Return a picture of the kept answer: what was drafted is marked. None was kept: ""."""
    if (kept := kept_answer(results)) is None:
        return ""
    cells = [(char, drafted) for text, drafted in kept["pieces"] for char in text]
    lines: list[list[tuple[str, bool]]] = [[]]
    for cell in cells:
        if cell[0] == "\n" or len(lines[-1]) == COLUMNS:
            cut = max((i + 1 for i, (char, _) in enumerate(lines[-1]) if char == " "), default=None)
            rest = [] if cell[0] == "\n" or cut is None else lines[-1][cut:]
            lines[-1] = lines[-1][: len(lines[-1]) - len(rest)]
            if lines[-1] and lines[-1][-1][0] == " ":
                lines[-1].pop()  # nothing is seen of it but its mark
            lines.append(rest)
        if cell[0] != "\n":
            lines[-1].append(cell)
    body, width, height = [], 8.4, 22
    for row_, line in enumerate(lines):
        at = 0
        for drafted, group in itertools.groupby(line, key=lambda cell: cell[1]):
            text = "".join(char for char, _ in group)
            x, y, wide = 8 + width * at, height * row_, width * len(text)
            if drafted:
                body.append(
                    f'<rect x="{x:.1f}" y="{y + 3}" width="{wide:.1f}" height="19" rx="3"/>'
                )
            body.append(
                f'<text x="{x:.1f}" y="{y + 17}" textLength="{wide:.1f}" '
                f'xml:space="preserve">{html.escape(text)}</text>'
            )
            at += len(text)
    size = f'width="{COLUMNS * width + 16:.0f}" height="{height * len(lines) + 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n<style>{STYLE}</style>'
    return "\n".join((head, *body, "</svg>")) + "\n"


def main() -> None:
    """Print every block, or write all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="what evidence.py wrote")
    parser.add_argument("--write", action="store_true", help="renew the blocks and the figure")
    options = parser.parse_args()
    results = read_results(options.results)
    if not options.write:
        print("\n\n".join(f"{name}\n\n{block(results)}" for name, block in BLOCKS.items()))
        return
    made = {
        options.results / "lengths.svg": lengths_svg(results),
        ROOT / "docs" / "pipeline.svg": pictures.pipeline(results),
    }
    for file, drawn in made.items():
        file.write_text(drawn, encoding="utf-8")
    if picture := answer_svg(results):
        (options.results / "answer.svg").write_text(picture, encoding="utf-8")
    for page in pages():
        text = page.read_text(encoding="utf-8")
        if (new := renewed(text, results)) != text:
            page.write_text(new, encoding="utf-8")
            print(f"renewed {page}")


if __name__ == "__main__":
    main()
