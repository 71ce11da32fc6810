"""`spec-data generate`: make the plan, capture its units, seal the directory.

    out/.generate/plan.{json,arrow}     the plan, written once
    out/.generate/target.json           what was proven about the target (mask form, head), and the
                                        measured error and the hash of the codec tables
    out/codec.safetensors               tables of lossy codecs, made once, before the first shard
    out/.generate/unit-00000.json       a finished unit: size and checksum of its shard
    out/.generate/workers/*.json        what each process does, for `spec-data status`
    out/shards/unit-00000.arrow         the shard

A unit is finished when its json exists. The json is written after the shard, both atomically.
Sealing removes .generate. No file that stays holds a time or the name of a machine, so the finished
directory has the same bytes even if the run was interrupted, or resumed on another machine.
"""

import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from spec_data.capture.tensor_parallel import leading
from spec_data.generation.capture import CapturedUnit
from spec_data.generation.explained_failures import explained_failures
from spec_data.generation.fitting import announce_drafts
from spec_data.generation.plan import Plan, check_still_planned, read_plan_record
from spec_data.generation.ray_engine import capture_on_ray, connected
from spec_data.generation.remote_out import STAGED_UNITS, RemoteOut, staged
from spec_data.generation.replica import Replica
from spec_data.generation.sealing import SHARDS, finished_unit, seal_directory, seal_if_last
from spec_data.generation.setup import (
    Setup,
    changed_settings,
    find_or_make_plan,
    refuse_changes,
    set_up,
)
from spec_data.generation.status import FactsWriter
from spec_data.generation.target_files import other_files
from spec_data.generation.worker_locks import worker_lock
from spec_data.generation.worker_place import placed
from spec_data.options.generate_options import GenerateConfig
from spec_data.shards.errors import ConfigError, RunError, SpecDataError
from spec_data.shards.files import CACHE_VARIABLE, remove_left_of, unit_name
from spec_data.shards.follow import WORK
from spec_data.shards.reader import MANIFEST, check_whole
from spec_data.shards.reclaim import units_to_keep, wait_for_room
from spec_data.shards.schema import Manifest
from spec_data.shards.urls import scheme_of
from spec_data.terminal.progress import progress, size

logger = logging.getLogger(__name__)


def generate(config: GenerateConfig) -> Manifest | None:
    """Generate a dataset, or resume a run that was interrupted.

    Return the manifest of the sealed dataset. Return None if the directory is not sealed: if other
    workers are not done, or if units are deleted after use (`--follow-keep`).

    Raises:
        ConfigError: the directory holds data made with other settings.
        MissingError, DatasetError: the dataset was finished before, and is damaged now.
        CorpusError, TargetError, MissingError: bad input.
        RunError: a failed proof, broken states, not enough disk space, or another process that
            captures some of the same units.
    """
    if config.engine == "ray":
        if scheme_of(config.out):
            raise ConfigError(
                f"--engine ray --out {config.out}: replicas share a directory; give a local --out, "
                "or start workers with --workers i/n"
            )
        with connected(config) as found:
            return _run_or_resume(found)
    with leading(config.spread):
        return _run_or_resume(placed(config))


def _run_or_resume(config: GenerateConfig) -> Manifest | None:
    """Generate or resume in this process; see `generate`."""
    if scheme_of(config.out):
        with staged(config.out, config.workers) as remote:
            return _run_or_resume_remote(replace(config, out=str(remote.directory)), remote)
    return capture_into(set_up(config), Path(config.out))


def capture_into(setup: Setup, out: Path) -> Manifest | None:
    """Generate or resume in a local directory; see `generate`."""
    if (out / MANIFEST).is_file():
        return _complete_already(setup, out, check=True)
    announce_drafts(setup, captures=setup.stored is None)
    try:
        return _generate(setup, out)
    except (SpecDataError, FileNotFoundError):
        if (out / MANIFEST).is_file():  # another worker has just sealed the directory
            return _complete_already(setup, out)  # its shards may be late here: not checked
        raise


def _run_or_resume_remote(config: GenerateConfig, remote: RemoteOut) -> Manifest | None:
    """Generate or resume on remote storage, through the stage that is the --out of `config`."""
    manifest = remote.complete()
    if manifest is None:
        remote.pull()
    setup = set_up(config)
    if manifest is not None:
        return _unchanged(setup, manifest, remote.url, check=True)
    _refuse_other_plan(setup, remote)
    announce_drafts(setup)
    try:
        return _generate(setup, remote.directory, remote)
    except (SpecDataError, FileNotFoundError):
        if found := remote.complete():  # another worker has just sealed the dataset
            return found
        raise


def _refuse_other_plan(setup: Setup, remote: RemoteOut) -> None:
    """Refuse the settings of a setup if the plan on the storage was made with others."""
    saved = read_plan_record(remote.directory / WORK)
    if saved is not None:
        refuse_changes(changed_settings(setup, saved.settings), remote.url)


def _find_shared_plan(setup: Setup, out: Path, remote: RemoteOut) -> Plan:
    """Load the plan of the storage; make and publish it if there is none."""
    begun = (out / WORK / "plan.json").is_file()
    plan = find_or_make_plan(setup, out)
    if begun or remote.publish_plan():
        return plan
    _refuse_other_plan(setup, remote)
    remote.pull_records()
    return find_or_make_plan(setup, out)


def _complete_already(setup: Setup, out: Path, check: bool = False) -> Manifest:
    """Return the manifest of a dataset that is sealed already and was made with these options."""
    manifest = _unchanged(setup, Manifest.read(out / MANIFEST), str(out), check)
    shutil.rmtree(out / WORK, ignore_errors=True)  # left if killed after the manifest
    return manifest


def _unchanged(setup: Setup, manifest: Manifest, where: str, check: bool) -> Manifest:
    """Return the manifest of a sealed dataset if these options made it.

    `check` also compares its shards with the manifest (see `shards.whole`).
    """
    if manifest.provenance:
        raise ConfigError(
            f"{where} holds a dataset that `spec-data {manifest.provenance.command}` made of "
            "others; choose another --out"
        )
    refuse_changes(changed_settings(setup, manifest.settings), where)
    if check:
        check_whole(where)
    logger.info("%s is complete already: nothing to do", where)
    return manifest


def _generate(setup: Setup, out: Path, remote: RemoteOut | None = None) -> Manifest | None:
    """Do the work of `generate` in a directory that was not sealed a moment ago.

    With `remote`, the directory is its stage.
    """
    config = setup.config
    plan = _find_shared_plan(setup, out, remote) if remote else find_or_make_plan(setup, out)
    index, workers = config.worker
    mine = list(range(index, len(plan.units), workers))
    todo = [u for u in mine if finished_unit(out, u) is None]
    sizes = [plan.unit_bytes(u, setup.columns) for u in todo]
    ring = STAGED_UNITS if remote else units_to_keep(out)
    needed = sum(sorted(sizes, reverse=True)[:ring] if ring else sizes)
    needed += sum(other_files(setup, plan).values()) if todo else 0
    check_free_space(out, needed, remote is not None)
    if todo:
        with (
            worker_lock(out, config.workers, len(plan.units)),
            explained_failures(out),
        ):
            check_still_planned(out / WORK, plan)
            clear_leftovers(out, mine)
            if config.engine == "ray":
                capture_on_ray(setup, plan, out, todo)
            else:
                run_units(setup, plan, out, mine, todo, remote=remote)
    if remote:
        return remote.seal()
    if units_to_keep(out):
        logger.info(
            "%s: every unit of worker %d/%d was captured; `spec-train fit --follow-keep` deletes "
            "them after use",
            *(out, index, workers),
        )
        return None
    if workers > 1:
        return seal_if_last(out, checked=set(todo))
    return seal_directory(out, checked=set(todo))


def check_free_space(out: Path, needed: int, stage: bool = False) -> None:
    """Check that `needed` bytes fit on the disk of `out`, or of the `stage` of a remote folder.

    Raises:
        RunError: they do not.
    """
    free = shutil.disk_usage(out).free
    if needed > free and stage:
        raise RunError(
            f"{out}: {needed:,} bytes are needed for the units on their way to the storage, but "
            f"only {free:,} are free. Set {CACHE_VARIABLE} to a folder on another disk, or lower "
            "--max-shard-size in a new --out"
        )
    if needed > free:
        raise RunError(
            f"{out}: {needed:,} bytes are still to be written, but only {free:,} are free. Free "
            "some space, or use fewer --layers, a --limit or a smaller --max-length. Or start "
            f"`spec-train fit --data {out} --follow --follow-keep N` and run this command again: "
            "each unit is then deleted after training has used it"
        )


def run_units(
    setup: Setup,
    plan: Plan,
    out: Path,
    mine: list[int],
    todo: list[int],
    remote: RemoteOut | None = None,
) -> None:
    """Load the target, prove it, and capture the units `todo`; writing overlaps capture.

    `mine` are all units of this worker, `todo` those that are not finished. With `remote`, each
    unit is uploaded, and its space in `out` is freed.
    """
    total, left = plan.unit_set_tokens(mine), plan.unit_set_tokens(todo)
    facts = FactsWriter(out, plan, setup.config.workers, setup.config.workers)
    share = None if remote is None else remote.publish_proof
    pending: Future | None = None
    written = 0

    def finish(unit: int, captured: CapturedUnit) -> int:
        size_on_disk = replica.finish(unit, captured)
        if remote is not None:
            remote.finish(unit)
        facts.finish(unit, size_on_disk)
        return size_on_disk

    def count(tokens: int) -> None:
        bar.update(tokens)
        facts.add(tokens)

    with (
        facts.until_the_end(),
        closing(Replica(setup, plan, out, share)) as replica,
        progress(total=total, initial=total - left, desc="capture", unit="tok") as bar,
        ThreadPoolExecutor(max_workers=1, thread_name_prefix="writer") as writer,
    ):
        for number, unit in enumerate(todo, 1):
            wait_for_room(out, unit)
            facts.begin(unit)
            captured = replica.capture(unit, count)
            if pending is not None:
                written += pending.result()
            pending = writer.submit(finish, unit, captured)
            bar.set_postfix_str(f"shard {number}/{len(todo)}, {size(written)}")
        if pending is not None:
            written += pending.result()
            bar.set_postfix_str(f"shard {len(todo)}/{len(todo)}, {size(written)}")


def clear_leftovers(out: Path, units: Iterable[int]) -> None:
    """Make the folder of shards, and delete what killed processes left of `units` in it."""
    (out / SHARDS).mkdir(exist_ok=True)
    for unit in units:
        remove_left_of(out / SHARDS / f"{unit_name(unit)}.arrow")
