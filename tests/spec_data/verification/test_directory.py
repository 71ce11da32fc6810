"""verify covers every file of the directory, and paths never leave it."""

import json
import os
import shutil
from pathlib import Path

import pytest

from spec_data.shards.errors import DatasetError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import Manifest
from spec_data.verification.run import examine
from tests.spec_data.runs import ON_CPU
from tests.spec_data.shards import integrity_tools
from tests.spec_data.shards.integrity_tools import equal, read_all, write_manifest

whole, data = integrity_tools.whole, integrity_tools.data


def found(data: Path):
    return examine(data=str(data), running=ON_CPU, samples=2)


@pytest.mark.parametrize("name", ["state.json", "dataset_info.json"])
@pytest.mark.parametrize("change", ["edit", "delete", "pipe", "device"])
def test_the_files_of_datasets_are_those_that_follow_from_the_manifest(data, name, change):
    file = data / name
    if change != "edit":
        file.unlink()
    if change == "pipe":  # which was waited for, without end
        os.mkfifo(file)
    elif change == "device":
        file.symlink_to("/dev/zero")
    elif change == "delete":
        pass
    else:
        file.write_text(file.read_text().replace("}", ', "a": 1}').replace("unit-00001", "unit-00"))
    (failure,) = found(data).failures
    assert failure.startswith(f"{name}: missing or changed")


def test_an_edited_card_is_a_warning(data, whole):
    assert not found(whole).warnings
    card = data / "README.md"
    card.write_text(card.read_text() + "\nA line of mine.\n")
    result = found(data)
    assert not result.failures and "README.md: edited or damaged" in result.warnings[0]
    assert "warn  README.md" in str(result) and result.facts()["warnings"]
    card.unlink()
    assert "README.md: missing" in found(data).warnings[0]


def test_unlisted_files_are_named(data):
    (data / "notes.txt").write_text("x")
    (data / ".cache" / "huggingface").mkdir(parents=True)
    (data / ".cache" / "huggingface" / "a.lock").write_text("")
    (data / ".cache" / "b").write_text("")
    (data / "shards" / ".unit-00000.arrow.0a1b2c3d4e5f.tmp").write_text("")
    result = found(data)
    assert not result.failures
    assert [w.split(" that")[0] for w in result.warnings] == [
        "shards/.unit-00000.arrow.0a1b2c3d4e5f.tmp: left by a process",
        ".cache/: 2 files",
        "notes.txt: a file",
    ]


@pytest.mark.parametrize("name", ["shards/unit-00003.arrow", "target/chat_template.jinja"])
def test_a_file_more_in_shards_or_target_is_a_failure(data, name):
    """A tokenizer loads every file in target/ that it knows by name."""
    (data / name).write_text("x")
    (failure,) = found(data).failures
    assert failure.startswith(f"{name}: not a file of this dataset")


@pytest.mark.parametrize("path", ["../x/unit-0.arrow", "/etc/passwd", "a\0b"])
@pytest.mark.parametrize("where", ["shards", "files", "codec"])
def test_paths_that_leave_the_directory_are_refused_wherever_a_manifest_is_read(data, path, where):
    raw = json.loads((data / "manifest.json").read_text())
    outside = data.parent / "x"
    shutil.copytree(data / "shards", outside)
    if where == "shards":
        raw["shards"][0]["file"] = path
    elif where == "files":
        raw["files"][path] = raw["files"]["target/config.json"]
    else:
        raw["codec"] = {"file": path, "sha256": "0" * 64}
    write_manifest(data, raw)
    for read in (Manifest.read, lambda _: HiddenStatesDataset(data), lambda _: found(data)):
        with pytest.raises(DatasetError, match="expected a path inside the dataset"):
            read(data / "manifest.json")


def as_in_the_hub_cache(whole: Path, to: Path) -> Path:
    """blobs/HASH, and snapshots/COMMIT with relative links to them, as huggingface_hub makes it."""
    snapshot, blobs = to / "snapshots" / "c0ffee", to / "blobs"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(p for p in whole.rglob("*") if p.is_file())):
        shutil.copy(file, blobs / str(number))
        link = snapshot / file.relative_to(whole)
        link.parent.mkdir(parents=True, exist_ok=True)
        up = "/".join([".."] * (len(link.relative_to(to).parts) - 1))
        link.symlink_to(f"{up}/blobs/{number}")
    return snapshot


def test_links_to_files_are_read_and_verified(whole, tmp_path):
    snapshot = as_in_the_hub_cache(whole, tmp_path / "cache")
    assert all(map(equal, read_all(snapshot), read_all(whole)))
    result = found(snapshot)
    assert not result.failures and not result.warnings
    (snapshot / "shards" / "unit-00001.arrow").resolve().unlink()
    with pytest.raises(MissingError, match=r"unit-00001\.arrow: shard is missing"):
        HiddenStatesDataset(snapshot)
