"""The way from a target to an export on file systems as people have them, on `odd_disk`.

NFS without lockd, FUSE, SMB and exFAT lack locks, links, modes, fsync of folders, or the exchange
of two names. A run that is killed there goes on, and its links, or the files in their place, mean
the same to all commands.
"""

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from spec_train.training.run_directory import chosen_draft_dir, step_of
from tests.faults.odd_disk import Commands, Disk
from tests.spec_data.runs import save_target, write_corpus

FILE_SYSTEMS = {
    "NFS without lockd": {
        **{"flock": errno.ENOLCK, "record_lock": errno.ENOLCK, "exchange": errno.EINVAL},
    },
    "NFS without locks": {
        **{"flock": errno.EOPNOTSUPP, "record_lock": errno.EOPNOTSUPP, "exchange": errno.EINVAL},
    },
    "FUSE": {
        **{"flock": errno.ENOSYS, "record_lock": errno.ENOSYS, "folder_sync": errno.EINVAL},
        **{"hardlink": errno.ENOSYS, "chmod": errno.ENOSYS, "exchange": errno.EINVAL},
    },
    "SMB": {
        **{"flock": errno.ENOLCK, "record_lock": errno.ENOLCK, "folder_sync": errno.EBADF},
        **{"symlink": errno.EOPNOTSUPP, "hardlink": errno.EOPNOTSUPP, "chmod": errno.EPERM},
        **{"exchange": errno.EINVAL},
    },
    "exFAT": {
        **{"symlink": errno.EPERM, "hardlink": errno.EPERM, "chmod": errno.EPERM},
        **{"folder_sync": errno.EINVAL},
    },
}
SHORT = ("SMB",)
"""Lacks the most; the others with -m long."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    save_target(folder / "target")
    write_corpus(folder / "chats.jsonl", 12)
    return folder


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    commands = Commands(tmp_path_factory.mktemp("commands"))
    yield commands
    commands.close()


@pytest.mark.parametrize(
    "name",
    [
        name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
        for name in FILE_SYSTEMS
    ],
)
def test_the_whole_way(commands: Commands, place: Path, tmp_path: Path, name: str) -> None:
    capture = f"--target {place}/target --corpus {place}/chats.jsonl --device cpu"
    shape = "--batch-size 1 --accumulation 1 --seq-len 48 --device cpu --validation 0.15"
    shape += " --eval-every 1 --save-every 1 --steps 3"
    fit = f"spec-train fit eagle3 --data {tmp_path}/data --out {tmp_path}/run {shape}"
    fit += " --draft-vocab-size 40"
    data = f"spec-data generate {capture} --layers 0,2,3 --max-shard-size 60KB"
    data += f" --out {tmp_path}/data"

    def run(words: str, **fault: int | str) -> int:
        disk = Disk(tmp_path, quirks=FILE_SYSTEMS[name], **fault)  # type: ignore[arg-type]
        ended = commands.run(words.split(), disk)
        assert "[Errno" not in ended.said and "Traceback" not in ended.said, ended.said
        assert ended.code == (-9 if fault else 0), f"{words}\n{ended.said}"
        return ended.calls

    run(data, kind="kill", at=60)
    run(data)
    run(f"spec-data verify {tmp_path}/data")
    run(f"spec-data regenerate {capture} --limit 3 --max-new-tokens 4 --out {tmp_path}/own.jsonl")
    run(f"spec-data select {tmp_path}/data {tmp_path}/view --where length>3")
    run(f"spec-data copy {tmp_path}/data {tmp_path}/copy")
    run(fit, kind="kill", at=300)
    run(fit)
    best = chosen_draft_dir(tmp_path / "run")
    assert step_of(best) in (1, 2, 3) and best.resolve().name.startswith("best-")
    assert step_of(chosen_draft_dir(tmp_path / "run" / "last")) == 3
    links = [(tmp_path / "run" / link).is_symlink() for link in ("best", "last")]
    assert links == 2 * ["symlink" not in FILE_SYSTEMS[name]]
    for draft in ("run", "run/last"):
        run(f"spec-train eval --draft {tmp_path}/{draft} --data {tmp_path}/data --device cpu")
    run(f"spec-train report {tmp_path}/run --out {tmp_path}/run.html")
    run(f"spec-train export --draft {tmp_path}/run --format vllm --out {tmp_path}/export")
    more = f"spec-train fit eagle3 --data {tmp_path}/data --out {tmp_path}/more {shape}"
    run(f"{more} --init-from {tmp_path}/run/best")
    assert not list(tmp_path.rglob(".*.tmp"))


@pytest.mark.parametrize("held", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_kill_at_any_call_of_a_lock_leaves_none(
    commands: Commands, tmp_path: Path, held: bool
) -> None:
    """Also where it is being taken from a process that died: there it would be lost for ever."""
    for at in range(99):
        folder = tmp_path / str(at)
        folder.mkdir()
        words = ["lock", f"{folder}/lock", "0"]
        nfs = {"quirks": FILE_SYSTEMS["NFS without locks"]}
        if held:
            assert commands.run([*words, "die"], Disk(folder, **nfs)).code == -9
        killed = commands.run(words, Disk(folder, "kill", at, **nfs))
        for left in folder.iterdir():  # a lock without a record counts as one for a minute
            os.utime(left, (left.stat().st_mtime - 100,) * 2)
        again = commands.run(words, Disk(folder, **nfs))
        names = {path.name for path in folder.iterdir()}
        assert again.code == 0, f"killed at {killed.fault}: {names}\n{again.said}"
        names = {name for name in names if ".break." not in name}  # those of filelock
        assert names == {"lock"}, f"killed at {killed.fault}"
        if killed.code == 0:
            break
    assert at > (15 if held else 4)
