"""`spec-data generate`, from the corpus to the sealed dataset.

out/.generate/plan.{json,arrow}     the plan: every document, cut into units
out/.generate/target.json           what was proven about the target
out/codec.safetensors               tables of lossy codecs, made once, before the first shard
out/shards/unit-00000.arrow         a shard, and its record out/.generate/unit-00000.json
out/manifest.json                   written last: it makes the directory a dataset; not of --pass-on
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

from msgspec.structs import replace

from spec_data.capture.backend import TargetBackend
from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.again import (
    Lost,
    capture_again,
    listed,
    lost_files,
    what_would_be_done,
)
from spec_data.generation.capture import CapturedUnit
from spec_data.generation.halving import UnitCapture
from spec_data.generation.output import LocalOutput
from spec_data.generation.plan import Plan, read_plan_record
from spec_data.generation.probe import other_files
from spec_data.generation.proof import load_target
from spec_data.generation.ray_engine import Replicas, capture_on_ray
from spec_data.generation.setup import (
    Setup,
    announce_drafts,
    changed_settings,
    check_still_planned,
)
from spec_data.generation.status import ProgressFile
from spec_data.generation.units import (
    check_free_space,
    clear_leftovers,
    explained_failures,
    finish_unit,
    finished_unit,
)
from spec_data.generation.workers import Worker, planning_lock, worker_lock
from spec_data.models.devices import check_devices
from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.follow import WORK
from spec_data.shards.passing import Passed, Ring, shard_file
from spec_data.shards.resumable import refuse_changes
from spec_data.shards.schema import Column, Manifest
from spec_data.terminal import NOTICE
from spec_data.terminal.parts import part, parts
from spec_data.terminal.progress import progress, size

logger = logging.getLogger(__name__)


def write_dataset(
    corpus: CorpusReader,
    setup: Setup,
    output: LocalOutput,
    worker: Worker,
    *,
    fleet: Replicas | None = None,
    load: Callable[[Setup, Plan], TargetBackend] | None = None,
) -> Manifest | None:
    """Plan, capture and finalize, or go on where a run was interrupted.

    Without the replicas of --engine ray (`fleet`), this process captures. `load` opens what stands
    for the target. Return the manifest of the finished dataset; None: other workers are not done.
    """
    if (manifest := output.manifest()) is not None:
        given = corpus, setup, output, manifest, worker
        if lost := lost_of_finished(*given):
            if fleet is not None:
                raise ConfigError(
                    f"--engine ray: {output.name} is finished, and has lost files. One process "
                    "brings them back: run the same command without --engine and --replicas\n"
                    f"{listed(lost)}"
                )
            check_devices(setup.options.device, setup.options.spread.device_map)
            capture_again(*given, lost, load or load_target)
        else:
            logger.info("%s is complete already: nothing to do", output.name)
        return manifest
    announce_drafts(setup)
    if fleet is None:
        check_devices(setup.options.device, setup.options.spread.device_map)
    directory = output.directory
    try:
        with ExitStack() as locks, explained_failures(directory):
            # Corpus -> documents -> plan. Made once; other workers, and later runs, read it.
            plan = output.plan(corpus, setup)
            with planning_lock(directory):
                locks.enter_context(worker_lock(directory, str(worker)))
                check_still_planned(directory, plan)
            mine = worker.units(len(plan.units))
            todo = [unit for unit in mine if finished_unit(directory, unit) is None]
            ring = setup.options.ring_bytes
            if todo:
                _check_room(plan, setup.columns, output, todo, other_files(setup, plan), ring)
                clear_leftovers(directory, mine)
                if fleet is None:
                    _capture(plan, setup, load or load_target, output, worker, todo)
                else:
                    capture_on_ray(setup.options, fleet, plan, directory, todo)
        if ring is not None:
            _log_passed_on(directory, plan, mine)
            return None
        # Index, card and manifest, by the worker that is done last.
        return output.finalize(checked=set(todo), others=worker.count > 1)
    except (SpecDataError, FileNotFoundError):
        with suppress(SpecDataError):  # of a storage that does not answer
            if (manifest := output.manifest()) is not None:  # another worker has just finished it
                return manifest
        raise


def _capture(
    plan: Plan,
    setup: Setup,
    load: Callable[[Setup, Plan], TargetBackend],
    output: LocalOutput,
    worker: Worker,
    todo: list[int],
) -> None:
    """Load the target, prove it, and capture the units `todo`; a thread writes the one before."""
    out = output.directory
    progress_file = ProgressFile(out, plan, worker=str(worker), lock=str(worker))
    with progress_file.until_the_end(), ExitStack() as opened:
        # Before the first shard: masks, head, positions, a sample of the corpus, codecs.
        with parts("prove"):
            part("load the target")
            target = opened.enter_context(closing(load(setup, plan)))
            capture = UnitCapture(setup, plan, target, out, output.share_proof)
        columns, ring_bytes = capture.settings.columns, setup.options.ring_bytes
        # perhaps bf16 instead of lossy
        _check_room(plan, columns, output, todo, {}, ring_bytes)
        ring = None
        if ring_bytes is not None:
            ring = RingOfShards(out, plan, columns, ring_bytes)
        left = deque(todo)

        def count(tokens: int) -> None:
            bar.update(tokens)
            progress_file.add(tokens)

        def begun() -> Iterator[int]:
            while left and (ring is None or ring.fits(left[0])):
                progress_file.begin(left[0])
                yield left.popleft()

        def finish(unit: int, captured: CapturedUnit) -> None:
            finish_unit(out, unit, captured, columns)
            output.upload(unit)
            progress_file.finish(unit)

        total = plan.unit_set_tokens(worker.units(len(plan.units)))
        done = total - plan.unit_set_tokens(todo)
        with (
            progress(total=total, initial=done, desc="capture", unit="tok") as bar,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as writer,
        ):
            writing: Future[None] | None = None
            number = 0
            while left:
                if ring is not None:
                    ring.wait(left[0], bar.set_postfix_str)
                for unit, captured in capture.capture(begun(), count):
                    if writing is not None:
                        writing.result()
                    writing = writer.submit(finish, unit, captured)
                    number += 1
                    bar.set_postfix_str(f"shard {number}/{len(todo)}")
                if writing is not None:
                    writing.result()


def _check_room(
    plan: Plan,
    columns: tuple[Column, ...],
    output: LocalOutput,
    todo: list[int],
    other: Mapping[str, int],
    ring: int | None,
) -> None:
    """Check that the shards of the units `todo`, and `other` files, fit on the disk."""
    sizes = sorted((plan.unit_bytes(unit, columns) for unit in todo), reverse=True)
    needed = sum(sizes[: output.units_at_once or None])
    needed = (needed if ring is None else min(needed, ring)) + sum(other.values())
    check_free_space(output.directory, needed, output.remote)


# -- passing on ------------------------------------------------------------------------------------


class RingOfShards:
    """The shards of --pass-on that are on disk at a time, of a few bytes; see `shards.passing`."""

    _POLL = 0.2  # seconds between two looks
    _LEAST = 3  # shards: one is written, one is trained on, one stays for validation

    def __init__(self, out: Path, plan: Plan, columns: tuple[Column, ...], most: int) -> None:
        """Tell the trainer how many bytes there are, and how many each unit may take.

        Raises:
            ConfigError: too few for any trainer.
        """
        columns = tuple(replace(column, error=None) for column in columns)  # not as measured
        sizes = [plan.unit_bytes(unit, columns) for unit in range(len(plan.units))]
        if (least := self._LEAST * max(sizes)) > most:
            raise ConfigError(
                f"--pass-on {most:,}: a shard may have {max(sizes):,} bytes, and {self._LEAST} of "
                f"them must fit. Give {least} or more, or a smaller --max-shard-size in another "
                "--out"
            )
        if (passed := Passed.read(out / WORK)).needed > most:
            raise ConfigError(
                f"--pass-on {most:,}: {passed.run} trains on these shards and needs "
                f"{passed.needed:,} bytes of them at a time; give {passed.needed} or more"
            )
        self._out, self._ring = out, Ring(most=most, units=sizes)
        self._ring.write(out / WORK)

    def fits(self, unit: int) -> bool:
        """Return whether the shards up to a unit fit, those on disk and those still to come."""
        passed, total = Passed.read(self._out / WORK), 0
        kept = [other for other in passed.kept if other < min(unit, passed.freed)]
        for other in (*kept, *range(passed.freed, unit + 1)):
            try:
                total += shard_file(self._out, other).stat().st_size
            except FileNotFoundError:
                total += 0 if passed.gone(other) else self._ring.units[other]
        return total <= self._ring.most

    def wait(self, unit: int, show: Callable[[str], object]) -> None:
        """Wait until a unit fits; `show` gets the reason."""
        reason = f"{size(self._ring.most)} are full: waiting for `spec-train fit --follow`"
        if not self.fits(unit):
            logger.info("%s: unit %d: %s", self._out, unit, reason)
        while not self.fits(unit):
            show(reason)
            time.sleep(self._POLL)


def _log_passed_on(out: Path, plan: Plan, units: list[int]) -> None:
    """Say what became of the documents of `units`: no manifest will."""
    records = [record for unit in units if (record := finished_unit(out, unit)) is not None]
    dropped = Counter(plan.counts.dropped)
    for record in records:
        dropped.update(record.dropped)
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in dropped.items()) or "none"
    logger.log(
        NOTICE,
        "%s: %d shards of %d were proven, written and are passed on; documents left out: %s",
        *(out, len(records), len(plan.units), left_out),
    )


def lost_of_finished(
    corpus: CorpusReader, setup: Setup, output: LocalOutput, manifest: Manifest, worker: Worker
) -> list[Lost]:
    """Return which files of a worker's part of a finished dataset are not what was sealed.

    Raises:
        ConfigError: the dataset was made with other options, or of others; or nothing is lost, but
            other releases made it.
    """
    where = output.name
    if manifest.provenance:
        raise ConfigError(
            f"{where} holds a dataset that `spec-data {manifest.provenance.command}` made of "
            "others; choose another --out"
        )
    changed = changed_settings(corpus, setup, manifest.settings)
    # Whether other releases compute other bytes is seen when something is captured again.
    refuse_changes([line for line in changed if not line.startswith("versions.")], where)
    lost = lost_files(output, manifest, worker)
    if not lost:
        refuse_changes(changed, where)
    return lost


def dry_run(corpus: CorpusReader, setup: Setup, output: LocalOutput, worker: Worker) -> str:
    """Say what `write_dataset` would capture; nothing is changed.

    Raises:
        ConfigError: the output was begun with other settings.
    """
    if (manifest := output.manifest()) is not None:
        lost = lost_of_finished(corpus, setup, output, manifest, worker)
        return f"{output.name}: {what_would_be_done(manifest, lost)}"
    plan = read_plan_record(output.directory / WORK)
    if plan is None:
        return (
            f"{output.name}: nothing is there yet, and the whole corpus would be captured; "
            "`spec-data estimate` says how much that is"
        )
    refuse_changes(changed_settings(corpus, setup, plan.settings), output.name)
    mine = worker.units(len(plan.units))
    todo = [unit for unit in mine if finished_unit(output.directory, unit) is None]
    return f"{output.name}: not finished; {len(todo)} of {len(mine)} shards would be captured"
