"""Our client: a key goes to nobody else, and no server decides how much is read or waited for."""

import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch

from spec_data.exchange.client import (
    NoAnswer,
    Refusal,
    WrongAnswer,
    ask,
    ask_tensors,
    check_url,
)
from spec_data.exchange.frames import CHECKSUM_HEADER, FrameError, checksum, decode, encode
from spec_data.shards.errors import ConfigError
from tests.spec_data.exchange.wire import answering, head_of, page

GIVEN = {"headers": {"Authorization": "Bearer secret"}, "seconds": 30.0, "most": 100}


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_key_follows_no_redirect(status):
    came = []

    def other(head):
        came.append(head)
        yield page(b"states")

    with answering(other) as there:

        def first(head):
            assert b"Bearer secret" in head
            yield page(b"", f"{status} Moved", Location=f"{there}/x\x1b[31m")

        with answering(first) as url:
            for body in (None, b"body"):
                with pytest.raises(Refusal, match=rf"{status} it sends requests on to {there}/x"):
                    ask(url, body, **GIVEN)
    assert not came


@pytest.mark.parametrize(
    ("sent", "error", "words"),
    [
        (page(bytes(101)), WrongAnswer, "an answer of 101 bytes, and 100 are asked for"),
        (page(b"", Content_Length="999999999999"), WrongAnswer, "999,999,999,999 bytes"),
        (page(b"abc", Content_Length="5"), NoAnswer, "cut 2 bytes before its end"),
        (page(b"", Content_Length="x") + bytes(200), WrongAnswer, "more than 100 bytes"),
        (
            page(b"ff\r\n" + bytes(255) + b"\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
            *(WrongAnswer, "more than 100 bytes"),
        ),
        (b"SSH-2.0-OpenSSH\r\n", NoAnswer, "SSH"),
        (b"", NoAnswer, "closed connection without response"),
        (b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 200, NoAnswer, "more than 100 headers"),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 70_000, NoAnswer, "more than 65536 bytes"),
        (page(b"\x1b[31mno\x00", "500 Broken"), Refusal, r"^500 \[31mno$"),
    ],
)
def test_what_a_server_may_not_do(sent, error, words):
    with answering(lambda _: iter([sent])) as url, pytest.raises(error, match=words):
        ask(url, **GIVEN)


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", page(b"", Content_Length="90")])
def test_a_server_that_drips_is_not_waited_for(start):
    """Each piece comes in time, and the whole never."""

    def drip(_head):
        yield start
        while True:
            time.sleep(0.02)
            yield b"a"

    with answering(drip) as url, pytest.raises(NoAnswer, match=r"no whole answer in 0\.3 seconds"):
        ask(url, **GIVEN | {"seconds": 0.3})


def test_nothing_listens():
    with pytest.raises(NoAnswer, match="refused"):
        ask("http://127.0.0.1:1", **GIVEN)


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://host/x", "host:8001", "http://", "http://a:b@host", "http://a b",
     "http://host:99999", "http://host:0", "http://[::1", "http://host\r\nX: y"],
)  # fmt: skip
def test_what_is_no_url_of_a_server(url):
    with pytest.raises(ConfigError, match="expected the URL of a server"):
        check_url(url)
    assert check_url("https://host/below/") == "https://host/below"


def test_the_proxy_of_the_environment_is_asked_but_never_for_this_machine(monkeypatch):
    asked = []

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"it")

        def log_message(self, *_args):
            pass

    with HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.server_port}")
        monkeypatch.delenv("no_proxy", raising=False)
        assert ask("http://elsewhere.invalid:8001/x", **GIVEN) == b"it"
        with answering(lambda _: iter([page(b"own")])) as url:
            assert ask(url, **GIVEN) == b"own"
        proxy.shutdown()
    assert asked == ["http://elsewhere.invalid:8001/x"]


# -- tensors ---------------------------------------------------------------------------------------


def test_tensors_come_as_they_left():
    given = {
        "a": torch.randn(3, 5), "b": torch.arange(7), "c": torch.zeros(0, 4),
        "e": torch.tensor(1.0), "d": torch.tensor([True, False, True]),
        "f": torch.randn(2, 3).bfloat16().T,
    }  # fmt: skip
    parts = encode(given)
    body = b"".join(parts)
    found = decode(body, lambda _: None)
    assert found.keys() == given.keys()
    for name, value in given.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name
    from safetensors.torch import load  # they are the bytes of a file

    assert all(torch.equal(load(body)[name], value) for name, value in given.items())
    sent = page(body, **{CHECKSUM_HEADER: checksum(parts)})
    with answering(lambda _: iter([sent])) as url:
        found = ask_tensors(url, b"", {}, lambda _: None, seconds=30.0, most=10_000)
        assert torch.equal(found["a"], given["a"])


def test_damage_on_the_way_is_noticed():
    parts = encode({"a": torch.arange(100.0)})
    body = bytearray(b"".join(parts))
    body[-3] ^= 1
    for headers, words in (
        ({CHECKSUM_HEADER: checksum(parts)}, "the checksum is another one"),
        ({}, "the checksum is another one"),
        ({"Spec-Protocol": "1"}, "version 1 of the protocol.*install the same release"),
    ):
        sent = page(bytes(body), **headers)
        with (
            answering(lambda _, sent=sent: iter([sent])) as url,
            pytest.raises(WrongAnswer, match=words),
        ):
            ask_tensors(url, b"", {}, lambda _: None, seconds=30.0, most=10_000)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "0 bytes are no tensors"),
        (b"\xff" * 8, "a head of"),
        ((3).to_bytes(8, "little") + b"[1]", "not one of tensors"),
        ((2).to_bytes(8, "little") + b"{\xff", "not one of tensors"),
        ((9000).to_bytes(8, "little") + b'{"a":' * 1800, "not one of tensors"),
        (head_of({"a": ("F32", [2])}), "0 bytes of values, and the head tells of 8"),
        (head_of({"a": ("F32", [2])}) + bytes(9), "9 bytes of values"),
        (head_of({"a": ("F32", [2])}).replace(b"F32", b"F31") + bytes(8), "dtype 'F31'"),
        (head_of({"a": ("F32", [2])}).replace(b"[2]", b"[3]") + bytes(8), "at bytes 0 to 8"),
        (head_of({"a": ("F32", [2])}).replace(b"[2]", b"-22") + bytes(8), "not one of tensors"),
        (head_of({"a": ("F32", [2]), "b": ("F32", [2])}).replace(b"[8, 16]", b"[0, 8] ") + bytes(8),
         "at bytes 0 to 8, not 8"),
        (head_of({"a": ("F32", [1] * 9)}) + bytes(4), "not one of tensors"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_tensors(body, words):
    with pytest.raises(FrameError, match=words):
        decode(body, lambda _: None)


def test_what_was_not_asked_for_is_refused_before_it_is_read():
    """The head comes, and not one of the 80 GB that it tells of."""
    head = head_of({"states": ("F64", [10**10])})
    sent = page(head, Content_Length=str(len(head) + 8 * 10**10))

    def check(found):
        raise ConfigError(f"not {found['states']}")

    refused = pytest.raises(ConfigError, match=r"not float64 \[10000000000\]")
    with answering(lambda _: iter([sent])) as url, refused:
        ask_tensors(url, b"", {}, check, seconds=30.0, most=1 << 40)
