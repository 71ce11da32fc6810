"""What generate costs beside the forward of its target, and where the time goes.

    python scripts/bench/generate.py --target MODEL --corpus FILE [--limit 64]

Rounds are interleaved in one process, on the same documents:

- bare: the model's own forward of the packs of generate, its own LM head included;
- generate: capture with every check and codec, and shards written by a second thread;
- padded: the model's own forward and head of right-padded batches in corpus order;
- alone: the same, one document at a time;
- with --against FORM: bare and generate in another mask form.

Figures are CPU-seconds of the process (on a GPU, seconds), medians with the smallest and largest
round. Then follow the parts of one run, and the proofs before it.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import spec_data.generation.capture as capture_module
from spec_data.capture.attention_in_parts import attention_in_parts
from spec_data.capture.mask_forms import PER_DOCUMENT, ROWS, SINGLE, packed_mask
from spec_data.generation.capture import CaptureSettings, capture_units
from spec_data.generation.options import CaptureOptions
from spec_data.generation.plan import Plan
from spec_data.generation.proof import load_target, prepare_capture
from spec_data.generation.setup import (
    Setup,
    make_plan,
    open_corpus,
    set_up,
)
from spec_data.shards.files import unit_name
from spec_data.shards.follow import WORK
from spec_data.shards.writer import write_shard

ROWS_OF_A_BATCH = 16  # of the padded batches


class Bench:
    """A proven target, a plan, and the ways to run one over the other."""

    def __init__(self, args: argparse.Namespace, work: Path, packing: str) -> None:
        self.work = work
        names = ("limit", "codec", "teacher", "max_shard_size", "device", "dtype", "batch_tokens")
        given = {name: getattr(args, name) for name in names}
        options = CaptureOptions(packing=packing, **given)
        self.setup: Setup = set_up(args.target, [args.corpus], options)
        self.plan: Plan = make_plan(open_corpus([args.corpus], options), self.setup)
        (work / WORK).mkdir(parents=True)
        start = clock()
        target = load_target(self.setup, self.plan)
        self.settings: CaptureSettings = prepare_capture(self.setup, self.plan, target, work)
        self.proofs = clock() - start
        target.close()
        self.backend: Any = load_target(self.setup, self.plan)
        self.units = range(len(self.plan.units))

    @torch.inference_mode()
    def bare(self) -> None:
        """The model's own forward and head of the packs of every unit."""
        target, form = self.backend, self.settings.form
        for unit in self.units:
            for batch, _ in capture_module.unit_forwards(
                self.plan, unit, form, self.settings.batch_tokens
            ):
                documents = batch.document_ids.to(target.device)
                attention: Any = nullcontext()
                if bool((batch.document_ids == 0).all()):  # one document fills each row
                    mask: dict[str, Any] = {"attention_mask": None}
                elif form in (ROWS, SINGLE):
                    mask = {"attention_mask": (documents >= 0).long()}
                else:
                    given = (form, target.config, target.attn, documents, target.dtype)
                    mask = {"attention_mask": packed_mask(*given)}
                    if form == PER_DOCUMENT:
                        attention = attention_in_parts(
                            target.model, target.attn, batch.document_ids
                        )
                positions = batch.position_ids.to(target.device)
                with attention:
                    self._forward(batch.input_ids, position_ids=positions, **mask)

    @torch.inference_mode()
    def padded(self) -> None:
        """Right-padded batches in corpus order."""
        self._rows(ROWS_OF_A_BATCH)

    @torch.inference_mode()
    def alone(self) -> None:
        """One document at a time."""
        self._rows(1)

    def _rows(self, rows: int) -> None:
        documents, offsets = self.plan.documents, self.plan.documents.offsets
        for first in range(0, len(self.plan.lengths), rows):
            part = offsets[first : first + rows + 1] - offsets[first]
            ids = documents.tokens(first, first + len(part) - 1)["input_ids"]
            width = int((part[1:] - part[:-1]).max())
            batch = torch.zeros(len(part) - 1, width, dtype=torch.long)
            mask = torch.zeros_like(batch)
            for row, (a, b) in enumerate(itertools.pairwise(part)):
                batch[row, : b - a] = torch.from_numpy(ids[a:b].astype("int64"))
                mask[row, : b - a] = 1
            full = rows == 1 or bool(mask.all())
            self._forward(batch, attention_mask=None if full else mask.to(self.backend.device))

    def _forward(self, ids: torch.Tensor, **given: Any) -> None:
        self.backend.model(input_ids=ids.to(self.backend.device), use_cache=False, **given)

    def generate(self) -> None:
        """Capture every unit; a second thread writes the shard before it."""
        with ThreadPoolExecutor(1) as writer:
            pending = None
            units = capture_units(self.backend, self.plan, self.units, self.settings)
            for unit, done in units:
                if pending is not None:
                    pending.result()
                pending = writer.submit(self._write, unit, done)
            if pending is not None:
                pending.result()

    def _write(self, unit: int, done: capture_module.CapturedUnit) -> None:
        write_shard(self.work / f"{unit_name(unit)}.arrow", done.data, self.setup.columns)

    def parts(self) -> dict[str, float]:
        """Return the CPU-seconds of the parts of one run, in one thread."""
        spent: dict[str, float] = defaultdict(float)
        start = clock()
        with (
            _timed(self.backend, "capture", spent, "forward and gather"),
            _timed(capture_module, "logit_columns", spent, "head, argmax, logsumexp, figures"),
            _timed(self, "_write", spent, "write"),
        ):
            for unit in self.units:
                one = capture_units(self.backend, self.plan, [unit], self.settings)
                self._write(*next(one))
        spent["checks, codecs, copies"] = clock() - start - sum(spent.values())
        return spent


def clock() -> float:
    """Return CPU-seconds of this process; with a GPU seconds, once its work is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


@contextmanager
def _timed(owner: Any, name: str, spent: dict[str, float], part: str) -> Iterator[None]:
    """Add what calls of `owner.name` take to `spent[part]`."""
    real: Callable[..., Any] = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return real(*args, **kwargs)
        finally:
            spent[part] += clock() - start

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, real)


def rounds(bench: Bench, count: int, other: Bench | None) -> dict[str, list[float]]:
    """Run all ways `count` times, interleaved; return the seconds of each round.

    `other` is the same with another mask form.
    """
    ways = {name: getattr(bench, name) for name in ("bare", "generate", "padded", "alone")}
    if other is not None:
        ways |= {"bare, other form": other.bare, "generate, other": other.generate}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(count):
        for name, run in ways.items():
            start = clock()
            run()
            found[name].append(clock() - start)
    return found


def print_rounds(found: dict[str, list[float]], tokens: int) -> None:
    """Print seconds per million tokens, and every way against generate of the same round."""
    print(f"{'':18}{'s per 1M tokens':>24}{'generate is faster by':>32}")
    for name, seconds in found.items():
        cost = [1e6 * s / tokens for s in seconds]
        ratio = [s / g for s, g in zip(seconds, found["generate"], strict=True)]
        print(
            f"{name:18}{statistics.median(cost):12,.2f} ({min(cost):,.2f} to {max(cost):,.2f})"
            f"{statistics.median(ratio):12.3f}x ({min(ratio):.3f} to {max(ratio):.3f})"
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--limit", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codec", default="default")
    parser.add_argument("--teacher", default="supervised")
    parser.add_argument("--batch-tokens", type=int, default=8192)
    parser.add_argument("--max-shard-size", default="8MB")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--packing", default="auto", help="a mask form; auto: as generate chooses")
    parser.add_argument("--against", help="another mask form, in the same rounds")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, Path(work) / "data", args.packing)
        plan = bench.plan
        print(
            f"{plan.tokens:,} tokens, {plan.documents.predicting:,} with a teacher, in "
            f"{len(plan.units)} units, {bench.settings.form}, {bench.backend.dtype}, "
            f"{bench.backend.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
        )
        other = Bench(args, Path(work) / "other", args.against) if args.against else None
        print_rounds(rounds(bench, args.rounds, other), plan.tokens)
        parts = bench.parts()
        for name, seconds in parts.items():
            print(f"{name:36}{seconds:10.2f} s {seconds / sum(parts.values()):8.1%}")
        print(f"{'proofs, checks, codec tables':36}{bench.proofs:10.2f} s")


if __name__ == "__main__":
    main()
