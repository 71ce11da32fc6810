"""Does a change alter anything that the product computes? Compare two commits on one machine.

    python scripts/same.py --against main        # this checkout against a commit
    python scripts/same.py --record now.json     # only write down what this checkout computes
    python scripts/same.py --against main --target DIR --corpus FILE --small

Both commits run their own copy of this script on the same target and corpus (without --target: a
small trained one, made once by scripts/make_target.py). What is compared are hashes of *values*:
the columns of every stored document, the weights that a draft has after some steps, its metrics,
exported tensors and configs, and what decoding accepts. File hashes of shards are a row of their
own, because a format may change on purpose. Bits differ between machines and thread counts, so no
hash is kept in the repository. A row that changes on purpose belongs into the commit's message.

Covered: drafts, codecs, supervisions and mask policies; packing and single rows; states that a
stand-in of a server hands over; regenerated answers; two training processes; `search`; options from
files of `--config`; views; conversion; export; eval. `mtp` has a small target of its own, as the
server has a stand-in: both come from the tests of each commit. That workers and killed runs end in
equal bytes: tests.
"""

import argparse
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ROOT = Path(__file__).resolve().parent.parent
DRAFTS = ("eagle", "eagle3", "peagle", "dspark", "dflash", "dflash2", "domino", "lilicorr")
DRAFTS += ("xpress",)
CLOCK = (
    "seconds",
    "per_second",
    "wait",
    "speed",
    "time",
    "rss",
    "bytes_per",
    "date",
    "cost",
    "ratio",
)
"""Parts of the names of metrics that come from a clock or name the machine."""
Hashes = dict[str, str]


def digest(*parts: Any) -> str:
    """Return 16 hex digits of bytes, tensors, or what JSON can hold."""
    state = hashlib.sha256()
    for part in parts:
        if hasattr(part, "detach"):
            part = part.detach().contiguous()
            state.update(f"{part.dtype}{tuple(part.shape)}".encode())
            part = part.flatten().view(__import__("torch").uint8).numpy().tobytes()
        elif not isinstance(part, bytes):
            part = json.dumps(part, sort_keys=True, default=str).encode()
        state.update(part)
    return state.hexdigest()[:16]


# -- what is hashed ---------------------------------------------------------------------------


def documents(path: Path) -> Hashes:
    """Hash every column of a dataset, documents in order."""
    from spec_data import open_dataset

    columns: dict[str, list[str]] = {}
    for document in open_dataset(path):
        for name, value in document.items():
            columns.setdefault(name, []).append(digest(value))
    return {name: digest(values) for name, values in columns.items()}


def shard_files(path: Path) -> Hashes:
    """Hash the bytes of the shards."""
    files = sorted((path / "shards").rglob("*.arrow"))
    return {"shard files": digest([hashlib.sha256(f.read_bytes()).hexdigest() for f in files])}


def tensors(path: Path) -> Hashes:
    """Hash the tensors of every safetensors file directly in a directory."""
    from safetensors.torch import load_file

    files = sorted(path.glob("*.safetensors"))
    return {f.name: digest(*(x for kv in sorted(load_file(f).items()) for x in kv)) for f in files}


def numbers(value: Any) -> list[float]:
    """Return every number of a record, sorted, but for those of a clock: names may change."""
    if isinstance(value, dict):
        kept = (v for k, v in value.items() if not any(word in k for word in CLOCK))
        return sorted(x for v in kept for x in numbers(v))
    if isinstance(value, list | tuple):
        return sorted(x for v in value for x in numbers(v))
    return [float(value)] if isinstance(value, int | float) else []


def run_facts(run: Path) -> Hashes:
    """Hash the weights of a run's last and best draft, and its metrics."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = {"metrics": digest(list(map(numbers, lines)))}
    for which in ("last", "best"):
        found |= {f"{which} {name}": value for name, value in tensors(run / which).items()}
    return found


# -- cases ------------------------------------------------------------------------------------


class Cases:
    """The cases; each method yields rows (name, hashes) and may use what earlier ones wrote."""

    def __init__(self, target: Path, corpus: Path, prompts: Path, work: Path, small: bool) -> None:
        self.target, self.corpus, self.prompts, self.work = target, corpus, prompts, work
        self.small = small
        self.base = work / "base"
        self.steps = 4 if small else 8

    def __iter__(self) -> Iterator[tuple[str, Callable[[], Hashes]]]:
        """Yield names and what computes them, in order."""
        yield "generate", lambda: self.generate("base", limit=80)
        yield from self.captures()
        yield "generate served", self.served
        yield "regenerate", lambda: self.regenerate(0.0)
        yield "regenerate sampled", lambda: self.regenerate(1.0)
        if not self.small:
            yield from self.views()
        yield "convert", lambda: self.convert("specforge")
        yield "convert speculators", lambda: self.convert("speculators")
        for draft in DRAFTS:
            yield f"fit {draft}", lambda draft=draft: self.fit(draft, draft)
            yield f"export {draft}", lambda draft=draft: self.export(draft)
            yield f"decode {draft}", lambda draft=draft: self.decode(draft)
            yield f"simulate {draft}", lambda draft=draft: self.simulate(draft)
        yield "mtp generate", self.mtp_generate
        yield "mtp fit", lambda: self.fit("mtp", "mtp", self.work / "mtp")
        yield "mtp export", lambda: self.export("mtp", self.work / "mtp-target", "target")
        yield "mtp decode", self.mtp_decode
        yield "search", self.search
        yield "config", self.config_files
        yield "two processes", self.two_processes

    def generate(self, name: str, **options: Any) -> Hashes:
        """Capture `limit` documents."""
        import spec_data

        given = {"limit": 12, "max_length": 256, "max_shard_size": "1MB", "on_policy": False}
        out = self.work / name
        options = {k: v for k, v in (given | options).items() if v is not False}
        capture = spec_data.CaptureOptions(**options)
        spec_data.generate(str(self.target), str(self.corpus), str(out), capture)
        return documents(out) | shard_files(out)

    def captures(self) -> Iterator[tuple[str, Callable[[], Hashes]]]:
        """Yield captures that differ from the default in one option."""
        variants: dict[str, dict[str, Any]] = {
            "codec bf16": {"codec": "bf16"},
            "supervision topk:8": {"supervision": "topk:8"},
            "mask last-turn": {"mask": "last-turn"},
            "alone": {"packing": "per-document"},
            "short": {"max_length": 64},
            "for all": {"for_": ["eagle3", "dspark"]},
        }
        if not self.small:
            variants |= {
                **{f"codec {name}": {"codec": name} for name in ("fine", "small")},
                "supervision logits": {"supervision": "logits"},
                "mask all": {"mask": "all"},
                "final supervised": {"final": "supervised", "teacher": "supervised"},
                "float32": {"dtype": "float32"},
            }
        for name, options in variants.items():
            yield name, lambda name=name, options=options: self.generate(name, **options)

    def views(self) -> Iterator[tuple[str, Callable[[], Hashes]]]:
        """Yield views, and copies of them; only values are compared."""
        import spec_data

        def written(make: Callable[[str], Any], name: str) -> Callable[[], Hashes]:
            def case() -> Hashes:
                make(str(self.work / name))
                return documents(self.work / name)

            return case

        base, bf16, short = (str(self.work / n) for n in ("base", "codec bf16", "short"))
        makers: dict[str, Callable[[str], Any]] = {
            "mask last-turn": lambda out: spec_data.select(base, out, mask="last-turn"),
            "mask first-1": lambda out: spec_data.select(base, out, mask="first-1"),
            "sample": lambda out: spec_data.select(base, out, sample="50%"),
            "merge": lambda out: spec_data.merge(two_parts(self), out),
            "recode": lambda out: spec_data.recode(bf16, out, "fine"),
            "layers": lambda out: spec_data.select(short, out, layers="1"),
            "copy": lambda out: spec_data.copy(str(self.work / "view merge"), out),
        }
        for name, make in makers.items():
            yield f"view {name}", written(make, f"view {name}")

    def convert(self, form: str) -> Hashes:
        """Write the states as another trainer stores them, and read them back."""
        import spec_data

        names = ("codec bf16", f"stored {form}", f"converted {form}")
        base, stored, out = (self.work / name for name in names)
        spec_data.export_dataset(str(base), form, str(stored))
        spec_data.convert(str(stored), str(self.target), str(out), from_=form)
        return documents(out)

    def served(self) -> Hashes:
        """Capture states that a server hands over, a stand-in without a cache of prefixes."""
        from tests.spec_data.conversion import stand_in_engine

        stand_in_engine.BLOCK = 1 << 30  # what comes from a cache depends on the order of requests
        with stand_in_engine.StandIn(self.target) as server:
            options = {"backend": "served", "server": server.url, "layers": "1,2,4", "limit": 6}
            return self.generate("served", **options)

    def regenerate(self, temperature: float) -> Hashes:
        """Let the target answer some rows."""
        import spec_data

        out = self.work / f"own-{temperature}.jsonl"
        given = {"max_new_tokens": 16, "limit": 12, "temperature": temperature}
        spec_data.regenerate(str(self.corpus), str(out), str(self.target), **given)
        return {"answers": digest(out.read_bytes())}

    def mtp_generate(self) -> Hashes:
        """Write a target with an MTP block, and capture with it."""
        import spec_data
        from tests.spec_data.runs import write_corpus
        from tests.spec_train.drafts.mtp.targets import write_target

        target, corpus = self.work / "mtp-target", self.work / "mtp.jsonl"
        write_target(target, "mimo")
        write_corpus(corpus, 30)
        options = spec_data.CaptureOptions(layers="0", codec="bf16")
        spec_data.generate(str(target), str(corpus), str(self.work / "mtp"), options)
        return documents(self.work / "mtp") | tensors(self.work / "mtp" / "target")

    def mtp_decode(self) -> Hashes:
        """Decode with an MTP block and its target."""
        import spec_train

        given = {"target": str(self.work / "mtp-target"), "prompts": str(self.work / "mtp.jsonl")}
        result = spec_train.evaluate(
            str(self.work / "run-mtp"), limit=4, max_new_tokens=16, **given
        )
        return {"greedy": digest(numbers(result.figures))}

    def search(self) -> Hashes:
        """Search over two depths; times decide nothing, because the steps are given."""
        import spec_train

        options = {"steps": self.steps, "seq_len": 256, "batch_size": 2, "validation": 0.2}
        out = self.work / "search"
        training = spec_train.SearchTraining(data=str(self.base), out=str(out), **options)
        found = spec_train.search(training, space="draft=eagle3,ttt_steps=1,2")
        kept = [[row["name"], row["state"], row["length"]] for row in found.rows]
        command = [word.replace(str(self.work), "") for word in found.next_command or ()]
        return {"rows": digest(found.best, kept), "command": digest(command)}

    def config_files(self) -> Hashes:
        """Train with options of a file, and again with those that the run wrote down."""
        from spec_train.cli import main

        file, first, again = (self.work / n for n in ("run.yaml", "run-config", "run-again"))
        given = {"data": str(self.base), "out": str(first), **self.fit_options("eagle3")}
        file.write_text(json.dumps(given))  # YAML too
        line = ["fit", "eagle3", "--quiet", "--config"]
        for words in ([str(file)], [str(first / "fit.json"), "--out", str(again)]):
            if code := main([*line, *words]):
                raise RuntimeError(f"exit {code}: {words}")
        resolved = json.loads((first / "fit.json").read_text())
        kept = {k: v for k, v in resolved.items() if k not in ("data", "out")}
        return run_facts(again) | {"fit.json": digest(kept)}

    def fit_options(self, draft: str) -> dict[str, Any]:
        options: dict[str, Any] = {"steps": self.steps, "eval_every": self.steps // 2}
        options |= {"save_every": 2, "seq_len": 256, "batch_size": 2, "validation": 0.2}
        return options | ({"ttt_steps": 3} if draft == "eagle3" else {})

    def fit(self, draft: str, name: str, data: Path | None = None) -> Hashes:
        """Train a draft for some steps."""
        import spec_train
        from spec_train.options.kinds import draft_options

        data = data or (self.base if draft != "dspark" else self.work / "for all")
        run = self.work / f"run-{name}"
        options = self.fit_options(draft)
        own = {k: options.pop(k) for k in ("ttt_steps",) if k in options}
        training = spec_train.Training(data=str(data), out=str(run), **options)
        spec_train.fit(training, draft_options(draft)(**own))
        return run_facts(run)

    def two_processes(self) -> Hashes:
        """Train as two processes, each with half of the packs."""
        out = self.work / "run-two"
        words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
        words += ["--standalone", "-m", "spec_train", "fit", "eagle3"]
        options = {"data": self.base, "out": out, **self.fit_options("eagle3"), "batch_size": 1}
        for name, value in options.items():
            words += [f"--{name.replace('_', '-')}", str(value)]
        run(words)
        return run_facts(out)

    def export(self, draft: str, target: Path | None = None, form: str = "vllm") -> Hashes:
        """Export a draft for an engine."""
        import spec_train

        out, target = self.work / f"export-{draft}", target or self.target
        form = form if draft != "dflash" else "speculators"
        spec_train.export(str(self.work / f"run-{draft}"), str(out), form, str(target))
        config = json.loads((out / "config.json").read_text())
        return tensors(out) | {"config.json": digest(config)}

    def decode(self, draft: str) -> Hashes:
        """Decode prompts with draft and target, greedily and sampled."""
        import spec_train

        found = {}
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            result = spec_train.evaluate(
                str(self.work / f"run-{draft}"),
                target=str(self.target),
                prompts=str(self.prompts),
                limit=4,
                max_new_tokens=24,
                temperature=temperature,
            )
            found[name] = digest(numbers(result.figures))
            samples = result.figures["samples"]  # without the second way, which has times
            texts = [{k: v for k, v in one.items() if k != "plain"} for one in samples]
            found[f"{name} text"] = digest(texts)
        return found

    def simulate(self, draft: str) -> Hashes:
        """Measure a draft on its held-out documents."""
        import spec_train

        data = self.base if draft != "dspark" else self.work / "for all"
        result = spec_train.evaluate(str(self.work / f"run-{draft}"), data=str(data))
        return {"figures": digest(numbers(result.figures))}


def two_parts(cases: Cases) -> list[str]:
    """Return the short and the long documents of the base: one capture, so one set of tables."""
    import spec_data

    base, short, long = (str(cases.work / name) for name in ("base", "base-short", "base-long"))
    lengths = sorted(spec_data.open_dataset(base).lengths.tolist())
    middle = lengths[len(lengths) // 2]  # so that both have some, with any corpus
    spec_data.select(base, short, where=f"length < {middle}")
    spec_data.select(base, long, where=f"length >= {middle}")
    return [short, long]


# -- running ----------------------------------------------------------------------------------


def run(words: list[str]) -> None:
    """Run a command; its output is shown only if it fails."""
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"exit {done.returncode}: {' '.join(words)}\n{done.stderr[-2000:]}")


def record(args: argparse.Namespace) -> Hashes:
    """Run the cases and return a flat table of hashes; a case that fails has its error instead."""
    import torch
    from transformers.utils import logging as transformers_logging

    sys.path.insert(0, str(ROOT))  # for what its tests make
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers_logging.disable_progress_bar()
    rows: Hashes = {}
    with tempfile.TemporaryDirectory(prefix="same-") as work:
        for name, case in Cases(args.target, args.corpus, args.prompts, Path(work), args.small):
            start = time.monotonic()
            try:
                found = case()
            except Exception as error:  # the other cases must still be compared
                found = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            rows |= {f"{name}: {key}": value for key, value in found.items()}
            state = found.get("error", f"{len(found)} hashes")
            print(f"{name:24} {time.monotonic() - start:6.1f} s  {state}", file=sys.stderr)
    return rows


def compare(old: Hashes, new: Hashes) -> int:
    """Print the rows that differ; return how many do or failed."""
    bad = 0
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name, "-"), new.get(name, "-")
        if before != now or ": error" in name:
            bad += 1
            print(f"{name:50} {before} -> {now}")
    print(f"{len(new)} rows, {bad} differ or failed")
    return bad


def main() -> None:
    """Record this checkout, and the other commit if one is named; compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write the hashes to FILE")
    parser.add_argument("--with", dest="old", type=Path, help="compare with a recorded FILE")
    parser.add_argument("--target", type=Path, help="a model directory (default: one is made)")
    parser.add_argument("--corpus", type=Path, help="chats (default: TARGET/corpus.jsonl)")
    parser.add_argument("--prompts", type=Path, help="(default: TARGET/prompts.jsonl)")
    parser.add_argument("--small", action="store_true", help="fewer cases, for a larger target")
    args = parser.parse_args()
    if not (args.against or args.record or args.old):
        parser.error("one of --against, --record or --with")
    with tempfile.TemporaryDirectory(prefix="same-target-") as made:
        if args.target is None:
            args.target = Path(made)
            script = str(ROOT / "scripts" / "make_target.py")
            run([sys.executable, script, "--out", made, "--steps", "120"])
        args.corpus = args.corpus or args.target / "corpus.jsonl"
        args.prompts = args.prompts or args.target / "prompts.jsonl"
        new = record(args)
        if args.record:
            args.record.write_text(json.dumps(new, indent=1, sort_keys=True) + "\n")
        old = json.loads(args.old.read_text()) if args.old else None
        if args.against:
            old = record_commit(args, Path(made))
    if old is not None:
        sys.exit(compare(old, new) > 0)


def record_commit(args: argparse.Namespace, folder: Path) -> Hashes:
    """Run the script of another commit, with its own code, on the same files."""
    tree, out = folder / "tree", folder / "old.json"
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(tree), args.against], check=True)
    try:
        words = [sys.executable, str(tree / "scripts" / "same.py"), "--record", str(out)]
        for name in ("target", "corpus", "prompts"):
            words += [f"--{name}", str(getattr(args, name))]
        words += ["--small"] if args.small else []
        subprocess.run(words, check=True, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)})
    finally:
        subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    return json.loads(out.read_text())


if __name__ == "__main__":
    main()
