"""Datasets on memory:// and on a web server, for tests of commands that take URLs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec


def put_in_memory(directory: Path, url: str) -> None:
    """Copy every file of a directory to a memory:// URL."""
    system = fsspec.filesystem("memory")
    root = url.removeprefix("memory:/")
    for file in directory.rglob("*"):
        if file.is_file():
            system.pipe_file(f"{root}/{file.relative_to(directory)}", file.read_bytes())


def forget_memory() -> None:
    """Delete everything on memory://."""
    fsspec.filesystem("memory").store.clear()


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    """Serve a folder on loopback, as `python -m http.server` does: no ranges. Yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
