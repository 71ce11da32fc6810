"""Cost of one long document among short ones: the time until the first shard, and cost per token.

For each length, in a process of its own: 200 documents of about 100 tokens and one of that length
are planned, the target is proven, and everything is captured, as generate does it. Then the long
document is captured alone, for its cost per token. Times are CPU-seconds of one thread, because
they count the work and not what else the machine does; memory is the peak of the process above the
loaded target.

The target is copied with a longer `max_position_embeddings`: this changes no cost, but its states
beyond the trained length mean nothing.

    python scripts/bench/long_documents.py --target MODEL [--lengths 2048 8192 32768]
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHORT = 200  # short documents beside the long one
RESULT = "result "


def write_corpus(path: Path, length: int) -> None:
    """Write the short documents and one of at least `length` tokens, which is cut to it."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(SHORT):
            text = f"Document {i}. " + f"They had {i} apples and bought {i + 1} more. " * 5
            file.write(json.dumps({"text": text}) + "\n")
        file.write(json.dumps({"text": " ".join(map(str, range(length)))}) + "\n")


def copy_target(target: Path, folder: Path, length: int) -> Path:
    """Copy the target, with a context of at least `length` tokens."""
    shutil.copytree(target, folder, copy_function=shutil.copyfile)
    folder.chmod(0o755)
    file = folder / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["max_position_embeddings"] = max(length, config["max_position_embeddings"])
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


def measure(target: Path, length: int, attn: str, codec: str) -> dict[str, float | str]:
    """Generate with one document of `length` tokens, and return what it cost."""
    import torch

    from spec_data.capture.hf_backend import HFBackend
    from spec_data.generation.capture import CaptureSettings, capture_unit
    from spec_data.generation.plan import BATCH_TOKENS
    from spec_data.generation.replica import prove_target
    from spec_data.generation.setup import (
        AnswerOptions,
        CaptureOptions,
        CorpusRows,
        RenderOptions,
        RunOptions,
        backend_options,
        make_plan,
        set_up,
    )
    from spec_data.shards.writer import write_shard

    torch.set_num_threads(1)
    work = Path(tempfile.mkdtemp())
    try:
        write_corpus(work / "corpus.jsonl", length)
        setup = set_up(
            str(copy_target(target, work / "target", length)),
            CorpusRows(sources=(str(work / "corpus.jsonl"),)),
            RenderOptions(max_length=length),
            CaptureOptions(codec=codec),
            RunOptions(device="cpu", attn=attn),
            AnswerOptions(),
        )
        plan = make_plan(setup)
        backend = HFBackend.open(backend_options(setup, plan))
        model = backend.target
        loaded = peak_mb()
        (work / "out" / ".generate").mkdir(parents=True)
        start = time.process_time()
        draft = prove_target(setup, plan, backend, work / "out")
        proven = time.process_time()
        settings = CaptureSettings(
            columns=setup.columns,
            form=draft["packing"]["form"],
            batch_tokens=BATCH_TOKENS,
        )
        done = capture_unit(backend, plan, 0, settings)
        write_shard(work / "shard.arrow", done.data, setup.columns)
        written = time.process_time()
        ids = plan.documents.tokens["input_ids"][-length:]
        row = torch.from_numpy(ids).long()[None]
        layout = torch.zeros_like(row), torch.arange(length)[None]
        model.capture(row, *layout, None)
        alone = time.process_time()
        return {
            "attn": model.attn,
            "tokens": plan.tokens,
            "longest": int(plan.lengths.max()),
            "proof": proven - start,
            "first_shard": written - start,
            "per_token": (alone - written) / length * 1e6,
            "memory": peak_mb() - loaded,
        }
    finally:
        shutil.rmtree(work)


def peak_mb() -> float:
    """Return the peak memory of this process in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Print the table, one process per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True, type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--attn", default="auto")
    parser.add_argument("--codec", default="bf16")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(RESULT + json.dumps(measure(args.target, args.one, args.attn, args.codec)))
        return
    print(
        "| longest document | attention | CPU-s until proven | CPU-s until the first shard "
        "| CPU-us per token of it | peak memory, MB |\n| --: | --- | --: | --: | --: | --: |"
    )
    for length in args.lengths:
        command = [sys.executable, __file__, "--target", str(args.target), "--one", str(length)]
        command += ["--attn", args.attn, "--codec", args.codec]
        found = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout
        line = next(x for x in found.splitlines() if x.startswith(RESULT))
        row = json.loads(line.removeprefix(RESULT))
        print(
            f"| {row['longest']:,} | {row['attn']} | {row['proof']:.1f} | {row['first_shard']:.1f} "
            f"| {row['per_token']:,.0f} | {row['memory']:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
