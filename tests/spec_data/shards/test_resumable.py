"""What is half-written or damaged is never used."""

import pytest

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
    work.begin({}, "delete it")
    work.save("part", {"rows": 3})
    file = work.work / "part.json"
    for damaged in (file.read_text().replace("3", "4"), "{", "[]"):
        file.write_text(damaged)
        assert work.load("part") is None
