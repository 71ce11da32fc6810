"""`spec-data generate`, from the corpus to the sealed dataset.

out/.generate/plan.{json,arrow}     the plan: every document, cut into units
out/.generate/target.json           what was proven about the target
out/codec.safetensors               tables of lossy codecs, made once, before the first shard
out/shards/unit-00000.arrow         a shard, and its record out/.generate/unit-00000.json
out/manifest.json                   written last: it makes the directory a dataset
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

from spec_data.capture.backend import TargetBackend
from spec_data.corpus.record_reader import CorpusReader
from spec_data.generation.capture import CapturedUnit, capture_units
from spec_data.generation.output import LocalOutput
from spec_data.generation.plan import Plan
from spec_data.generation.probe import other_files
from spec_data.generation.proof import load_target, prepare_capture
from spec_data.generation.ray_engine import Replicas, capture_on_ray
from spec_data.generation.setup import (
    Setup,
    announce_drafts,
    changed_settings,
    check_still_planned,
    refuse_changes,
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
from spec_data.shards.reader import check_whole
from spec_data.shards.schema import Column, Manifest
from spec_data.terminal.progress import progress

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
        return _complete_already(corpus, setup, manifest, output.name)
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
            if todo:
                _check_room(plan, setup.columns, output, todo, other_files(setup, plan))
                clear_leftovers(directory, mine)
                if fleet is None:
                    _capture(plan, setup, load or load_target, output, worker, todo)
                else:
                    capture_on_ray(setup.options, fleet, plan, directory, todo)
        # Index, card and manifest, by the worker that is done last.
        return output.finalize(checked=set(todo), others=worker.count > 1)
    except (SpecDataError, FileNotFoundError):
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
    with progress_file.until_the_end(), closing(load(setup, plan)) as target:
        # Before the first shard: masks, head, positions, a sample of the corpus, codecs.
        settings = prepare_capture(setup, plan, target, out, output.share_proof)
        _check_room(plan, settings.columns, output, todo, {})  # perhaps bf16 instead of lossy

        def count(tokens: int) -> None:
            bar.update(tokens)
            progress_file.add(tokens)

        def begun() -> Iterator[int]:
            for unit in todo:
                progress_file.begin(unit)
                yield unit

        def finish(unit: int, captured: CapturedUnit) -> None:
            finish_unit(out, unit, captured, settings.columns)
            output.upload(unit)
            progress_file.finish(unit)

        total = plan.unit_set_tokens(worker.units(len(plan.units)))
        done = total - plan.unit_set_tokens(todo)
        with (
            progress(total=total, initial=done, desc="capture", unit="tok") as bar,
            ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as writer,
        ):
            writing: Future[None] | None = None
            units = capture_units(target, plan, begun(), settings, count)
            for number, (unit, captured) in enumerate(units, 1):
                if writing is not None:
                    writing.result()
                writing = writer.submit(finish, unit, captured)
                bar.set_postfix_str(f"shard {number}/{len(todo)}")
            if writing is not None:
                writing.result()


def _check_room(
    plan: Plan,
    columns: tuple[Column, ...],
    output: LocalOutput,
    todo: list[int],
    other: Mapping[str, int],
) -> None:
    """Check that the shards of the units `todo`, and `other` files, fit on the disk."""
    sizes = sorted((plan.unit_bytes(unit, columns) for unit in todo), reverse=True)
    needed = sum(sizes[: output.units_at_once or None]) + sum(other.values())
    check_free_space(output.directory, needed, output.remote)


def _complete_already(
    corpus: CorpusReader, setup: Setup, manifest: Manifest, where: str
) -> Manifest:
    """Return the manifest of a finished dataset if these options made it and it is intact."""
    if manifest.provenance:
        raise ConfigError(
            f"{where} holds a dataset that `spec-data {manifest.provenance.command}` made of "
            "others; choose another --out"
        )
    refuse_changes(changed_settings(corpus, setup, manifest.settings), where)
    check_whole(where)
    logger.info("%s is complete already: nothing to do", where)
    return manifest
