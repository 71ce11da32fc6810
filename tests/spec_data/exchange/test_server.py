"""Our servers: who may ask, what is bounded, and what a client that leaves costs."""

import asyncio
import logging
import socket
import stat
import threading
import time

import pytest

from spec_data.exchange import server as servers
from spec_data.exchange.access import (
    PROTOCOL_HEADER,
    TOKEN_VARIABLE,
    ServerToken,
    client_token,
    is_loopback,
    is_own_host,
)
from spec_data.exchange.client import Refusal, ask, own_headers
from spec_data.exchange.server import Answer, WebServer
from spec_data.shards.errors import ConfigError
from spec_data.shards.files import cache_directory
from tests.spec_data.exchange.wire import request, told


class Echo(WebServer):
    """Answers with the body of a POST; what came is in `seen`."""

    at_once = 2

    def __init__(self, **given):
        super().__init__("127.0.0.1", 0, **given)
        self.seen = []

    async def respond(self, request):
        if request.path == "/broken":
            raise KeyError("planted")
        if request.path == "/large":
            return Answer([bytes(64 << 20)])
        if request.path == "/slow":
            await asyncio.sleep(60)
        if request.path == "/target":
            request.must_be("GET")
            return Answer([b"it"])
        request.must_be("POST")
        self.seen.append(await request.body(1000))
        return Answer([self.seen[-1]])


@pytest.fixture
def server():
    with Echo() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert told(server.port, request(server))[0] == 200  # it has begun
        yield server
        server.shutdown()
        thread.join()


# -- who may ask -----------------------------------------------------------------------------------


def test_a_client_of_the_same_user_finds_the_token_and_nobody_else_reads_it(server):
    (file,) = cache_directory("servers").glob(f"*-{server.port}")
    assert file.read_text() == server.token and len(server.token) > 40
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for host in ("127.0.0.1", "localhost", socket.gethostname()):
        assert client_token(f"http://{host}:{server.port}", None) == server.token
    assert client_token(f"http://elsewhere:{server.port}", None) is None
    assert client_token(f"http://127.0.0.1:{server.port + 1}", None) != server.token
    server.server_close()
    assert not file.exists()


def test_the_file_of_a_later_server_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path))
    first, second = ServerToken(8001, None), ServerToken(8001, None)
    first.close()
    assert client_token("http://localhost:8001", None) == second.value != first.value
    second.close()
    assert client_token("http://localhost:8001", None) is None
    assert not list((tmp_path / "servers").iterdir())


def test_two_machines_have_a_token_in_common_by_a_variable(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, "0123456789abcdef")
    token = ServerToken(8001, None)
    assert token.value == client_token("http://elsewhere:8001", None) == "0123456789abcdef"
    assert not list(cache_directory("servers").glob("*-8001"))
    assert ServerToken(8001, "f" * 16).value == client_token("http://x:1", "f" * 16) == "f" * 16
    for wrong in ("short", "0123456789abcde\n", "0123456789abcdé"):
        monkeypatch.setenv(TOKEN_VARIABLE, wrong)
        with pytest.raises(ConfigError, match=rf"{TOKEN_VARIABLE}: an access token has 16 to 512"):
            client_token("http://elsewhere:8001", None)
        with pytest.raises(ConfigError, match="token: an access token"):
            ServerToken(8001, wrong)


def test_a_token_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot be written .*Set SPEC_DATA_CACHE .* or give"):
        Echo()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"Authorization": None}, 401, "access token is missing or another one"),
        ({"Authorization": "Bearer none"}, 401, "access token"),
        ({"Authorization": "Bearer é"}, 401, "access token"),
        ({"Host": "evil.example:80"}, 403, "and by no web page"),
        ({"Host": "127.0.0.1.evil.example"}, 403, "no web page"),
        ({"Host": "[::1"}, 403, "no web page"),
        ({"Origin": "http://127.0.0.1"}, 403, "no web page"),
        ({"Origin": "null"}, 403, "no web page"),
        ({PROTOCOL_HEADER: None}, 426, "and the request an older one: install the same release"),
        ({PROTOCOL_HEADER: "99"}, 426, "version 99"),
    ],
)
def test_who_may_not_ask_gets_words_and_no_answer(server, changes, status, words):
    for body in (None, b"data"):
        method = "GET" if body is None else "POST"
        found, text = told(server.port, request(server, "/target", method, body, **changes))
        assert found == status and words in text.decode()
    assert not server.seen


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1:8001", True), ("10.0.0.7", True), ("[::1]:8001", True), ("LOCALHOST.:1", True),
        (socket.gethostname(), True), ("states.lab", True), ("lab", False), ("", False),
        (f"{socket.gethostname()}.evil.example", False), ("localhost.evil.example", False),
        ("a@localhost.evil", False), ("[", False),
    ],
)  # fmt: skip
def test_names_of_a_server(host, own):
    assert is_own_host(host, ["States.lab"]) is own


def test_addresses_of_this_machine():
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "localhost")))
    assert not any(map(is_loopback, ("10.0.0.1", "localhost.evil.example", "", "1")))


def test_another_address_is_a_name_that_the_user_gives():
    with Echo(hosts=["states.lab"]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        assert told(server.port, request(server, Host="states.lab"))[0] == 200
        server.shutdown()
        thread.join()


# -- what is bounded -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b"GET / HTTP/1.1\r\n" + b"A: " + bytes(20_000) + b"\r\n\r\n", 400, "no request of HTTP"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 5000, 431, "no request of HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400, "no request of HTTP"),  # TLS
        (b"GET / HTTP/1.1\r\n\r\n", 400, "no request of HTTP"),  # no Host
        (b"GET / HTTP/1.0\r\n\r\n", 403, "by its address"),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: localhost\r\n\r\n", 400, "no request of HTTP"),
    ],
)
def test_what_is_no_request_is_refused(server, data, status, words):
    found, text = told(server.port, data)
    assert found == status and words in text.decode()


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({"Content-Length": "1001"}, 413, "1,001 bytes, and this server reads 1,000 at most"),
        ({"Content-Length": "9" * 18}, 413, "at most"),
        ({"Content-Length": "9" * 5000}, 400, "no request"),
        ({"Content-Length": "-1"}, 400, "no request"),
        ({"Content-Length": None, "Transfer-Encoding": "chunked"}, 411, "Content-Length"),
        ({"Transfer-Encoding": "chunked"}, 411, "Content-Length"),
    ],
)
def test_a_body_is_as_long_as_it_says_and_never_too_long(server, changes, status, words):
    found, text = told(server.port, request(server, "/", "POST", b"data", **changes))
    assert found == status and words in text.decode() and not server.seen


def test_a_large_body_that_is_refused_still_gets_its_words(server):
    for size in (2000, 8 << 20):
        found, text = told(server.port, request(server, "/", "POST", bytes(size)))
        assert found == 413 and b"at most" in text
    with pytest.raises(Refusal, match="413 a body of 500,000 bytes"):
        headers = own_headers(server.url, None)
        ask(server.url, bytes(500_000), headers=headers, seconds=30.0, most=100)


def test_curl_asks_before_it_sends(server):
    data = request(server, "/", "POST", b"data", Expect="100-continue")
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(data[:-4])
        assert sock.recv(100).startswith(b"HTTP/1.1 100")
        sock.sendall(data[-4:])
        found = b""
        while piece := sock.recv(1000):
            found += piece
        assert found.endswith(b"\r\n\r\ndata")


def test_wrong_places_and_methods_are_named(server):
    assert told(server.port, request(server, "/target", "DELETE"))[0] == 405
    assert told(server.port, request(server, "/other"))[0] == 405  # a GET changes nothing
    assert not server.seen


def test_four_hundred_idle_connections_take_no_thread_and_keep_nobody_out(server, monkeypatch):
    monkeypatch.setattr(servers, "_FRESH", 0.0)
    before = threading.active_count()
    idle = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(400)]
    try:
        assert told(server.port, request(server)) == (200, b"it")
        assert threading.active_count() == before and len(server._open) <= servers._CONNECTIONS
    finally:
        for sock in idle:
            sock.close()


def test_what_never_becomes_a_request_ends(server, monkeypatch):
    monkeypatch.setattr(servers, "_HEAD_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(b"GET / HT")
        assert b" 408 " in sock.recv(1000)
    monkeypatch.setattr(servers, "_BODY_SECONDS", 0.2)
    data = request(server, "/", "POST", b"data")
    with socket.create_connection(("127.0.0.1", server.port), 30) as sock:
        sock.sendall(data[:-1])
        assert b" 408 " in sock.recv(1000)


def test_an_answer_that_is_not_taken_ends(server, monkeypatch, caplog):
    monkeypatch.setattr(servers, "_STALLED", 0.2)
    with (
        caplog.at_level(logging.INFO),
        socket.create_connection(("127.0.0.1", server.port)) as sock,
    ):
        sock.sendall(request(server, "/large"))
        until = time.monotonic() + 30
        while "a client left" not in caplog.text and time.monotonic() < until:
            time.sleep(0.02)
    assert len(caplog.records) == 1 and not server._open


def test_a_client_that_leaves_is_one_line_of_the_log(server, caplog):
    with caplog.at_level(logging.INFO):
        for data in (b"", b"GET / HT", request(server, "/", "POST", b"data")[:-1]):
            caplog.clear()
            with socket.create_connection(("127.0.0.1", server.port)) as sock:
                sock.sendall(data)
            until = time.monotonic() + 30
            while (server._open or not caplog.records) and time.monotonic() < until:
                time.sleep(0.02)
            (record,) = caplog.records
            assert record.levelno == logging.INFO and record.exc_info is None


def test_few_requests_are_worked_on_at_once(server):
    """The third one waits until one of two leaves."""
    slow = [socket.create_connection(("127.0.0.1", server.port), 30) for _ in range(2)]
    for sock in slow:
        sock.sendall(request(server, "/slow"))
    until = time.monotonic() + 30
    while not server._work.locked() and time.monotonic() < until:
        time.sleep(0.01)
    with socket.create_connection(("127.0.0.1", server.port), 0.3) as sock:
        sock.sendall(request(server))
        with pytest.raises(TimeoutError):
            sock.recv(100)
    for sock in slow:
        sock.close()


def test_an_error_in_an_answer_is_said_on_both_sides(server, caplog):
    status, text = told(server.port, request(server, "/broken"))
    assert (status, text) == (500, b"KeyError: 'planted'")
    assert "a request failed" in caplog.text


def test_shutdown_before_and_after_it_serves(caplog):
    server = Echo()
    server.shutdown()
    server.serve_forever()  # returns at once
    server.server_close()
    server = Echo()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with socket.create_connection(("127.0.0.1", server.port)):
        server.shutdown()
        thread.join(30)
        assert not thread.is_alive()
    server.server_close()
    assert not caplog.records
    with pytest.raises(OSError), Echo() as one:
        WebServer.__init__(one, "127.0.0.1", one.port)
