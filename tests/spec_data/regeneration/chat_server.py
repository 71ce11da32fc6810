"""A real HTTP server with the two routes of an OpenAI-compatible one, and faults on demand."""

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def answer_to(messages: list[dict[str, Any]]) -> str:
    """Return the answer that this server gives: a function of all messages."""
    asked = "|".join(f"{m['role']}:{m.get('content')}" for m in messages)
    return f"answer {len(messages)} to {asked}"


def completion(messages: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    """Return the body of a sound chat completion."""
    message = {"role": "assistant", "content": answer_to(messages)} | changes.pop("message", {})
    choice = {"index": 0, "message": message, "finish_reason": changes.pop("finish", "stop")}
    usage = {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 13}
    body = {"id": "x", "object": "chat.completion", "created": 0, "model": "m"}
    return body | {"choices": [choice], "usage": usage} | changes


Fault = Callable[["Handler", dict[str, Any]], bool]
"""Answers a request in a wrong way; returns whether it did."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: "ChatServer"

    def log_message(self, *_: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        """List the models."""
        if self.server.dead:
            self.drop()
            return
        found = [{"id": name, "object": "model", "created": 0} for name in self.server.models]
        self.send(200, {"object": "list", "data": found})

    def do_POST(self) -> None:
        """Answer a chat, or do what the next fault does."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append(body)
            self.server.keys.append(self.headers["Authorization"])
            key = json.dumps(body["messages"], sort_keys=True)
            self.server.asked[key] += 1
            number = self.server.asked[key]
        if self.server.dead:
            self.drop()
            return
        for fault in self.server.faults:
            if fault(self, body | {"try": number}):
                return
        with self.server.lock:
            if self.server.dead:
                self.drop()
                return
            self.server.answered[key] += 1
        self.send(200, completion(body["messages"]))

    def send(self, code: int, body: Any, headers: dict[str, str] | None = None) -> None:
        """Send a response; `body` is JSON, or bytes as they are."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        given = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in (given | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def drop(self, partial: bytes = b"") -> None:
        """Send the beginning of a response, and close the connection."""
        self.wfile.write(partial)
        self.close_connection = True
        if self.server.dead:  # no connection is possible any more
            threading.Thread(target=self.server.__exit__, daemon=True).start()


class ChatServer(ThreadingHTTPServer):
    """A server in a thread, which is dead after some answers; use it as a context manager."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        *faults: Fault,
        models: tuple[Any, ...] = ("tiny",),
        dies_after: float = math.inf,
        port: int = 0,
    ) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults, self.models = faults, models
        self._dies_after = dies_after
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()

    @property
    def dead(self) -> bool:
        """Whether it drops every connection."""
        return self.answered.total() >= self._dies_after

    @property
    def url(self) -> str:
        """Its address, without /v1."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> "ChatServer":
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.shutdown()
        self.server_close()


def first_tries(*responses: Callable[[Handler, dict[str, Any]], None]) -> Fault:
    """Return a fault: each request fails in all of these ways, one after the other."""

    def fault(handler: Handler, body: dict[str, Any]) -> bool:
        if body["try"] > len(responses):
            return False
        responses[body["try"] - 1](handler, body)
        return True

    return fault


def status(code: int, **headers: str) -> Callable[[Handler, dict[str, Any]], None]:
    """Return a response of a status code, with an OpenAI error."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda handler, _: handler.send(code, {"error": {"message": f"no {code}"}}, named)


def body(data: Any, kind: str = "application/json") -> Callable[[Handler, dict[str, Any]], None]:
    """Return a response 200 with this body."""
    return lambda handler, _: handler.send(200, data, {"Content-Type": kind})


def slow(seconds: float) -> Callable[[Handler, dict[str, Any]], None]:
    """Return a response that comes too late."""

    def wait(handler: Handler, _: dict[str, Any]) -> None:
        time.sleep(seconds)
        handler.drop()

    return wait
