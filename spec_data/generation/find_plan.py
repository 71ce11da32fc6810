"""Find the plan of a directory, or make it: once, however many processes start together.

The process that makes the plan holds OUT/.generate/plan.lock; the others wait for it, and then
read the plan. If the maker is killed, its lock ends with it, and one of the others makes the plan.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from spec_data.devices import check_devices
from spec_data.generation.plan import Plan, load_plan, read_settings, save_plan
from spec_data.generation.plan_file import PlannedDocuments, remove_scratch
from spec_data.generation.planning import make_plan
from spec_data.generation.replan import discard_unused_plan, half_discarded
from spec_data.generation.setup import Setup, changed_settings, refuse_changes
from spec_data.paths import make_directory
from spec_data.shards.errors import DatasetError
from spec_data.shards.follow import WORK

logger = logging.getLogger(__name__)

_LOCK = "plan.lock"


def find_plan(setup: Setup, out: Path) -> Plan:
    """Load the plan of `out`, or make and save it, or wait for the process that makes it.

    A plan with other settings is replaced if nothing was captured with it.

    Raises:
        ConfigError: `out` holds data made with other settings, or --device is not usable here.
        CorpusError: as `make_plan`; a new `out` is removed again.
        DatasetError: `out` holds other files, or a damaged plan.
    """
    # before the corpus is read, which may take long
    if setup.config.engine != "ray":  # its driver needs no GPU
        check_devices(setup.config.device, setup.config.spread.device_map)
    work = out / WORK
    half = half_discarded(work)
    saved = None if half else read_settings(work)
    if saved is not None and not changed_settings(setup, saved):
        return load_plan(work)
    if saved is None and not half:
        _refuse_other_files(out)
    with _lock(out):
        return _plan_of(setup, out)


def _plan_of(setup: Setup, out: Path) -> Plan:
    """Do the work of `find_plan` while its lock is held."""
    work = out / WORK
    if half_discarded(work):
        discard_unused_plan(work)
    saved = read_settings(work)
    if saved is not None:
        changed = changed_settings(setup, saved)
        if not changed or not discard_unused_plan(work):
            refuse_changes(changed, out)
            return load_plan(work)
        logger.warning(
            "the settings changed, so the plan is made again (nothing was captured yet):\n  %s",
            "\n  ".join(changed),
        )
    _refuse_other_files(out)
    remove_scratch(work)  # of killed processes
    plan = make_plan(setup, work)
    save_plan(work, plan)
    saved_documents = PlannedDocuments(work / "plan.arrow", plan.documents.sha256)
    return replace(plan, documents=saved_documents)


def _refuse_other_files(out: Path) -> None:
    if out.exists() and any(p.name != WORK for p in out.iterdir()):
        raise DatasetError(
            f"{out} is not empty and not a directory of spec-data; choose another --out (nothing "
            "was changed)"
        )


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the lock of the plan; on an error, remove the directories that were made for it."""
    work = out / WORK
    new = [path for path in (work, out) if not path.exists()]
    lock = FileLock(work / _LOCK)
    told = False
    while True:
        make_directory("--out", work)
        try:
            lock.acquire(timeout=60.0 if told else 0)
            break
        except Timeout:
            if not told:
                logger.info("%s: another process is making the plan; waiting for it", out)
            told = True
        except FileNotFoundError:
            pass  # the process before failed, and removed the directory
    try:
        make_directory("--out", work)  # the process before may have removed it
        yield
    except BaseException:
        if new:
            (work / _LOCK).unlink(missing_ok=True)
        for path in new:
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise
    finally:
        lock.release()
