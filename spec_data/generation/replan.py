"""Replace a plan with which nothing was captured yet.

A run that fails before its first shard (a wrong target, too many top logits) leaves a plan behind.
That plan must not block the directory for other settings. It is replaced only if no unit is
finished and no worker is running. Two commands may start at the same moment, so the order matters:
this module first renames the plan and then looks for workers; a worker first takes its lock and
then looks for its plan. The second of the two always sees the first.
"""

import shutil
from pathlib import Path

from filelock import FileLock, Timeout

from spec_data.generation.plan import Plan, read_settings
from spec_data.generation.running import ALSO, WITNESS
from spec_data.generation.worker_locks import running_workers
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import RunError

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
