"""A stopped command goes on; what is half-written, damaged or of other settings is never used."""

import pytest

from spec_data.shards.errors import ConfigError, DatasetError, RunError
from spec_data.shards.files import atomic_write, temporary_name
from spec_data.shards.resumable import ResumableDirectory, process_lock


def begun(tmp_path, **settings):
    work = ResumableDirectory(tmp_path / "out", ".view")
    work.begin(settings, "delete it")
    return work


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


def test_one_process_at_a_time(tmp_path):
    with process_lock(tmp_path / "lock", "busy"):
        other = process_lock(tmp_path / "lock", "busy", 0)
        with pytest.raises(RunError, match="busy"):
            other.__enter__()
    with process_lock(tmp_path / "lock", "busy", 0):
        pass


def test_a_directory_goes_on_with_the_same_settings_only(tmp_path):
    work = begun(tmp_path, rows=(1, 2))
    work.save("part-0", {"rows": 3})
    left = temporary_name(work.out / "shard")
    left.write_text("half")
    again = begun(tmp_path, rows=[1, 2])
    assert again.load("part-0") == {"rows": 3} and again.load("part-1") is None
    assert not left.exists()
    with pytest.raises(ConfigError, match="rows: "):
        begun(tmp_path, rows=[1])
    work.finish()
    assert not list(work.out.iterdir())


def test_files_of_something_else_are_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(DatasetError, match="not empty"):
        begun(tmp_path)


def test_a_damaged_record_is_no_record(tmp_path):
    work = begun(tmp_path)
    work.save("part", {"rows": 3})
    file = work.work / "part.json"
    for damaged in (file.read_text().replace("3", "4"), "{", "[]"):
        file.write_text(damaged)
        assert work.load("part") is None
