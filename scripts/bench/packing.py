"""What the packing of batches is worth: packs of one length against packs in shuffled order.

    python scripts/bench/packing.py --target MODEL --out DIR [--maths FILE]

Three datasets are mixed: short chats and long code, both made here (the code is this Python's
standard library), and medium maths: --maths FILE with {"messages": [...]} rows, or sums made here.
An EAGLE-3 draft is trained with each packing and each seed for the same number of steps. All runs
have the same held-out documents. "old" fills packs by decreasing length (best-fit decreasing),
which was rejected. Finished runs in --out are not repeated. About ten minutes on one idle core.
"""

import argparse
import json
import random
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from unittest.mock import patch

import torch

from spec_data.cli import main as spec_data
from spec_data.shards.packing import pack_documents
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.terminal.text_table import text_table
from spec_train.cli import main as spec_train
from spec_train.data.order import BatchPlan, fill_in_order

KINDS = ("chat", "code", "maths")
PACKINGS = {"old": pack_documents, "new": fill_in_order}
FILL = "spec_train.data.order.fill_in_order"
SEQ_LEN, PACKS = 512, 4
NAMES = ("Anna", "Ben", "Chen", "Dina", "Emre", "Farah", "Goran", "Hana", "Ivan", "Jun", "Kofi")
THINGS = ("apple", "boat", "cup", "door", "egg", "fork", "hat", "jar", "kite", "lamp", "map")
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "brown")

Row = dict[str, list[dict[str, str]]]


def chat(question: str, answer: str) -> Row:
    """Return one conversation."""
    turns = (("user", question), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def chats(draw: random.Random) -> Iterator[Row]:
    """Yield short exchanges."""
    while True:
        name, thing, colour = (draw.choice(words) for words in (NAMES, THINGS, COLOURS))
        yield draw.choice(
            [
                chat(f"Hi, I am {name}. How are you?", f"Hello {name}, I am fine. How can I help?"),
                chat(f"Which colour is the {thing}?", f"The {thing} is {colour}."),
                chat(f"Who has the {thing}, {name}?", f"{name} has the {colour} {thing}."),
                chat(f"Thank you, {name}.", "You are welcome."),
                chat(
                    f"How many {colour} {thing}s does {name} have?",
                    f"{name} has {draw.randrange(2, 60)} {colour} {thing}s.",
                ),
            ]
        )


def code(draw: random.Random, longest: int) -> Iterator[Row]:
    """Yield pieces of the standard library, of up to `longest` characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    while True:
        file = draw.choice(files)
        text = file.read_text(encoding="utf-8", errors="replace")
        start = draw.randrange(max(1, len(text) - longest))
        yield chat(f"Write a part of {file.name}.", text[start : start + longest])


def sums(draw: random.Random) -> Iterator[Row]:
    """Yield sums with their steps."""
    while True:
        values = [draw.randrange(2, 90) for _ in range(draw.randrange(3, 9))]
        total, steps = values[0], []
        for value in values[1:]:
            steps.append(f"{total} + {value} = {total + value}")
            total += value
        yield chat(f"Add {', '.join(map(str, values))}.", "\n".join([*steps, f"Sum: {total}"]))


def make_data(args: argparse.Namespace) -> dict[str, Path]:
    """Write the corpora and run the target over them, unless --out has the datasets."""
    draw = random.Random(0)
    rows = {"chat": chats(draw), "code": code(draw, 1500), "maths": sums(draw)}
    if args.maths:
        rows["maths"] = map(json.loads, Path(args.maths).read_text().splitlines())
    made = {}
    for kind, count in zip(KINDS, args.documents, strict=True):
        made[kind] = args.out / kind
        if (made[kind] / "manifest.json").is_file():
            continue
        corpus = args.out / f"{kind}.jsonl"
        chosen = [json.dumps(next(rows[kind])) for _ in range(count)]
        corpus.write_text("\n".join(dict.fromkeys(chosen)) + "\n")
        words = ["--target", args.target, "--corpus", corpus, "--out", made[kind]]
        call(spec_data, "generate", *words, "--max-length", SEQ_LEN, "--codec", "bf16")
    return made


def call(program, *words: object) -> None:
    """Run a command of this project in this process."""
    if program([str(word) for word in words]):
        raise SystemExit(1)


def trained(name: str, packing: str, seed: int, data: list[Path], args) -> dict[str, float]:
    """Train one draft and return its last validation; a finished run is not repeated."""
    out = args.out / f"{name}-{packing}-{seed}"
    words = ["--data", *data, "--out", out, "--seed", seed, "--steps", args.steps]
    words += ["--seq-len", SEQ_LEN, "--batch-size", PACKS, "--ttt-steps", args.ttt_steps]
    words += ["--validation", 0.1, "--draft-vocab-size", 0, "--eval-every", args.steps]
    if not (out / "last").exists():
        with patch(FILL, PACKINGS[packing]):
            call(spec_train, "fit", "eagle3", *words, "--save-every", args.steps)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["split"] == "validation")


def contents(dataset: HiddenStatesDataset, packing: str) -> str:
    """Return distinct lengths per pack, and the spread of a batch's mean length over batches."""
    lengths = dataset.lengths
    with patch(FILL, PACKINGS[packing]):
        plan = BatchPlan(lengths, lengths > 0, seq_len=SEQ_LEN, packs_per_batch=PACKS)
        batches = plan.batches(0)[:-1]
    packs = [lengths[pack] for batch in batches for pack in batch]
    means = [lengths[[row for pack in batch for row in pack]].mean() for batch in batches]
    spread = float(torch.tensor(means, dtype=torch.float64).std())
    return f"{mean(len(set(pack.tolist())) for pack in packs):.1f} lengths per pack, +-{spread:.0f}"


def main() -> None:
    """Make what is missing, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--maths", help="JSONL file of conversations")
    parser.add_argument("--documents", nargs=3, type=int, default=[2000, 200, 500], metavar="N")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=75)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="also train on the maths alone")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    started, data = time.perf_counter(), make_data(args)
    for kind, path in data.items():
        dataset = HiddenStatesDataset(path)
        print(f"{kind}: {len(dataset):,} documents of {dataset.lengths.mean():.0f} tokens")
    for packing in PACKINGS:
        print(f"maths alone, {packing}: {contents(HiddenStatesDataset(data['maths']), packing)}")
    rows: list[tuple] = [("data", "packing", *(f"seed {s}" for s in args.seeds), "mean", *KINDS)]
    for name, used in (("mixed", list(KINDS)), *([("maths", ["maths"])] if args.alone else [])):
        for packing in PACKINGS:
            paths = [data[kind] for kind in used]
            found = [trained(name, packing, seed, paths, args) for seed in args.seeds]
            own = [line["acceptance_length"] for line in found]
            parts = [
                f"{mean(line[f'acceptance_length/{kind}'] for line in found):.3f}"
                if name == "mixed"
                else "-"
                for kind in KINDS
            ]
            rows.append((name, packing, *(f"{x:.3f}" for x in own), f"{mean(own):.3f}", *parts))
            print(text_table(rows[-1:]), flush=True)
    print(
        f"\nacceptance length after {args.steps} steps of {PACKS} packs of {SEQ_LEN} tokens, "
        f"{args.ttt_steps} drafted tokens, {time.perf_counter() - started:.0f} s\n\n"
        + text_table(rows)
    )


if __name__ == "__main__":
    main()
