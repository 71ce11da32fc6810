"""Random damage to a finished dataset: the command that made it brings back the very bytes."""

import collections
import shutil
from pathlib import Path

import pytest

from spec_data.shards.files import MANIFEST
from tests.faults.test_dataset_bits import KINDS, damage, files_of
from tests.faults.tools import report, trials
from tests.spec_data.runs import digests, run, save_target, write_corpus

OPTIONS = {"max_shard_size": "20KB", "codec": "default"}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("repair")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 20)


@pytest.fixture(scope="module")
def whole(source):
    run(*source, source[0].parent / "data", **OPTIONS)
    return source[0].parent / "data"


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.long)])
def test_one_to_three_damaged_files_come_back(source, whole, tmp_path, times):
    """An edited card is the user's; every other file but the manifest has its bytes again."""
    before, outcomes = digests(whole), collections.Counter()
    names = [n for n in files_of(whole) if n not in (MANIFEST, "README.md")]
    for _, rng in trials(f"repair x{times}", 6 * times):
        data = Path(shutil.copytree(whole, tmp_path / "data"))
        for _ in range(int(rng.integers(1, 4))):
            name = names[rng.integers(len(names))]
            kind = KINDS[rng.integers(len(KINDS))]
            if (data / name).exists() and (data / name).stat().st_size:
                other = damage(data, name, kind, rng)
                outcomes[f"{kind} of a shard" if name.startswith("shards/") else kind] += 1
                if other in (MANIFEST, "README.md"):
                    shutil.copy(whole / other, data / other)
        run(*source, data, **OPTIONS)
        assert digests(data) == before
        shutil.rmtree(data)
    report("repair", outcomes)
