"""Answers without end, and small ones that unpack to gigabytes: no more is held than is asked."""

import gzip
import json
import threading
import tracemalloc
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from spec_data.regeneration import bounded, servers
from spec_data.regeneration.conversations import Sampling
from spec_data.shards.errors import ConfigError
from spec_train.evaluation.on_server import CountedServer
from tests.spec_data.regeneration.chat_server import ChatServer, completion
from tests.spec_data.regeneration.tools import answered
from tests.spec_data.runs import write_corpus

PIECE = b" " * 65536


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    pytest.importorskip("openai", reason="openai is not installed: '.[server]'")
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.001)
    monkeypatch.setattr("openai._base_client.MAX_RETRY_DELAY", 0.01)
    monkeypatch.setattr(bounded, "LEAST", 1 << 20)


class Endless(BaseHTTPRequestHandler):
    """Sends without end, or what unpacks to 1 GB, whatever is asked; counts what it sent."""

    def log_message(self, *_):
        """Print nothing."""

    def do_GET(self):
        """Send a body."""
        self.send_response(self.server.status)
        packed = {"gzip": gzip.compress(b" " * (64 << 20)) * 16, "br": PIECE}.get(self.server.way)
        if packed:
            self.send_header("Content-Encoding", self.server.way)
        self.end_headers()
        try:
            while True:
                self.wfile.write(packed or PIECE)
                self.server.sent += len(packed or PIECE)
                if packed:
                    return
        except OSError:
            self.server.left += 1

    do_POST = do_GET


@pytest.fixture(params=["plain", "gzip", "br"])
def endless(request):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Endless)
    server.sent = server.left = 0
    server.way, server.status = request.param, 200
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def endless_chat(handler, _):
    """Answer a chat without end."""
    handler.server.endless = getattr(handler.server, "endless", 0)
    handler.send_response(200)
    handler.send_header("Content-Type", "application/json")
    handler.end_headers()
    handler.close_connection = True
    try:
        while True:
            handler.wfile.write(PIECE)
            handler.server.endless += len(PIECE)
    except OSError:
        return True


def test_an_answer_of_a_chat_without_end(tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 3)
    odd = lambda h, b: "question 1" in b["messages"][0]["content"] and endless_chat(h, b)  # noqa: E731
    with ChatServer(odd) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[server.url], max_new_tokens=16)
    assert record["counts"]["written"] == 2
    (failed,) = record["failed"]
    assert "more than 1,114,112 bytes" in failed["reason"]
    tries = max(server.asked.values())
    assert tries == servers._TRIES
    assert server.endless < tries * (16 << 20), "buffers of the sockets are in it"


def test_lists_of_models_metrics_and_words_of_errors(endless):
    url = f"http://127.0.0.1:{endless.server_port}"
    tracemalloc.start()
    with bounded.client() as client:
        for endless.status, path in ((200, "/v1/models"), (500, "/metrics")):
            answer = client.get(url + path)
            assert bounded.is_cut(answer)
            assert len(answer.content) <= 1 << 20
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 160 << 20, "the body that is packed takes some of it in this process, too"
    endless.status = 200
    if endless.way == "plain":
        with pytest.raises(ConfigError, match="list no model"):
            CountedServer(url, None, Sampling(0.0, 1.0, None, 16, 0, {}))
    assert endless.sent < 64 << 20


def test_a_packed_answer_within_its_bound_is_read(tmp_path):
    """A proxy before a server may pack: what is asked for is understood."""
    corpus = write_corpus(tmp_path / "c.jsonl", 2)

    def packed(handler, body):
        data = gzip.compress(json.dumps(completion(body["messages"])).encode())
        handler.send(200, data, {"Content-Encoding": "gzip"})
        return True

    with ChatServer(packed) as server:
        record = answered(corpus, tmp_path / "a.jsonl", server=[server.url])
    assert record["counts"]["written"] == 2
