"""`spec-train search`, top to bottom: from the axes to the draft that is worth a whole run.

Successive halving (Jamieson and Talwalkar, arXiv 1502.07943): all arms train some steps, the worse
half of each kind of draft is dropped, the others train twice as many. An arm is dropped only if its
interval of held-out acceptance length lies below that of the best one as well. Kinds learn at
different speeds, so they are compared at the last rung alone.

An arm is a run of `fit` of all steps of the last rung. It stops at each rung, and the next one
resumes it: arms are compared at equal steps of one schedule, which no rung bends. What was measured
is read from the runs, so an interrupted search goes on where it was.
"""

import bisect
import logging
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

from spec_data.models.devices import compute_dtype_name, usable_device
from spec_data.models.families import target_architectures
from spec_data.shards.errors import (
    BusyError,
    ConfigError,
    DraftError,
    FileError,
    RunError,
)
from spec_data.shards.resumable import (
    differing_settings,
    process_lock,
    read_record,
    refuse_changes,
    write_record,
)
from spec_data.terminal.config import to_dict
from spec_data.terminal.console import ANNOUNCED
from spec_data.terminal.paths import check_directory_to_write, make_directory
from spec_data.terminal.progress import bars, duration
from spec_data.terminal.types import comma_list
from spec_train.data.mixture import Documents, open_documents, parts_of
from spec_train.drafts import draft_class
from spec_train.drafts.kinds import code_names, codes_of, kind_named, load_codes
from spec_train.options.data_option import parse_sources
from spec_train.options.training import Training
from spec_train.training.fit import fit, open_data
from spec_train.training.result import FitResult
from spec_train.training.run_cost import dry_run
from spec_train.training.run_directory import checkpoint_name, checkpoints_of
from spec_train.training.search_space import Arm, Axes, SearchTraining, make_arms
from spec_train.training.settings import MAY_CHANGE, resolve_config, sized
from spec_train.training.trainer import stop_signals

log = logging.getLogger(__name__)

RECORD, _LOCK = "search.json", ".lock"
_FREE = {*MAY_CHANGE, "devices"} - {"batch_size", "accumulation"}
"""Options that a resumed search may change."""
_GONE = {"eval_every", "follow", "follow_timeout"}
"""Options that the records of earlier releases have, where they had no effect."""
LEAST_STEPS = 10
"""Steps of the first rung at least, if the budget decides."""


@dataclass(frozen=True)
class Measured:
    """The held-out acceptance length of an arm at a rung, with its 95 % interval."""

    length: float
    low: float = -math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Cost:
    """Seconds of an arm: of a step, of a validation, and of the set-up of a turn."""

    step: float
    validation: float
    setup: float


@dataclass(frozen=True)
class Plan:
    """The steps after which arms are compared, and what every arm then trains."""

    rungs: Sequence[int]
    batch_size: int | None
    accumulation: int
    seconds: float | None = None
    """As estimated; None: not measured."""


@dataclass
class Outcome:
    """How far a search is: what each arm measured, by rung; who was dropped, or failed and why."""

    directory: Path
    arms: list[Arm]
    plan: Plan
    lengths: dict[str, dict[int, Measured]]
    dropped: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    spent: float = 0.0
    complete: bool = False
    stopped_by: int | None = None

    def run_of(self, arm: Arm) -> Path:
        """Return the directory of an arm's run."""
        return self.directory / f"arm-{self.arms.index(arm) + 1:02d}-{kind_named(arm.draft).name}"

    def measure(self, arm: Arm, rung: int) -> bool:
        """Read what the run of an arm measured and saved at a rung; False: it is not there yet."""
        run = self.run_of(arm)
        saved = any(path.name >= checkpoint_name(rung) for path in checkpoints_of(run))
        lines = FitResult(run, 0, finished=False).validation if saved else []
        line = next((line for line in reversed(lines) if line["step"] == rung), None)
        if line is not None:
            interval = line.get("serving_like_interval") or (-math.inf, math.inf)
            length = line.get("serving_like_length") or 1.0
            self.lengths[arm.name][rung] = Measured(length, *interval)
        return line is not None

    def rows(self) -> list[dict[str, Any]]:
        """Return what is known of every arm, the best one first; failed ones follow the others.

        Arms of a rung that not all of its arms have reached are ranked by the one before it.
        """
        live = self.lengths.keys() - self.dropped - self.failed.keys()
        common = set(self.plan.rungs).intersection(*(self.lengths[name] for name in live))
        least = max(common, default=self.plan.rungs[0])
        known = {}
        for arm in self.arms:
            steps = max((rung for rung in self.lengths[arm.name] if rung <= least), default=0)
            known[arm.name] = steps, self.lengths[arm.name].get(steps)

        def order(arm: Arm) -> tuple[bool, bool, int, float]:
            steps, found = known[arm.name]
            return found is None, arm.name in self.failed, -steps, -found.length if found else 0.0

        ranked, rows = sorted(self.arms, key=order), []
        last, best = known[ranked[0].name]
        for arm in ranked:
            steps, found = known[arm.name]
            row = row_of(arm) | {"state": "not run"}
            if found is not None and best is not None:
                state = "as good" if steps == last and found.high >= best.low else "behind"
                state = "dropped" if arm.name in self.dropped else state
                state = "best" if found is best else state
                row |= {"steps": steps, "length": found.length, "run": self.run_of(arm)}
                row |= {"interval": (found.low, found.high)} if math.isfinite(found.low) else {}
                row["state"] = state
            rows.append(row | ({"state": "failed"} if arm.name in self.failed else {}))
        return rows


def row_of(arm: Arm) -> dict[str, Any]:
    """Return the row of an arm that was not measured, in the table of a search."""
    unknown = dict.fromkeys(("steps", "length", "interval", "run"))
    return {"name": arm.name, "draft": arm.draft, **unknown, "state": ""}


# -- the rules -------------------------------------------------------------------------------------


def rungs_of(arms: int, steps: int) -> tuple[int, ...]:
    """Return the steps after which `arms` of one kind are compared: the last is `steps`, each of
    the others half the next.
    """
    count = max(1, math.ceil(math.log2(arms)))
    return tuple(sorted({max(1, steps >> k) for k in range(count)}))


def survivors(
    measured: Mapping[str, Measured], kinds: Mapping[str, str] | None = None
) -> list[str]:
    """Return the arms that go on, the best one first; with `kinds`, those of each kind by itself.

    They are the better half, and all whose interval reaches that of the best one, if it has one.
    """
    if not measured:
        return []
    if kinds is not None:
        groups: dict[str, dict[str, Measured]] = {}
        for name, found in measured.items():
            groups.setdefault(kinds[name], {})[name] = found
        return [name for group in groups.values() for name in survivors(group)]
    ranked = sorted(measured, key=lambda name: -measured[name].length)
    best, half = measured[ranked[0]], math.ceil(len(ranked) / 2)
    known = math.isfinite(best.low)
    return [n for i, n in enumerate(ranked) if i < half or (known and measured[n].high >= best.low)]


Costs = Mapping[str, Sequence[Cost]]
"""Of the arms of each kind."""


def planned_seconds(costs: Costs, rungs: Sequence[int], workers: int = 1) -> float:
    """Return about the seconds of a search in which each rung halves the arms of every kind."""
    total = sum(cost.validation for arms in costs.values() for cost in arms)  # before training
    for arms in costs.values():
        done = 0
        for number, steps in enumerate(rungs):
            turns = [c.setup + (steps - done) * c.step + c.validation for c in arms]
            total += sum(turns) * math.ceil(len(arms) / 2**number) / len(arms)
            done = steps
    return total / workers


def budgeted_steps(costs: Costs, budget: float, most: int, workers: int = 1) -> int:
    """Return the steps of the last rung that `budget` seconds allow, at most `most`.

    Raises:
        ConfigError: the first rung would have fewer than LEAST_STEPS.
    """

    largest = max(map(len, costs.values()))

    def seconds(steps: int) -> float:
        return planned_seconds(costs, rungs_of(largest, steps), workers)

    steps = bisect.bisect_right(range(1, most + 1), budget, key=seconds)
    least = min(most, LEAST_STEPS * 2 ** (len(rungs_of(largest, most)) - 1))
    if steps < least:
        count = sum(map(len, costs.values()))
        raise ConfigError(
            f"--budget: after the measuring, {duration(max(0, budget))} are left for {count} "
            f"drafts, which need about {duration(seconds(least))}; give more, or name fewer values "
            "in --space"
        )
    return steps


# -- the search ------------------------------------------------------------------------------------


def search(training: SearchTraining, axes: Axes, budget: float) -> Outcome:
    """Search, or resume it; `budget` is in seconds, over all calls.

    Raises:
        ConfigError: a bad axis, too small a budget, or a directory that holds something else.
        DraftError: an arm that the dataset does not serve.
        RunError: no arm could be trained, the disk is full, or another process searches here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("search: start it without torchrun; --devices names several GPUs")
    begun, out, devices = time.monotonic(), Path(training.out), devices_of(training)
    check_directory_to_write("--out", out)
    arms = arms_of(training, axes)
    if out.is_dir() and not (out / RECORD).is_file() and {p.name for p in out.iterdir()} - {_LOCK}:
        raise ConfigError(f"--out {out}: not empty and not a search; pass another directory")
    make_directory("--out", out)
    with process_lock(out / _LOCK, f"--out {out}: another search is running here; wait for it"):
        settings = {n: v for n, v in to_dict(training).items() if n not in _FREE}
        settings |= {n: None for n in ("batch_size", "epochs") if n not in training.given}
        settings |= {"space": axes, "arms": [arm.name for arm in arms]}
        documents = _documents_of(training)
        settings["dataset"] = documents.manifest.fingerprint
        families = target_architectures(documents.target_config())
        if codes := code_names(draft_class(arm.draft, families) for arm in arms):
            settings["draft_code"] = codes  # without it other classes would train on
        settings["dtype"] = compute_dtype_name(training.dtype, usable_device(devices[0]))
        settings["weights"] = [str(source.weight) for source in parse_sources(training.data)]
        if (out / RECORD).is_file():
            if (record := read_record(out / RECORD)) is None:
                raise RunError(f"{out / RECORD}: damaged; restore it, or search in another --out")
            before = {n: v for n, v in record["settings"].items() if n not in _GONE}
            refuse_changes(differing_settings(before, settings), out)
            plan = Plan(**{f.name: record[f.name] for f in fields(Plan)})
            begun -= record["spent"]
        else:
            record, plan = {}, plan_search(training, arms, budget)
        failed = record.get("failed", {})
        outcome = Outcome(out, arms, plan, {arm.name: {} for arm in arms}, failed=failed)

        def note() -> None:
            outcome.spent = time.monotonic() - begun
            known = {"spent": outcome.spent, "failed": outcome.failed}
            write_record(out / RECORD, {"settings": settings, **to_dict(plan), **known})

        note()
        _climb(outcome, training, budget, note)
    if outcome.failed and not any(outcome.lengths.values()) and outcome.stopped_by is None:
        name, reason = next(iter(outcome.failed.items()))
        raise RunError(f"no draft of --space could be trained; {name}: {reason}")
    return outcome


def _documents_of(training: SearchTraining) -> Documents:
    return open_documents(parse_sources(training.data), training.mask)


def arms_of(training: SearchTraining, axes: Axes) -> list[Arm]:
    """Return the arms of some axes on the dataset, which holds what each of them reads.

    Each is checked by the class that `fit` trains: that of the target's family, if it has one.
    """
    dataset = _documents_of(training)
    manifest, families = dataset.manifest, target_architectures(dataset.target_config())
    arms = make_arms(axes, manifest.layers, manifest.draft_layers, training.preset)
    for arm in arms:
        kind = draft_class(arm.draft, families)
        kind.check_data(arm.options, manifest)
        if training.init_from is None:
            kind.check_fresh(parts_of(dataset)[0])
    return arms


def plan_search(
    training: SearchTraining, arms: Sequence[Arm], budget: float, estimate: bool = False
) -> Plan:
    """Return the rungs that the budget allows; --steps decides the last one, if it is given.

    One arm of each kind of draft is measured for it; with --steps, only if `estimate` is asked for.
    No draft trains longer than an ordinary run of `fit`.
    """
    size = _size_of_whole_run(training)
    counts = Counter(arm.draft for arm in arms)
    largest = max(counts.values())
    rungs, workers = rungs_of(largest, training.steps or 1), len(devices_of(training))
    if training.steps and not estimate:
        return Plan(rungs, *size)
    begun, costs = time.monotonic(), {}
    for arm in {arm.draft: arm for arm in reversed(arms)}.values():
        start = time.monotonic()
        found = dry_run(arm.draft, training.of_arm(**arm.changes), arm.options)
        step, validation = found.step_seconds or 0.0, found.validation_seconds or 0.0
        ran = 2 * validation + min(found.steps, 6) * step
        costs[arm.draft] = Cost(step, validation, max(0.0, time.monotonic() - start - ran)), found
    each = {draft: [cost] * counts[draft] for draft, (cost, _) in costs.items()}
    if not training.steps:
        found = min((one for _, one in costs.values()), key=lambda one: one.steps)
        left = budget - (0 if estimate else time.monotonic() - begun)
        rungs = rungs_of(largest, budgeted_steps(each, left, found.steps, workers))
        size = found.batch_size, found.accumulation
    return Plan(rungs, *size, planned_seconds(each, rungs, workers))


def _size_of_whole_run(training: SearchTraining) -> tuple[int | None, int]:
    """Return the batch size and accumulation that `fit` has without --steps: arms have the same."""
    if training.steps:
        config = training.of_arm(steps=None)
        dataset = open_data(config)
        config = sized(resolve_config(config, dataset), dataset, 1, None)
        return config.batch_size, config.accumulation
    return training.batch_size, training.accumulation


def devices_of(training: SearchTraining) -> list[str]:
    """Return the devices that train, each one arm at a time."""
    names = [name.strip() for name in comma_list(training.devices).split(",") if name.strip()]
    devices = [str(usable_device(name, "--devices")) for name in names]
    return list(dict.fromkeys(devices)) or [str(usable_device(training.device))]


def _climb(
    outcome: Outcome, training: SearchTraining, budget: float, note: Callable[[], None]
) -> None:
    """Train the arms rung by rung, until one is left, or the budget or a signal ends it."""
    live, failed = list(outcome.arms), outcome.failed
    for rung in outcome.plan.rungs:
        todo = [arm for arm in live if not outcome.measure(arm, rung)]
        log.info("to step %d: %d drafts, %d of them still train", rung, len(live), len(todo))
        for arm, stopped_by, error in _turns(outcome, training, todo, rung, budget):
            failed.pop(arm.name, None)  # of an earlier call
            if error is not None:
                failed[arm.name] = error
                log.warning("warning[arm]: %s: %s", arm.name, error)
            if stopped_by is not None:
                outcome.stopped_by = stopped_by
            measured = outcome.measure(arm, rung)
            note()
            if error is None and stopped_by is None and not measured:
                raise RunError(
                    f"{arm.name} has no held-out acceptance length: no held-out document has a "
                    "slot for it, so drafts cannot be compared. Search on more documents, or "
                    "with a larger --validation"
                )
        at = {arm.name: by[rung] for arm in live if rung in (by := outcome.lengths[arm.name])}
        live = [arm for arm in live if arm.name in at or arm.name not in failed]  # failed later
        if outcome.stopped_by is not None or len(at) < len(live):
            return
        kinds = {arm.name: arm.draft for arm in live}
        stay = survivors(at, None if rung == outcome.plan.rungs[-1] else kinds)
        outcome.dropped |= at.keys() - stay
        live = [arm for arm in live if arm.name in stay]
        if len(live) < 2:
            break
    outcome.complete = bool(live)


# -- turns: arms that train to a rung --------------------------------------------------------------

Turn = tuple[Arm, int | None, str | None]
"""Of an error only the words: its frames hold the memory that the next arm needs."""


def _turns(
    outcome: Outcome, training: SearchTraining, todo: Sequence[Arm], rung: int, budget: float
) -> Iterator[Turn]:
    """Train arms to a rung; yield each with the signal that stopped it, or its error.

    None begins after a signal, or when the budget is spent.
    """
    devices, plan, waiting = devices_of(training), outcome.plan, list(todo)
    since = time.monotonic() - outcome.spent

    def settings(arm: Arm, device: str) -> tuple[Arm, Training, int]:
        given: dict[str, Any] = {"out": str(outcome.run_of(arm)), "device": device, "epochs": None}
        given |= {"steps": plan.rungs[-1], "eval_every": rung, "batch_size": plan.batch_size}
        given |= {"accumulation": plan.accumulation, **arm.changes}
        return arm, training.of_arm(**given), rung

    def begins() -> bool:
        return bool(waiting) and time.monotonic() - since < budget

    if len(devices) == 1:
        while begins() and outcome.stopped_by is None:
            yield _turn(*settings(waiting.pop(0), devices[0]))
        return
    others = set(multiprocessing.active_children())
    running: dict[Future[Turn], tuple[str, Arm]] = {}

    def end() -> None:
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()  # one that trains finishes its step and saves

    with ExitStack() as stack:
        context = multiprocessing.get_context("spawn")
        families = target_architectures(_documents_of(training).target_config())
        codes = codes_of({draft_class(arm.draft, families) for arm in outcome.arms})
        pool = partial(
            ProcessPoolExecutor, 1, context, initializer=_begin_process, initargs=(codes,)
        )
        pools = {device: stack.enter_context(pool()) for device in devices}
        stack.callback(end)  # at an error too: none waits for the turn of another device
        caught = stack.enter_context(stop_signals())
        while True:
            for device in [d for d in devices if d not in [d for d, _ in running.values()]]:
                if begins() and not caught:
                    arm = waiting.pop(0)
                    with _no_interrupt():
                        future = pools[device].submit(_turn, *settings(arm, device), True)
                    running[future] = device, arm
            if not running:
                if caught:
                    outcome.stopped_by = outcome.stopped_by or caught[0]
                return
            for future in wait(running, timeout=1.0, return_when=FIRST_COMPLETED).done:
                _, arm = running.pop(future)
                try:
                    arm, stopped_by, error = future.result()
                    yield arm, caught[0] if caught and stopped_by else stopped_by, error
                except BrokenProcessPool:
                    if not caught:
                        raise RunError(f"{arm.name}: its process died; run again") from None
                    yield arm, caught[0], None
            if caught:
                end()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Keep Ctrl-C back, also in a process that begins here: until it has imported what it runs."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin_process(codes: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Set up a process that trains: it ends, and its run is saved, if the one that searches ends.

    `codes` name the drafts from outside, whose options it receives, and the classes of families.

    Ctrl-C and a scheduler reach the whole group; the one that searches passes it on.
    """
    load_codes(codes)
    for number in (signal.SIGINT, *ANNOUNCED):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        while True:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(1)

    threading.Thread(target=watch, daemon=True).start()


def _turn(arm: Arm, training: Training, rung: int, quiet: bool = False) -> Turn:
    """Train one arm to a rung."""
    try:
        with bars(quiet=True) if quiet else nullcontext():
            return arm, fit(arm.draft, training, arm.options, rung).stopped_by, None
    except (BusyError, FileError):  # another search, a full disk: no fault of the arm
        raise
    except (RunError, DraftError) as error:
        return arm, None, str(error)
