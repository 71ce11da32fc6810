"""`spec-data generate`: run a target over a corpus once and store what its drafts learn from.

out/.generate/plan.{json,arrow}     the plan: every document, cut into units
out/.generate/target.json           what was proven about the target
out/codec.safetensors               tables of lossy codecs, made once, before the first shard
out/shards/unit-00000.arrow         a shard, and its record out/.generate/unit-00000.json
out/manifest.json                   written last: it makes the directory a dataset
"""

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from spec_data.generation.options import WORKERS, CaptureOptions
from spec_data.terminal.command import command
from spec_data.terminal.types import Corpus, Count, NewDataset, Target, path_list

if TYPE_CHECKING:
    from collections.abc import Callable

    from spec_data.generation.capture import CapturedUnit
    from spec_data.generation.output import LocalOutput
    from spec_data.generation.plan import Plan
    from spec_data.generation.ray_engine import Replicas
    from spec_data.generation.setup import Setup
    from spec_data.generation.workers import Worker
    from spec_data.results import WrittenDataset
    from spec_data.shards.schema import Column, Manifest

logger = logging.getLogger(__name__)


@command
def generate(
    target: Target,
    corpus: Corpus,
    out: NewDataset,
    options: CaptureOptions = CaptureOptions(),
    *,
    workers: str = "0/1",
    engine: Annotated[Literal["local", "ray"], WORKERS] = "local",
    replicas: Annotated[Count, WORKERS] = 0,
) -> "WrittenDataset":
    """Run a target over a corpus and write a dataset; called again, resume it.

    Stop it whenever you like: Ctrl-C, SIGTERM and a closed terminal lose at most the shard in work,
    and the same command resumes. A resumed run writes the same bytes as an uninterrupted one.

    Examples:
        spec-data generate --target Qwen/Qwen3-8B --corpus chats.jsonl --out data/qwen3-8b
        srun spec-data generate --target MODEL --corpus chats.jsonl --out DIR --workers auto
        spec-data generate --config generate.yaml --limit 100

    Args:
        target: the target model: a local directory or a Hugging Face Hub id.
        corpus: the conversations: a JSONL, JSON, CSV, Parquet or text file, a directory of them, a
            directory saved by `datasets`, or a Hub dataset (NAME, NAME:CONFIG, NAME@SPLIT); several
            are read in the order given.
        out: the dataset to write: a directory, or a URL such as s3://bucket/data (docs/remote.md).
        options: what is captured, and how.
        workers: I/N makes this process worker I of N, counted from 0. Run all N, on one machine or
            on several that share the directory; the one that finishes last seals it. auto reads I
            and N from torchrun, SLURM or a Kubernetes Job, and auto/N where they name no N.
        engine: what starts the workers: local is you, or a launcher that --workers auto knows; ray
            starts --replicas of the target on the Ray cluster of RAY_ADDRESS, or on this machine.
        replicas: with --engine ray: copies of the target that work side by side; 0 takes one per
            free GPU, or one per machine without GPUs or with --device-map, which spreads each copy
            over its share of the GPUs.

    Returns:
        What was written, with the documents that were dropped by reason. `sealed` is False where
        other workers are not done. A label `on_policy` that all of the data contradict is no error:
        `policy` is "off-policy".

    Raises:
        ConfigError: a bad value, or a directory that holds data made with other settings.
        CorpusError, TargetError, MissingError: bad input.
        RunError: a failed proof, states that are not finite, or not enough disk.

    >>> options = spec_data.CaptureOptions(layers=[0, 2, 4], codec="bf16", limit=5)
    >>> made = spec_data.generate("target", "chats.jsonl", "data-2", options)
    >>> made.sealed, made.documents, made.layers
    (True, 5, (0, 2, 4))
    >>> made.dropped
    {}
    """
    from spec_data.capture.tensor_parallel import leading
    from spec_data.generation.output import open_output
    from spec_data.generation.ray_engine import connected
    from spec_data.generation.setup import check_outside_corpus, set_up
    from spec_data.generation.workers import Worker, this_worker
    from spec_data.results import WrittenDataset

    options.check()
    check_outside_corpus(str(out), path_list(corpus))
    check_engine(engine, workers, replicas, str(out), options.tp_plan is not None)
    prepare = partial(set_up, str(target), path_list(corpus))
    if engine == "ray":
        driver = Worker(device=options.device)
        with connected(replicas, options) as fleet, open_output(str(out), str(driver)) as output:
            on_replica = partial(prepare, replace(options, device=fleet.device))
            manifest = generate_into(on_replica, output, driver, fleet)
    else:
        with leading(options.spread):  # of the processes of --tp-plan, only the first comes here
            one_device = options.spread.is_one_device
            worker = this_worker(workers, options.device, one_device=one_device)
            with open_output(str(out), str(worker)) as output:
                here = partial(prepare, replace(options, device=worker.device))
                manifest = generate_into(here, output, worker)
    return WrittenDataset.of(str(out), manifest, str(target))


def generate_into(
    prepare: "Callable[[], Setup]",
    output: "LocalOutput",
    worker: "Worker",
    fleet: "Replicas | None" = None,
) -> "Manifest | None":
    """Plan, capture and finalize, or go on where a run was interrupted.

    Args:
        prepare: finds target and tokenizer on this machine.
        output: the directory, or the stage of a URL.
        worker: which units this process captures.
        fleet: the replicas of --engine ray; None captures in this process.

    Returns:
        The manifest of the finished dataset. None if it is not finished: other workers are not
        done.
    """
    from spec_data.generation.ray_engine import capture_on_ray
    from spec_data.generation.setup import announce_drafts, check_still_planned
    from spec_data.generation.target_files import other_files
    from spec_data.generation.units import (
        clear_leftovers,
        explained_failures,
        finished_unit,
    )
    from spec_data.generation.workers import planning_lock, worker_lock
    from spec_data.models.devices import check_devices
    from spec_data.shards.errors import SpecDataError

    # The target: its config, its tokenizer, what identifies it. No weights yet.
    setup = prepare()
    if (manifest := output.manifest()) is not None:
        return _complete_already(setup, manifest, output.name)
    announce_drafts(setup)
    if fleet is None:
        check_devices(setup.options.device, setup.options.spread.device_map)
    directory = output.directory
    try:
        with ExitStack() as locks, explained_failures(directory):
            # Corpus -> documents -> plan. Made once; other workers, and later runs, read it.
            plan = output.plan(setup)
            with planning_lock(directory):
                locks.enter_context(worker_lock(directory, str(worker)))
                check_still_planned(directory, plan)
            mine = worker.units(len(plan.units))
            todo = [unit for unit in mine if finished_unit(directory, unit) is None]
            if todo:
                _check_room(plan, setup.columns, output, todo, other_files(setup, plan))
                clear_leftovers(directory, mine)
                if fleet is None:
                    _capture(setup, plan, output, worker, todo)
                else:
                    capture_on_ray(prepare, fleet, plan, directory, todo)
        # Index, card and manifest, by the worker that is done last.
        return output.finalize(checked=set(todo), others=worker.count > 1)
    except (SpecDataError, FileNotFoundError):
        if (manifest := output.manifest()) is not None:  # another worker has just finished it
            return manifest
        raise


def _check_room(
    plan: "Plan",
    columns: "tuple[Column, ...]",
    output: "LocalOutput",
    todo: list[int],
    other: Mapping[str, int] = MappingProxyType({}),
) -> None:
    """Check that the units `todo`, and `other` files, fit on the disk.

    Raises:
        RunError: they do not.
    """
    from spec_data.generation.units import check_free_space

    sizes = sorted((plan.unit_bytes(unit, columns) for unit in todo), reverse=True)
    needed = sum(sizes[: output.units_at_once or None]) + sum(other.values())
    check_free_space(output.directory, needed, output.remote)


def _capture(
    setup: "Setup", plan: "Plan", output: "LocalOutput", worker: "Worker", todo: list[int]
) -> None:
    """Load the target, prove it, and capture the units `todo`; a thread writes the one before."""
    from spec_data.generation.capture import capture_unit
    from spec_data.generation.proof import load_target, prepare_capture
    from spec_data.generation.status import ProgressFile
    from spec_data.generation.units import finish_unit
    from spec_data.terminal.progress import progress

    out = output.directory
    progress_file = ProgressFile(out, plan, worker=str(worker), lock=str(worker))
    with progress_file.until_the_end(), closing(load_target(setup, plan)) as target:
        # Before the first shard: masks, head, positions, a sample of the corpus, codecs.
        settings = prepare_capture(setup, plan, target, out, output.share_proof)
        _check_room(plan, settings.columns, output, todo)  # perhaps bf16 instead of a lossy codec

        def count(tokens: int) -> None:
            bar.update(tokens)
            progress_file.add(tokens)

        def finish(unit: int, captured: "CapturedUnit") -> None:
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
            for number, unit in enumerate(todo, 1):
                progress_file.begin(unit)
                captured = capture_unit(target, plan, unit, settings, count)
                if writing is not None:
                    writing.result()
                writing = writer.submit(finish, unit, captured)
                bar.set_postfix_str(f"shard {number}/{len(todo)}")
            if writing is not None:
                writing.result()


def _complete_already(setup: "Setup", manifest: "Manifest", where: str) -> "Manifest":
    """Return the manifest of a finished dataset if these options made it and it is intact.

    Raises:
        ConfigError: other options made it. MissingError, DatasetError: it is damaged.
    """
    from spec_data.generation.setup import changed_settings, refuse_changes
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.reader import check_whole

    if manifest.provenance:
        raise ConfigError(
            f"{where} holds a dataset that `spec-data {manifest.provenance.command}` made of "
            "others; choose another --out"
        )
    refuse_changes(changed_settings(setup, manifest.settings), where)
    check_whole(where)
    logger.info("%s is complete already: nothing to do", where)
    return manifest


def check_engine(engine: str, workers: str, replicas: int, out: str, tp_plan: bool) -> None:
    """Refuse --engine beside options that contradict it.

    Raises:
        ConfigError: see above.
    """
    from spec_data.shards.errors import ConfigError
    from spec_data.shards.storage import scheme_of

    if engine != "ray" and replicas:
        raise ConfigError("--replicas goes with --engine ray; add it")
    if tp_plan and workers.startswith("auto"):
        raise ConfigError(
            "--tp-plan: the processes of torchrun are one worker; give --workers I/N if there are "
            "others"
        )
    if engine != "ray":
        return
    if workers != "0/1":
        raise ConfigError(
            f"--workers {workers} with --engine ray: Ray shares out the units; give --replicas N "
            "instead"
        )
    if tp_plan:
        raise ConfigError("--tp-plan needs torchrun; with --engine ray give --device-map auto")
    if scheme_of(out):
        raise ConfigError(
            f"--engine ray --out {out}: replicas share a directory; give a local --out, or start "
            "workers with --workers i/n"
        )


def kept_units(given: Mapping[str, Any]) -> str:
    """Say how much of an interrupted run is kept; `given` are its arguments."""
    if "spec_data.generation.plan" not in sys.modules:
        return "nothing was captured yet"
    from spec_data.pages.report import kept_text

    return kept_text(given["out"])
