"""A tiny target with a real tokenizer, a corpus, and functions that run and compare generate."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import spec_data
from spec_data.generation.options import CaptureOptions
from spec_data.generation.setup import open_corpus, set_up
from spec_data.models.target_options import EngineOptions
from spec_data.shards.reader import open_dataset
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


def arguments(given: dict) -> dict:
    """Return options as arguments of `generate`: JSON texts become objects, most of it a record."""
    for name in {"chat_template_kwargs", "max_memory"} & given.keys():
        given = given | {name: json.loads(given[name])}
    fields = {name: given[name] for name in CaptureOptions.__dataclass_fields__ if name in given}
    rest = {name: value for name, value in given.items() if name not in fields}
    return rest | {"options": CaptureOptions(**fields)}


def call(function, given: dict):
    """Call a command with options of `options`."""
    return function(**arguments(given))


def generate_with(**given):
    """Generate in this process; return the manifest, or None if the dataset is not finished."""
    made = call(spec_data.generate, given)
    return open_dataset(made.path).manifest if made.sealed else None


def run(target: Path, corpus: Path | tuple[Path, ...], out: Path, **changes):
    """Generate in this process and return the manifest."""
    return generate_with(**options(target, corpus, out, **changes))


class _Prepared(BaseException):
    """Carries what `generate` was about to do."""


def prepared(**given):
    """Check options as `generate` does, but no paths; return target, corpus and options."""

    def stop(*args):
        raise _Prepared(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spec_data.terminal.config.check_path", lambda *_: None)
        patch.setattr("spec_data.generation.setup.set_up", stop)
        try:
            call(spec_data.generate, given)
        except _Prepared as stopped:
            return stopped.args
    raise AssertionError("generate did not come so far")


def inputs_of(**given):
    """Return the corpus and the setup of a `generate` with these options."""
    target, sources, asked = prepared(**given)
    setup = set_up(target, sources, asked)
    return open_corpus(sources, setup.options), setup


def setup_of(**given):
    """Return the setup of a `generate` with these options."""
    return set_up(*prepared(**given))


def estimate_with(**given):
    """Estimate with options of `generate`."""
    return call(spec_data.estimate, given)


def with_teacher(row: dict) -> torch.Tensor:
    """Return which tokens have a teacher by default: the next one is supervised, bool [T]."""
    mask = row["loss_mask"].tolist()
    return torch.tensor([t + 1 < len(mask) and bool(mask[t + 1]) for t in range(len(mask))])


ON_CPU = EngineOptions(device="cpu")


def verify(**given) -> int:
    """Run every check and print all of the report, not wrapped; return 0 if all pass, else 1."""
    names = EngineOptions.__dataclass_fields__
    running = EngineOptions(**{name: given.pop(name) for name in names if name in given})
    report = examine(**given, running=running)
    print(f"{report.details()}\n{report}".replace("\n  ", " "))
    return report.exit_code


PAUSED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"  # as the program sets it before its imports
from spec_data.cli import main
from spec_data.generation import capture
forwards, held = capture.unit_forwards, int(sys.argv.pop(1))
def paused(plan, unit, *args):
    while unit >= held:
        time.sleep(0.01)
    return forwards(plan, unit, *args)
capture.unit_forwards = paused
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
