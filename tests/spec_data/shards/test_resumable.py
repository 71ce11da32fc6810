"""What is half-written or damaged is never used."""

import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from spec_data.shards import files
from spec_data.shards.errors import BusyError
from spec_data.shards.files import atomic_write
from spec_data.shards.resumable import ResumableDirectory


def test_files_and_folders_appear_complete_or_not_at_all(tmp_path):
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.write_text("old")
    with pytest.raises(ValueError), atomic_write(file) as temporary:
        temporary.write_text("half")
        raise ValueError
    with pytest.raises(ValueError), atomic_write(folder) as temporary:
        temporary.mkdir()
        raise ValueError
    assert [p.name for p in tmp_path.iterdir()] == ["file"] and file.read_text() == "old"
    with atomic_write(file) as temporary:
        temporary.write_text("new")
    with atomic_write(folder) as temporary:
        (temporary / "inner").mkdir(parents=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
    assert file.read_text() == "new"


def test_a_damaged_record_is_no_record(tmp_path):
    work = ResumableDirectory(tmp_path / "out", ".view")
    with work.begun({}, "delete it"):
        work.save("part", {"rows": 3})
    file = work.work / "part.json"
    for damaged in (file.read_text().replace("3", "4"), "{", "[]"):
        file.write_text(damaged)
        assert work.load("part") is None


def test_a_second_process_leaves_what_the_first_one_writes(tmp_path):
    out = tmp_path / "out"
    half = out / ".part.0123456789ab.tmp"
    with ResumableDirectory(out, ".view").begun({}, "delete it"):
        half.touch()
        assert files.is_temporary(half), "the test shows nothing"
        with pytest.raises(BusyError), ResumableDirectory(out, ".view").begun({}, ""):
            pass
        assert half.exists()
    with ResumableDirectory(out, ".view").begun({}, "delete it"):
        assert not half.exists(), "one that was killed has left it"


def test_without_hard_links_the_first_writer_wins_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two workers that prove at once may choose other forms: both must read the same file. The
    second writer comes while the first one holds the lock, whose file has a temporary name."""

    def no_links(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no hard links")

    path, exists = tmp_path / "draft.json", Path.exists
    threads: list[threading.Thread] = []
    monkeypatch.setattr(os, "link", no_links)

    def slow(self: Path) -> bool:
        found = exists(self)
        if self == path and not threads:
            threads.append(threading.Thread(target=files.write_once, args=(path, "second")))
            threads[0].start()
            time.sleep(0.2)
            assert not exists(self), "the second one did not wait"
        return found

    monkeypatch.setattr(Path, "exists", slow)
    files.write_once(path, "first")
    threads[0].join()
    assert path.read_text() == "first"
    assert all(map(files.is_temporary, set(tmp_path.iterdir()) - {path}))
