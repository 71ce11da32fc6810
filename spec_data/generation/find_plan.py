"""Find the plan of a directory, or make it: once, however many processes start together.

The process that makes the plan holds OUT/.generate/plan.lock; the others wait for it, and then
read the plan. If the maker is killed, its lock ends with it, and one of the others makes the plan.
"""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from filelock import FileLock, Timeout

from spec_data.generation.plan import Plan, load_plan, read_settings, save_plan
from spec_data.generation.plan_file import PlannedDocuments, remove_scratch
from spec_data.generation.planning import make_plan
from spec_data.generation.running import ALSO, WITNESS
from spec_data.generation.setup import Setup, changed_settings, refuse_changes
from spec_data.generation.worker_locks import running_workers
from spec_data.models.devices import check_devices
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import DatasetError, RunError
from spec_data.shards.follow import WORK
from spec_data.terminal.paths import make_directory

# -- replan ----------------------------------------------------------------------------------------
# Replace a plan with which nothing was captured yet.
#
# A run that fails before its first shard (a wrong target, too many top logits) leaves a plan
# behind. That plan must not block the directory for other settings. It is replaced only if no unit
# is finished and no worker is running. Two commands may start at the same moment, so the order
# matters: this module first renames the plan and then looks for workers; a worker first takes its
# lock and then looks for its plan. The second of the two always sees the first.


_PLAN, _RETIRED = "plan.json", "plan.json.retired"
_MADE_FROM_A_PLAN = ("shards", "target", TABLES)


def discard_unused_plan(work: Path) -> bool:
    """Remove the plan in `work` (OUT/.generate) and everything made from it.

    Return False, and remove nothing, if the plan is in use or another process is removing it. A
    second call after a crash in the middle of the first removes the rest.
    """
    if _in_use(work):
        return False
    try:
        held = FileLock(work / "replan.lock").acquire(blocking=False)
    except Timeout:
        return False
    with held:
        return _discard(work)


def _discard(work: Path) -> bool:
    """Do the work of `discard_unused_plan` while its lock is held."""
    if (work / _PLAN).is_file():
        (work / _PLAN).rename(work / _RETIRED)
        if _in_use(work):
            (work / _RETIRED).rename(work / _PLAN)
            return False
    if not (work / _RETIRED).is_file():
        return False
    for name in _MADE_FROM_A_PLAN:
        _remove(work.parent / name)
    for file in (work / WITNESS, *work.glob(ALSO)):
        _remove(file)
    for name in ("target.json", "plan.arrow", _RETIRED):  # _RETIRED last: its absence means done
        _remove(work / name)
    return True


def half_discarded(work: Path) -> bool:
    """Return whether a process died while it was removing a plan."""
    return (work / _RETIRED).is_file() and not (work / _PLAN).is_file()


def check_still_planned(work: Path, plan: Plan) -> None:
    """Check that `plan` is still the saved one; the caller holds its worker lock.

    Raises:
        RunError: another command has replaced the plan since this worker read it.
    """
    if read_settings(work) != plan.settings:
        raise RunError(
            f"{work.parent}: another command is making a plan with other settings in this "
            "directory; run this command again, or choose another --out"
        )


def _in_use(work: Path) -> bool:
    """Return whether a unit is finished or a worker is running."""
    return any(work.glob("unit-*.json")) or bool(running_workers(work))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# -- find plan -------------------------------------------------------------------------------------


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
