"""What file systems lack is done without or in another way; what they refuse is an error."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import SoftFileLock

from spec_data.shards import file_system, files
from spec_data.shards.errors import BusyError, FileError, SpecDataError
from spec_data.shards.index import read_index
from spec_data.shards.resumable import process_lock
from spec_train.formats.draft_files import read_config_file
from tests.forked import Forked

Patch = pytest.MonkeyPatch


def failing(number: int) -> Callable[..., None]:
    def fail(*given: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


def failing_on_folders(number: int) -> Callable[[int], None]:
    whole = os.fsync

    def sync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").is_dir():
            raise OSError(number, os.strerror(number))
        whole(descriptor)

    return sync


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_folder_that_cannot_be_synced_is_written_all_the_same(
    tmp_path: Path, monkeypatch: Patch, number: int
) -> None:
    monkeypatch.setattr(os, "fsync", failing_on_folders(number))
    files.write_atomically(tmp_path / "file", "a")
    files.write_once(tmp_path / "once", "b")
    with files.atomic_write(tmp_path / "folder") as folder:
        folder.mkdir()
        (folder / "inner").write_text("c")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder", "once"]
    for lasting in (errno.EIO, errno.ENOSPC):
        monkeypatch.setattr(os, "fsync", failing(lasting))
        with pytest.raises(FileError):
            files.write_atomically(tmp_path / "file", "new")


def test_an_error_of_the_last_sync_leaves_no_whole_folder(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """The same command would say that it exists already."""
    monkeypatch.setattr(file_system, "sync_names", failing(errno.EIO))
    refused = pytest.raises(FileError, match="out: the disk reports an error")
    with refused, files.atomic_write(tmp_path / "out") as folder:
        folder.mkdir()
        (folder / "inner").write_text("c")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOTSUP])
def test_modes_that_are_refused_are_left(tmp_path: Path, monkeypatch: Patch, number: int) -> None:
    monkeypatch.setattr(os, "chmod", failing(number))
    (tmp_path / "file").touch()
    files.use_default_mode(tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_locks_a_file_stands_for_one(
    tmp_path: Path, monkeypatch: Patch, number: int
) -> None:
    """A process of this machine that dies loses it."""
    monkeypatch.setattr(fcntl, "flock", failing(number))
    file = tmp_path / "lock"

    def killed() -> int:
        with process_lock(file, "busy"):
            os._exit(7)

    assert Forked(killed).wait() == 7
    with process_lock(file, "busy"):

        def second() -> int:
            with contextlib.suppress(BusyError), process_lock(file, "busy"):
                return 1
            return 0

        assert Forked(second).wait() == 0
    with process_lock(file, "busy"):
        pass


def _killed_with(record: Path) -> int:
    SoftFileLock(record).acquire()
    os._exit(7)


@pytest.mark.parametrize("seconds", [0, -1])
def test_a_dead_process_loses_its_file_where_no_two_names_can_be_exchanged(
    tmp_path: Path, monkeypatch: Patch, seconds: float
) -> None:
    """As on NFS, SMB and FUSE, where filelock leaves it for ever; a living process keeps it."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.EOPNOTSUPP))
    monkeypatch.setattr(SoftFileLock, "_try_break_stale_lock", lambda _: None, raising=False)
    file = tmp_path / "lock"

    def killed() -> int:
        with file_system.lock(file):
            os._exit(7)

    assert Forked(killed).wait() == 7
    assert (tmp_path / "lock.held").exists()
    with file_system.lock(file, seconds):
        with pytest.raises(TimeoutError), file_system.lock(file, 0):
            pass
        assert not list(tmp_path.glob("*.guard"))
    for dead in (["lock.held", "lock.held.guard"], ["lock.held.guard"]):  # killed as it took it
        for name in dead:
            assert Forked(lambda name=name: _killed_with(tmp_path / name)).wait() == 7
        with file_system.lock(file, seconds):
            assert not list(tmp_path.glob("*.guard"))
    (tmp_path / "lock.held").write_text("no record\n")
    with pytest.raises(TimeoutError), file_system.lock(file, 0):
        pass


def test_the_number_of_a_dead_process_does_not_keep_its_lock(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    """A container that starts again has the same numbers: its own process seemed to hold it."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.EOPNOTSUPP))
    monkeypatch.setattr(SoftFileLock, "_try_break_stale_lock", lambda _: None, raising=False)
    file, held = tmp_path / "lock", tmp_path / "lock.held"
    with file_system.lock(file, 0):
        process, machine, started = held.read_text().splitlines()
        with pytest.raises(TimeoutError), file_system.lock(file, 0):
            pass
    held.write_text(f"{process}\n{machine}\n{int(started) - 1}\n")
    with file_system.lock(file, 0):
        pass
    held.write_text("")
    with pytest.raises(TimeoutError), file_system.lock(file, 0):
        pass


def test_who_waits_for_a_lock_of_another_machine_is_told(
    tmp_path: Path, monkeypatch: Patch, caplog: pytest.LogCaptureFixture
) -> None:
    """It may have died there, and nothing here can know."""
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    monkeypatch.setattr(file_system, "_ROUND", 0.01)
    held = tmp_path / "lock.held"
    held.write_text("4711\nelsewhere\n")

    class Deleted(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            held.unlink()

    monkeypatch.setattr(file_system.log, "handlers", [Deleted()])
    with file_system.lock(tmp_path / "lock"):
        pass
    assert "warning[lock]" in caplog.text and f"{held} stands for one" in caplog.text


def test_a_lock_of_another_machine_says_what_to_delete(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(fcntl, "flock", failing(errno.ENOLCK))
    (tmp_path / "lock.held").write_text("4711\nelsewhere\n")
    refused = pytest.raises(BusyError, match=r"no locks, so the file .*lock\.held stands for one")
    with refused, process_lock(tmp_path / "lock", "busy"):
        pass


def test_small_files_stand_for_links_and_other_files_do_not(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(os, "symlink", failing(errno.EOPNOTSUPP))
    (tmp_path / "best-1").mkdir()
    file_system.make_link(tmp_path / "best", "best-1")
    assert file_system.linked_name(tmp_path / "best") == "best-1"
    assert file_system.followed(tmp_path / "best") == tmp_path / "best-1"
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "weights").write_text("w")
    file_system.link_or_copy(tmp_path / "source", tmp_path / "copy")
    assert (tmp_path / "copy" / "weights").read_text() == "w"
    for text in ("../best-1\n", "best-1", "best-1\nbest-2\n", "", "gone\n"):
        (tmp_path / "other").write_text(text)
        assert file_system.followed(tmp_path / "other") == tmp_path / "other"


def test_what_a_dead_process_left_goes_and_what_a_living_one_writes_stays(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    living = files.temporary_name(page)
    living.touch()

    def killed() -> int:
        files.temporary_name(page).mkdir()
        return 0

    assert Forked(killed).wait() == 0
    elsewhere = tmp_path / f".page.html.{'0' * 12}ffff.tmp"
    elsewhere.touch()
    other = tmp_path / ".other.html.0123456789ab.tmp"
    other.touch()
    assert len(list(tmp_path.iterdir())) == 4
    files.remove_dead_of(page)
    assert set(tmp_path.iterdir()) == {living, elsewhere, other}
    os.utime(elsewhere, (0, 0))
    files.remove_dead_of(page)
    assert set(tmp_path.iterdir()) == {living, other}


def test_the_loser_of_a_race_for_a_folder_is_told_so(tmp_path: Path) -> None:
    out = tmp_path / "out"
    refused = pytest.raises(FileError, match=r"out: exists already: it was written while this")
    with refused, files.atomic_write(out) as folder:
        folder.mkdir()
        (folder / "mine").touch()
        out.mkdir()
        (out / "theirs").touch()
    assert [p.name for p in out.iterdir()] == ["theirs"] and [*tmp_path.iterdir()] == [out]


def test_a_folder_that_is_taken_away_is_said_in_words(tmp_path: Path) -> None:
    out = tmp_path / "gone"
    out.mkdir()
    for _ in range(2):
        refused = pytest.raises(FileError, match=r"gone/file: it, or a directory above it")
        with refused, files.atomic_write(out / "file") as temporary:
            if out.exists():
                out.rmdir()
            temporary.write_text("x")


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.EACCES, errno.EISDIR])
def test_what_the_system_says_of_a_file_has_no_number(tmp_path: Path, number: int) -> None:
    """Readers put it in brackets behind the name of the file, which it would name again."""
    error = OSError(number, os.strerror(number), str(tmp_path / "file"))
    assert files.cause(error) == files.REFUSALS.get(number, (os.strerror(number), ""))[0]
    assert files.cause(ValueError("odd (os error 28)")) == "odd"


def read_config(folder: Path) -> None:
    read_config_file(folder)


def index(folder: Path) -> None:
    read_index(folder, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("read", [read_config, index])
def test_a_file_that_the_system_does_not_give_is_named_once(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    with pytest.raises(SpecDataError) as refused:
        read(tmp_path)
    assert "Errno" not in str(refused.value) and str(refused.value).count(str(tmp_path)) == 1
