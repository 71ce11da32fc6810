"""What each codec costs and saves on a target and corpus; with --fit, also in acceptance.

The target is captured once, in bf16, and recoded for every codec; run the script again to resume.
Errors come from the manifests. What a million values take to encode and decode is measured in this
process on one column, in CPU-seconds, rotation and zstd together. "First choice" is the share of
tokens whose most likely next token stays the same.

    python scripts/bench/codec_costs.py --target MODEL --corpus FILE --out DIR [--limit 300]
    python scripts/bench/codec_costs.py ... --fit SEEDS STEPS [--prompts FILE --decode 40]

CODECS are values of --codec. With --fit every codec and seed trains a draft (--draft) through
`spec-train fit`; all are then measured on the held-out documents of the *exact* dataset (every
dataset holds out the same ones), and on prompts if there are any. Differences to bf16 are paired by
seed, with 95 % t-confidence intervals.
"""

import argparse
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

import spec_data
from spec_data.shards.blobs import compress, decompress
from spec_data.shards.codecs import CODECS, Basis, decode_into, encode_tensors
from spec_data.shards.reader import MANIFEST, HiddenStatesDataset, load_head_tensors
from spec_data.shards.schema import FINAL, Column, Manifest, apply_head
from spec_data.terminal.text_table import text_table
from spec_train.cli import main as spec_train

EXACT = "bf16"
DEFAULT = (EXACT, "fine", "default", "small")
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16)
_SPEED_TOKENS = 4096


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", required=True, help="folder for datasets and runs; kept")
    parser.add_argument("--limit", type=int, default=300, help="corpus rows")
    parser.add_argument("--layers", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--codecs", nargs="+", default=list(DEFAULT), metavar="CODEC")
    parser.add_argument("--draft", default="eagle3", help="what --fit trains")
    parser.add_argument("--fit", nargs=2, type=int, metavar=("SEEDS", "STEPS"))
    parser.add_argument("--fit-options", default="", help="more options of `spec-train fit`")
    parser.add_argument("--prompts", help="JSONL chats to decode, not trained on")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="longest decoded answer")
    parser.add_argument("--decode", type=int, default=40, help="how many prompts")
    return parser.parse_args()


def make_dataset(args: argparse.Namespace, codec: str) -> tuple[Path, Manifest]:
    """Make the dataset of a codec, unless it exists; the target is run for the exact one only."""
    data = Path(args.out) / "data"
    out = data / folder_name(codec)
    if codec == EXACT:
        options = spec_data.CaptureOptions(
            limit=args.limit, layers=args.layers, device=args.device, codec=codec
        )
        spec_data.generate(args.target, args.corpus, out, options)
    elif not (out / MANIFEST).is_file():
        spec_data.recode(data / EXACT, out, codec)
    return out, Manifest.read(out / MANIFEST)


def folder_name(name: str) -> str:
    """Return the folder name of a codec."""
    return name.replace("=", "-").replace(",", "+")


def cpu_seconds(work: Callable[[], object], values: int) -> float:
    """Return CPU-seconds per million values: the best of several rounds after a warm-up."""
    work()
    best = math.inf
    for _ in range(7):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best / values * 1e6


def costs(states: torch.Tensor, exact: bool) -> list[str]:
    """Return what encoding and decoding states, bfloat16 [N, H], take."""
    out = torch.empty_like(states)
    if exact:
        coder = CODECS[EXACT]
        stored = coder.encode(states)
        works = (lambda: coder.encode(states).copy(), lambda: coder.decode_into(stored, out))
    else:
        tables = Basis(states).tables(0.7)
        blob = compress(encode_tensors(states, tables)[0].numpy())
        works = (
            lambda: compress(encode_tensors(states, tables)[0].numpy()),
            lambda: decode_into(decompress(blob, *states.shape), tables, out),
        )
    return [f"{cpu_seconds(work, states.numel()):.4f}" for work in works]


def first_choice(dataset: HiddenStatesDataset, states: torch.Tensor, exact: torch.Tensor) -> str:
    """Return the share of tokens whose first choice `states` do not change, both [N, H]."""
    head = {k: v.float() for k, v in load_head_tensors(dataset).items()}
    weight, bias, spec = head["lm_head"], head.get("lm_head_bias"), dataset.manifest.head
    choices = [
        torch.cat([apply_head(p.float(), weight, bias, spec).argmax(-1) for p in part.split(256)])
        for part in (states, exact)
    ]
    return f"{(choices[0] == choices[1]).double().mean():.3f}"


def some_states(dataset: HiddenStatesDataset, column: str) -> torch.Tensor:
    """Return about 4,096 tokens of a column."""
    parts, total = [], 0
    for index in range(len(dataset)):
        parts.append(dataset[index][column])
        total += len(parts[-1])
        if total >= _SPEED_TOKENS:
            break
    return torch.cat(parts)[:_SPEED_TOKENS].contiguous()


def codec_table(datasets: dict[str, tuple[Path, Manifest]]) -> str:
    """Return one line per dataset and column of states."""
    head = ("codec", "column", "bits/value", "error", "worst channel", "teacher KL", "first choice")
    rows: list[tuple] = [(*head, "encode", "decode", "bytes/token", "x bf16")]
    states = some_states(HiddenStatesDataset(datasets[EXACT][0]), FINAL)
    measured = {exact: costs(states, exact) for exact in (True, False)}
    whole = per_token(datasets[EXACT][1])
    for name, (path, manifest) in datasets.items():
        total = (f"{per_token(manifest):,.1f}", f"{per_token(manifest) / whole:.3f}")
        for column in (c for c in manifest.columns if c.name.startswith("hidden.")):
            same = ""
            if column.error and column.name == FINAL:
                dataset = HiddenStatesDataset(path)
                same = first_choice(dataset, some_states(dataset, FINAL), states)
            cells = (column.name, *figures(column), same, *measured[column.error is None])
            rows.append((name if total[0] else "", *cells, *total))
            total = ("", "")
    return text_table(rows)


def per_token(manifest: Manifest) -> float:
    """Bytes of all shards per token."""
    return manifest.totals.bytes / manifest.totals.tokens


def figures(column: Column) -> tuple[str, ...]:
    """Bits, error, that of the worst channel, and KL of a column."""
    error = column.error
    if error is None:
        return "16.00", "exact", "exact", ""
    kl = "" if error.kl is None else f"{error.kl:.1e}"
    return f"{error.bits:.2f}", f"{error.total:.1e}", f"{error.mse_max:.1e}", kl


def train_and_measure(
    args: argparse.Namespace, name: str, data: Path, exact: Path, seed: int, steps: int
) -> dict[str, float]:
    """Train a draft and measure it on exact data; the metrics are kept in a file beside its run."""
    run = Path(args.out) / "runs" / f"{args.draft}-{folder_name(name)}-{steps}-{seed}"
    held_out, decoded = run.with_suffix(".data.json"), run.with_suffix(".decode.json")
    if not held_out.is_file():
        plan = ["--steps", steps, "--eval-every", steps, "--save-every", steps, "--seed", seed]
        more = args.fit_options.split()
        call("fit", args.draft, "--data", data, "--out", run, *plan, *more)
        measure = ["--data", exact, "--split", "validation", "--json", held_out]
        call("eval", "--draft", run, *measure)
    if args.prompts and not decoded.is_file():
        measure = ["--target", args.target, "--prompts", args.prompts, "--limit", args.decode]
        measure += ["--max-new-tokens", args.max_new_tokens, "--json", decoded]
        call("eval", "--draft", run, *measure)
    found = json.loads(held_out.read_text())["data"]
    figures = {
        "held-out loss": found["teacher_forced"]["loss"],
        "simulated length": found["simulated"]["acceptance_length"],
    }
    if args.prompts:
        figures["real length"] = json.loads(decoded.read_text())["acceptance_length"]
    return figures


def call(*words: object) -> None:
    """Run spec-train in this process."""
    code = spec_train([str(word) for word in words])
    if code:
        raise SystemExit(code)


def paired(values: list[float], base: list[float]) -> str:
    """Mean paired difference relative to the base's mean, with a 95 % t-interval, in per cent."""
    scale = 100 / statistics.mean(base)
    gaps = [(v - b) * scale for v, b in zip(values, base, strict=True)]
    if len(gaps) < 2:
        return f"{gaps[0]:+.2f} %"
    t = _T95[len(gaps) - 2] if len(gaps) - 2 < len(_T95) else 2.1
    half = t * statistics.stdev(gaps) / math.sqrt(len(gaps))
    return f"{statistics.mean(gaps):+.2f} ± {half:.2f} %"


def fit_table(args: argparse.Namespace, datasets: dict[str, tuple[Path, Manifest]]) -> str:
    """Mean figures per codec and paired differences to bf16."""
    seeds, steps = args.fit
    exact = datasets[EXACT][0]
    found = {
        name: [train_and_measure(args, name, data, exact, s, steps) for s in range(seeds)]
        for name, (data, _) in datasets.items()
    }
    names = list(found[EXACT][0])
    rows: list[tuple] = [("codec", *(f for n in names for f in (n, "against bf16")))]
    for codec, figures in found.items():
        cells = []
        for name in names:
            values, base = [f[name] for f in figures], [f[name] for f in found[EXACT]]
            cells += [
                f"{statistics.mean(values):.4f}",
                "" if codec == EXACT else paired(values, base),
            ]
        rows.append((codec, *cells))
    return text_table(rows)


def main() -> None:
    """Print the tables."""
    args = arguments()
    torch.set_num_threads(1 if not args.fit else torch.get_num_threads())
    names = [EXACT, *(n for n in args.codecs if n != EXACT)]
    datasets = {name: make_dataset(args, name) for name in names}
    fitted = fit_table(args, datasets) if args.fit else ""
    torch.set_num_threads(1)
    manifest = datasets[EXACT][1]
    totals = manifest.totals
    print(
        f"{manifest.target.name}, hidden {manifest.hidden_size}, layers {manifest.layers}, "
        f"{totals.documents:,} documents, {totals.tokens:,} tokens; speeds: one thread, "
        f"{platform.processor() or platform.machine()}; spec-data {spec_data.__version__}, torch "
        f"{torch.__version__}, Python {platform.python_version()}, {sys.platform}\n"
    )
    print(codec_table(datasets))
    if fitted:
        print(f"\n{args.draft}, {args.fit[0]} seeds, {args.fit[1]} steps, measured on exact data\n")
        print(fitted)


if __name__ == "__main__":
    main()
