"""A tiny target with a real tokenizer, a corpus, and functions that run and compare generate."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from spec_data.generation.run import generate
from spec_data.options.generate_options import GenerateConfig
from spec_data.verification.run import examine
from tests.families import tiny_model
from tests.forked import Forked, fork_program
from tests.spec_data.corpus.templates import tokenizer


def save_target(path: Path, family: str = "llama", template: str = "chatml") -> Path:
    """Write a model directory: random weights of a family, a byte-level tokenizer."""
    tok = tokenizer(template)
    model = tiny_model(family)
    model.resize_token_embeddings(len(tok), mean_resizing=False)
    model.config.eos_token_id = tok.eos_token_id
    model.save_pretrained(path)
    tok.save_pretrained(path)
    return path


def write_corpus(path: Path, rows: int = 30) -> Path:
    """Write chats of one and two answers, of different lengths, no two of them equal."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            messages = [
                {"role": "user", "content": f"question {i}"},
                {"role": "assistant", "content": f"answer {i} " + "so " * (i % 7)},
            ]
            if i % 3 == 0:
                messages += [
                    {"role": "user", "content": "more"},
                    {"role": "assistant", "content": f"{i} again"},
                ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def options(target: Path, corpus: Path | tuple[Path, ...], out: Path, **changes) -> dict:
    """Return options of a run with several units; `corpus` is one file or several."""
    corpora = corpus if isinstance(corpus, tuple) else (corpus,)
    return {
        "target": str(target),
        "corpus": tuple(map(str, corpora)),
        "out": str(out),
        "layers": "0,2,4",
        "max_shard_size": "120KB",
        "batch_tokens": 512,
        "device": "cpu",
        "codec": "bf16",  # exact, because tests compare states
    } | changes


def run(target: Path, corpus: Path | tuple[Path, ...], out: Path, **changes):
    """Generate in this process and return the manifest."""
    return generate(GenerateConfig(**options(target, corpus, out, **changes)))


def with_teacher(row: dict) -> torch.Tensor:
    """Return which tokens have a teacher by default: the next one is supervised, bool [T]."""
    mask = row["loss_mask"].tolist()
    return torch.tensor([t + 1 < len(mask) and bool(mask[t + 1]) for t in range(len(mask))])


def verify(**given) -> int:
    """Run every check and print the report; return 0 if all pass, else 1."""
    report = examine(**given)
    print(report)
    return report.exit_code


PAUSED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # as the program sets it before its imports
from spec_data.cli import main
from spec_data.generation import replica
capture, held = replica.capture_unit, int(sys.argv.pop(1))
def paused(target, plan, unit, *args, **kwargs):
    while unit >= held:
        time.sleep(0.01)
    return capture(target, plan, unit, *args, **kwargs)
replica.capture_unit = paused
sys.exit(main())
"""


def start_cli(given: dict, held: int = 1 << 30) -> subprocess.Popen:
    """Start generate in a process of its own; it waits forever before unit `held`."""
    command = [sys.executable, "-c", PAUSED, str(held), "generate", *flags(given)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fork_cli(given: dict, held: int = 1 << 30) -> Forked:
    """Do the same in a fork of this process, which starts at once."""
    return fork_program(PAUSED, str(held), "generate", *flags(given))


def flags(given: dict) -> list[str]:
    """Return options of generate as words of a command line."""
    words = []
    for name, value in given.items():
        values = value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return words


def digests(directory: Path) -> dict[str, str]:
    """Return the sha256 of every file below a directory."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }
