"""A real S3 server on loopback, and a proxy before it that injects failures."""

import http.client
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

EXPIRED = (
    b"<?xml version='1.0'?><Error><Code>ExpiredToken</Code>"
    b"<Message>The provided token has expired.</Message></Error>"
)


class Faults:
    """What the proxy does with each request: `choose(method, path)` returns the name of a fault.

    "500": status 500. "cut": half of the body, then the connection is reset. "slow": the body comes
    after a pause. "expired": status 400 with the code ExpiredToken. "bare": a refused
    condition is not named, as of MinIO. None: nothing.
    """

    def __init__(self) -> None:
        self.choose: Callable[[str, str], str | None] = lambda method, path: None
        self.requests: list[tuple[str, str]] = []
        self.lock = threading.Lock()

    def first(self, count: int, fault: str, part: str = "") -> None:
        """Inject a fault into the next `count` requests whose path has `part`."""
        left = [count]

        def choose(method: str, path: str) -> str | None:
            with self.lock:
                if left[0] and part in path:
                    left[0] -= 1
                    return fault
            return None

        self.choose = choose


@contextmanager
def object_store() -> Iterator[tuple[str, Faults]]:
    """Yield the URL of a proxy before an S3 server, which clients find, and its faults."""
    moto = pytest.importorskip("moto.server", reason="moto is not installed: '.[test]'")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed: '.[s3]'")
    s3fs.S3FileSystem.clear_instance_cache()  # clients of an earlier server
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _forget(server.get_host_and_port())
    faults = Faults()
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server.get_host_and_port(), faults))
    proxy.daemon_threads = True
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{proxy.server_port}"
    given = {"ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    given |= {"ENDPOINT_URL": address, "DEFAULT_REGION": "us-east-1"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(f"AWS_{name}", value)
            yield address, faults
    finally:
        proxy.shutdown()
        proxy.server_close()
        server.stop()


def _forget(address: tuple[str, int]) -> None:
    """Delete what an earlier server of this process kept: moto's buckets are global."""
    connection = http.client.HTTPConnection(*address)
    connection.request("POST", "/moto-api/reset")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    assert answer.status == 200, answer.status


def _handler(upstream: tuple[str, int], faults: Faults) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _forward(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            body = self.rfile.read(length)
            with faults.lock:
                faults.requests.append((self.command, self.path))
            fault = faults.choose(self.command, self.path)
            if fault == "500":
                return self._answer(500, [], b"")
            if fault == "expired":
                return self._answer(400, [("content-type", "text/xml")], EXPIRED)
            connection = http.client.HTTPConnection(*upstream)
            connection.request(self.command, self.path, body, dict(self.headers))
            answer = connection.getresponse()
            content = answer.read()
            connection.close()
            if fault == "bare" and answer.status == 412:
                content = re.sub(rb"<Condition>.*?</Condition>", b"", content)
            if fault == "slow":
                time.sleep(1.0)
            kept = [(k, v) for k, v in answer.getheaders() if k.lower() not in _OWN]
            if self.command == "HEAD":
                kept.append(("content-length", answer.getheader("content-length") or "0"))
            self._answer(answer.status, kept, content, cut=fault == "cut")

        def _answer(self, status: int, headers: list, content: bytes, cut: bool = False) -> None:
            self.send_response(status)
            for name, value in headers:
                self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("content-length", str(len(content)))
            self.end_headers()
            if cut:
                self.wfile.write(content[: len(content) // 2])
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
            elif self.command != "HEAD":
                self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _forward

    return Handler


_OWN = ("content-length", "transfer-encoding", "connection", "date", "server")
