"""hf://datasets/...: a dataset on the Hub is read through the Hub's own file system."""

import hashlib
import json
import re
from urllib.parse import parse_qs

import pytest
import torch
from huggingface_hub import HfFileSystem, constants

from spec_data.corpus.record_reader import CorpusReader
from spec_data.shards.errors import CorpusError, MissingError
from spec_data.shards.reader import HiddenStatesDataset
from tests.factory import tiny_dataset
from tests.spec_data.hub.hub_server import _Handler, _oid, on_this_machine


class _Ranged(_Handler):
    """The server of `push` and `pull`, with paths-info and range requests."""

    def do_POST(self) -> None:
        found = re.fullmatch(r"/api/datasets/(.+?/.+?)/paths-info/(\w+)", self.path)
        if not found:
            super().do_POST()
            return
        body = self._body().decode()
        form = json.loads(body) if body.startswith("{") else parse_qs(body)
        files = self.server_hub.files(found[1], found[2])
        self._json(
            [
                {"type": "file", "path": n, "size": len(files[n]), "oid": _oid(files[n])}
                for n in form["paths"]
                if n in files
            ]
        )

    def _file(self, repo: str, revision: str, name: str) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if not asked or self.command == "HEAD":
            super()._file(repo, revision, name)
            return
        data = self.server_hub.files(repo, revision)[name]
        part = data[int(asked[1]) : int(asked[2]) + 1]
        self.server_hub.downloads.append(f"{name} {len(part)}")
        end = int(asked[1]) + len(part) - 1
        self._send(206, part, Content_Range=f"bytes {asked[1]}-{end}/{len(data)}")


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    hub = on_this_machine(monkeypatch, tmp_path)
    hub._server.RequestHandlerClass.__bases__ = (_Ranged,)
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
