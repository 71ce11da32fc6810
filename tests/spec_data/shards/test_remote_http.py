"""The same from plain web servers on loopback: one that knows ranges, and one that does not."""

import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import pytest
import torch

import spec_data
from spec_data.cli import main
from spec_data.shards import storage
from spec_data.shards.errors import ConfigError, DatasetError, MissingError, RunError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.storage import check_dataset_url
from spec_data.verification.run import examine
from tests.factory import tiny_dataset
from tests.remote_tools import web_server
from tests.spec_data.runs import ON_CPU


class Server:
    """Serves a folder; `choose(path)` may return a fault: "500", "403", "cut" or "no-length"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.choose: Callable[[str], str | None] = lambda path: None
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()


def handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Ranges(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with server.lock:
                server.requests.append((self.command, self.path))
                fault = server.choose(self.path)
            file = server.folder / unquote(self.path.strip("/"))
            if fault in ("500", "403") or not file.is_file():
                return self._answer(int(fault or 404), b"<html>not here</html>")
            content, status = file.read_bytes(), 200
            if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                content = content[int(asked[1]) : int(asked[2]) + 1 if asked[2] else None]
                status = 206
            self._answer(status, content, fault)

        do_HEAD = do_GET

        def _answer(self, status: int, content: bytes, fault: str | None = None) -> None:
            self.send_response(status)
            self.send_header("Accept-Ranges", "bytes")
            if fault != "no-length":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.close_connection = fault is not None
            if self.command == "GET":
                self.wfile.write(content[: len(content) // 2] if fault == "cut" else content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Ranges


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "some data"
    return tiny_dataset(folder, n_docs=12, docs_per_shard=6)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "PAUSES", (0.01, 0.01, 0.01))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")


@pytest.fixture
def served(local, cache, tmp_path):
    """A server of a copy of the dataset, and its URL."""
    copy = tmp_path / "some data"
    for file in local.rglob("*"):
        if file.is_file():
            (copy / file.relative_to(local)).parent.mkdir(parents=True, exist_ok=True)
            (copy / file.relative_to(local)).write_bytes(file.read_bytes())
    server = Server(copy)
    server.folder = copy.parent
    web = ThreadingHTTPServer(("127.0.0.1", 0), handler(server))
    web.daemon_threads = True
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield server, f"http://127.0.0.1:{web.server_port}/some data"
    web.shutdown()
    web.server_close()


def same(a, b) -> bool:
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def read_all(url: str, local: Path) -> None:
    here, there = HiddenStatesDataset(local), spec_data.open_dataset(url)
    assert len(here) == len(there)
    for index in range(len(here)):
        assert all(same(here[index][name], there[index][name]) for name in here[index])


def test_it_is_read_verified_and_shown(served, local, capsys):
    server, url = served
    read_all(url, local)
    sent = [path for method, path in server.requests if method == "GET"]
    assert len(sent) == len(set(sent)), sent  # nothing twice, and no list of a folder
    assert main(["inspect", url, "--json"]) == 0
    assert f'"path": "{url}"' in capsys.readouterr().out
    assert main(["verify", url, "--device", "cpu"]) == 0


def test_a_server_without_ranges_is_read(local, cache):
    with web_server(local.parent) as url:
        read_all(f"{url}/some data", local)


@pytest.mark.parametrize("fault", ["500", "cut"])
def test_failures_that_pass(served, local, fault):
    server, url = served
    left = [2, 2]

    def choose(path: str) -> str | None:
        which = "unit-00001" in path
        left[which] -= 1
        return fault if left[which] >= 0 else None

    server.choose = choose
    read_all(url, local)


def test_failures_that_stay_are_said(served):
    server, url = served
    server.choose = lambda path: "500"
    with pytest.raises(RunError, match=r"some data/manifest.json: 4 tries failed"):
        HiddenStatesDataset(url)
    server.choose = lambda path: "403"
    with pytest.raises(ConfigError, match=r"access refused .*without a password; download"):
        HiddenStatesDataset(url)
    server.choose = lambda path: "no-length" if path.endswith(".arrow") else None
    with pytest.raises(RunError, match=r"does not say how large it is"):
        HiddenStatesDataset(url)


def test_missing_and_damaged_files_are_said(served):
    server, url = served
    folder = server.folder / "some data"
    shard = folder / "shards" / "unit-00001.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:100] + b"x" + whole[101:])
    dataset = HiddenStatesDataset(url)
    with pytest.raises(DatasetError, match=r"some data/shards/unit-00001.arrow: damaged: its SHA"):
        _ = dataset[8]
    failures = examine(data=url, running=ON_CPU, samples=2).failures
    assert failures and all("unit-00001.arrow" in failure for failure in failures)
    shard.write_bytes(whole[:-8])
    (folder / "shards" / "unit-00000.arrow").unlink()
    with pytest.raises(MissingError, match=r"00000.arrow: shard is missing\n.*00001.*truncated"):
        HiddenStatesDataset(url)
    (folder / "manifest.json").write_text("<html>welcome</html>")
    with pytest.raises(DatasetError, match=r"manifest.json: not valid JSON"):
        HiddenStatesDataset(url)
    (folder / "manifest.json").unlink()
    with pytest.raises(MissingError, match=r"some data: no manifest.json there"):
        HiddenStatesDataset(url)


def test_a_view_of_it_is_read_and_copied(served, local, tmp_path, monkeypatch, capsys):
    _, url = served
    assert main(["select", url, str(tmp_path / "view"), "--where", "length < 1000"]) == 0
    host = url.rpartition("/")[0]
    assert f"To read it: export SPEC_DATA_REMOTE_SOURCES={host}" in capsys.readouterr().err
    monkeypatch.setenv("SPEC_DATA_REMOTE_SOURCES", host)
    assert main(["copy", str(tmp_path / "view"), str(tmp_path / "copy")]) == 0
    read_all(str(tmp_path / "view"), local)
    read_all(str(tmp_path / "copy"), local)


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_nothing_is_written_there(scheme):
    check_dataset_url("--data", f"{scheme}://host:8000/data")
    with pytest.raises(ConfigError, match=rf"{scheme}:// is read-only here"):
        check_dataset_url("--out", f"{scheme}://host/data", write=True)
    with pytest.raises(ConfigError, match="without"):
        check_dataset_url("--data", f"{scheme}://host/data?token=1")
