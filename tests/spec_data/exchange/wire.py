"""Requests and answers as bytes: what a hostile client sends, and what a hostile server answers."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spec_data.exchange.access import PROTOCOL, PROTOCOL_HEADER
from spec_data.exchange.server import WebServer


def request(
    server: WebServer,
    path: str = "/target",
    method: str = "GET",
    body: bytes | None = None,
    **changes: str | None,
) -> bytes:
    """A good request, with some headers changed or (None) left out."""
    headers: dict[str, str | None] = {
        "Host": f"127.0.0.1:{server.port}",
        "Authorization": f"Bearer {server.token}",
        PROTOCOL_HEADER: PROTOCOL,
    }
    if body is not None:
        headers["Content-Length"] = str(len(body))
    headers |= {name.replace("_", "-"): value for name, value in changes.items()}
    lines = [f"{name}: {value}" for name, value in headers.items() if value is not None]
    return "\r\n".join([f"{method} {path} HTTP/1.1", *lines, "", ""]).encode() + (body or b"")


def told(port: int, data: bytes) -> tuple[int, bytes]:
    """Send bytes, and return status and body of what comes; (0, b"") for nothing."""
    with socket.create_connection(("127.0.0.1", port), 30) as sock:
        found = b""
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while piece := sock.recv(1 << 16):
                found += piece
        except ConnectionError:
            pass
    head, _, body = found.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head.startswith(b"HTTP/1.1 ") else 0), body


def head_of(tensors: dict[str, tuple[str, list[int]]]) -> bytes:
    """The head of a body, with tensors by name, dtype and shape one after the other."""
    sizes = {"BOOL": 1, "I64": 8, "F32": 4, "F64": 8}
    entries, start = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = sizes[dtype]
        for n in shape:
            size *= n
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


@contextmanager
def answering(answer: Callable[[bytes], Iterator[bytes]]) -> Iterator[str]:
    """A server at the URL that it yields: for each request, it sends some bytes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listening.accept()
            except OSError:
                return
            with sock:
                try:
                    head = b""
                    while b"\r\n\r\n" not in head:
                        head += sock.recv(1 << 16)
                    lines = head.lower().split(b"\r\n")
                    sizes = [int(x[15:]) for x in lines if x.startswith(b"content-length:")]
                    end = head.index(b"\r\n\r\n") + 4 + sum(sizes)
                    while len(head) < end:
                        head += sock.recv(1 << 16)
                    for piece in answer(head):
                        sock.sendall(piece)
                except OSError:
                    pass  # the client has enough

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(10)


def page(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """An answer with a body, as a server of this project sends it."""
    lines = {"Content-Length": str(len(body)), PROTOCOL_HEADER: PROTOCOL}
    lines |= {name.replace("_", "-"): value for name, value in headers.items()}
    text = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in lines.items())]
    return "\r\n".join([*text, "", ""]).encode() + body
