"""When a plan may make way for another one: while nothing was captured with it.

A run that failed before its first shard (a wrong target, too many top logits) left a plan behind;
it should not keep the directory from other settings. It is replaced only if no unit is finished and
no worker is at work, also when commands start at the same moment: the plan is taken away first and
workers are looked for then, while a worker takes its lock first and looks for its plan then.
Whichever comes second sees the other.
"""

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spec_data.generation.plan import Plan, read_settings
from spec_data.shards.codec_tables import TABLES
from spec_data.shards.errors import RunError

_PLAN, _RETIRED = "plan.json", "plan.json.retired"
_MADE_FROM_A_PLAN = ("shards", "target", TABLES)


def discard_unused_plan(work: Path) -> bool:
    """Remove the plan in `work` (OUT/.generate) and all made from it; False if it is in use.

    Called again after a crash in the middle of it, it removes the rest.
    """
    if _in_use(work):
        return False
    with _locked(work / "replan.lock") as alone:
        if not alone:
            return False
        if (work / _PLAN).is_file():
            (work / _PLAN).rename(work / _RETIRED)
            if _in_use(work):
                (work / _RETIRED).rename(work / _PLAN)
                return False
        if not (work / _RETIRED).is_file():
            return False
        for name in _MADE_FROM_A_PLAN:
            _remove(work.parent / name)
        for name in ("target.json", "plan.arrow", _RETIRED):  # the last one says it is done
            _remove(work / name)
    return True


def half_discarded(work: Path) -> bool:
    """Whether a plan was being removed when its process died."""
    return (work / _RETIRED).is_file() and not (work / _PLAN).is_file()


def check_still_planned(work: Path, plan: Plan) -> None:
    """To be called by a worker that holds its lock.

    Raises:
        RunError: another command has replaced the plan since this worker read it.
    """
    if read_settings(work) != plan.settings:
        raise RunError(
            f"{work.parent}: another command is making a plan with other settings there; run this "
            "one again, or give another --out"
        )


def _in_use(work: Path) -> bool:
    return any(work.glob("unit-*.json")) or any(
        not _free(file) for file in sorted(work.glob("worker-*.lock"))
    )


def _free(file: Path) -> bool:
    with _locked(file) as free:
        return free


@contextmanager
def _locked(file: Path) -> Iterator[bool]:
    """Try to hold a lock file; gives whether that worked."""
    with file.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield False
        else:
            yield True


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
