"""hf://datasets/...: a dataset on the Hub is read through the Hub's own file system."""

import hashlib
import json

import pytest
import torch
from huggingface_hub import HfFileSystem, constants

from spec_data.corpus.record_reader import CorpusReader
from spec_data.shards.errors import CorpusError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from tests.factory import tiny_dataset
from tests.spec_data.hub.hub_server import on_this_machine


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    hub = on_this_machine(monkeypatch, tmp_path)
    HfFileSystem.clear_instance_cache()
    yield hub
    HfFileSystem.clear_instance_cache()
    hub.close()
    assert not hub.unknown, hub.unknown


def test_a_dataset_on_the_hub_is_read(server, tmp_path):
    local = tiny_dataset(tmp_path / "data", n_docs=8, docs_per_shard=4)
    files = {str(p.relative_to(local)): p.read_bytes() for p in local.rglob("*") if p.is_file()}
    server.commits["me/tiny"] = [files]
    here, there = HiddenStatesDataset(local), HiddenStatesDataset("hf://datasets/me/tiny")
    for index in range(len(here)):
        assert torch.equal(here[index]["hidden.L1"], there[index]["hidden.L1"])
    assert any(name.startswith("shards/unit-00001.arrow ") for name in server.downloads)


def test_one_file_of_a_dataset_is_a_corpus(server, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    line = json.dumps({"messages": [{"role": "user", "content": "a"}]}).encode()
    server.commits["me/sets"] = [{"qa.jsonl": line + b"\n", "train/rag.jsonl": line * 2}]
    reader = CorpusReader(["me/sets:qa.jsonl"], split="test")
    (record,) = reader
    assert (record.source, record.where) == ("me/sets:qa.jsonl", "me/sets:qa.jsonl:1")
    assert reader.reports[0].sha256 == hashlib.sha256(line + b"\n").hexdigest()
    assert server.downloads == ["qa.jsonl"]
    with pytest.raises(CorpusError, match=r"two\.jsonl of the HF dataset me/sets failed"):
        CorpusReader(["me/sets:two.jsonl"])
    with pytest.raises(CorpusError, match="leave out @test"):
        CorpusReader(["me/sets:qa.jsonl@test"])
    for name in ("me:qa.jsonl", "a/me/sets:qa.jsonl", "./sets:qa.jsonl", "me/qa.jsonl"):
        with pytest.raises(MissingError, match="no such file or directory"):
            CorpusReader([name])
