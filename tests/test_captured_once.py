"""One capture, everywhere: an object store, views, and the same training from both.

Each step tells its bytes before it writes them. What takes a URL is given one; the others work on a
local copy, and the result is copied to the store, as docs/remote.md says.
"""

import pytest
from fsspec.core import url_to_fs

import spec_data
from spec_data.generation.setup import make_plan
from spec_data.shards.reader import HiddenStatesDataset
from tests.object_store import object_store
from tests.spec_data.runs import ON_CPU, inputs_of, options, run, save_target, write_corpus
from tests.spec_train import flat
from tests.spec_train.training.tools import metrics

FIT = {"steps": 3, "eval_every": 1, "ttt_steps": 2, "draft_vocab_size": 64, "batch_size": 1}
FIT |= {"seq_len": 128, "validation": 0.3, "device": "cpu"}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """An empty bucket of an S3 server on loopback."""
    with object_store():
        monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
        system, _ = url_to_fs("s3://bucket", use_listings_cache=False)
        system.mkdir("bucket")
        yield system


@pytest.fixture
def corpora(tmp_path):
    """Three files without a common row."""
    rows = write_corpus(tmp_path / "all.jsonl", 36).read_text().splitlines(keepends=True)
    files = [tmp_path / f"{name}.jsonl" for name in "abc"]
    for file, part in zip(files, (rows[:16], rows[16:26], rows[26:]), strict=True):
        file.write_text("".join(part))
    return files


def bytes_of(path) -> int:
    return HiddenStatesDataset(path).manifest.totals.bytes


def test_a_capture_travels_and_trains_the_same_draft(store, corpora, tmp_path, monkeypatch):
    target = save_target(tmp_path / "target")
    a, b, c = (tmp_path / name for name in "abc")
    monkeypatch.setenv("SPEC_DATA_REMOTE_SOURCES", "s3://bucket")
    both, small, url = tmp_path / "both", tmp_path / "small", "s3://bucket"

    given = {"layers": "0,2,4", "max_shard_size": "40KB"}
    rows, setup = inputs_of(**options(target, corpora[0], tmp_path / "none", **given))
    plan = make_plan(rows, setup)
    planned = sum(plan.unit_bytes(unit, setup.columns) for unit in range(len(plan.units)))
    run(target, corpora[0], f"{url}/a", **given)
    assert bytes_of(f"{url}/a") == planned
    assert not spec_data.verify(f"{url}/a", target=str(target), samples=2, running=ON_CPU).failures
    store.get("bucket/a/", str(a), recursive=True)

    run(target, corpora[1], b, **given)
    run(target, corpora[2], c, **given)
    result = spec_data.merge([f"{url}/a", b, c], both)
    assert result.documents == 36 and result.bytes == 0
    result = spec_data.recode(both, small, "default")
    assert result.documents == 36 and bytes_of(small) < bytes_of(a) + bytes_of(b) + bytes_of(c)

    assert not spec_data.verify(small, target=str(target), samples=4, running=ON_CPU).failures

    store.put(str(small), "bucket/grown", recursive=True)
    assert not spec_data.verify(f"{url}/grown", samples=2, running=ON_CPU).failures
    here = flat.fit("eagle3", small, tmp_path / "here", **FIT)
    there = flat.fit("eagle3", f"{url}/grown", tmp_path / "there", **FIT)
    assert here.validation and here.validation == there.validation
    assert metrics(tmp_path / "here") == metrics(tmp_path / "there")
