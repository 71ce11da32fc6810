"""Hidden states on their way from an engine to the process that stores them: HTTP, in memory.

An engine `put`s the states of a request when it has computed them; the one who asked for them
fetches them, once. They never touch a disk, so a killed process leaves no half file. The body is
that of a safetensors file: no code can come with it.
"""

import threading
import urllib.request
from collections import OrderedDict
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

ASKED = "hidden_states"
"""The key of `kv_transfer_params` by which a request asks for its states."""
KEY, PORT = "handle", "states_port"
"""Keys of the answer's `kv_transfer_params`: where the states are."""
HOST, EVERY, MOST_BYTES = "states_host", "every_request", "states_bytes"
"""Keys of `kv_connector_extra_config`, beside PORT."""
STATES, IDS = "hidden_states", "token_ids"
"""The tensors of a request: [T, n, H] and int64 [T]."""
_PATIENCE = 60.0  # seconds for which a request for states waits until they are there


def transfer_config(port: int, **others: Any) -> dict[str, Any]:
    """Return the --kv-transfer-config with which vLLM hands states over at `port`."""
    return {
        "kv_connector": "ServedStates",
        "kv_connector_module_path": "spec_data.capture.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {PORT: port} | others,
    }


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with whole bodies, and writes no line per request into the log of an engine."""

    def answer(self, code: int, body: bytes) -> None:
        """Send a body."""
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: Any) -> None:
        """Write nothing."""


class StateServer(ThreadingHTTPServer):
    """States by the id of their request, served on `host` and `port` until they are fetched.

    Where more than `most_bytes` wait, the oldest are dropped: who asked for them is gone.
    """

    daemon_threads = True
    request_queue_size = 1024  # many requests end together; more than these would be refused

    def __init__(self, host: str, port: int, most_bytes: int) -> None:
        """Listen; port 0 takes a free one, see `port`.

        Raises:
            OSError: the port is taken, or may not be used.
        """
        super().__init__((host, port), _Handler)
        self.port = int(self.server_address[1])
        self._most, self._waiting = most_bytes, OrderedDict[str, bytes]()
        self._patience = _PATIENCE
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep the tensors (on the CPU) of a request until they are fetched."""
        body = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        with self._changed:
            self._waiting[key] = body
            while len(self._waiting) > 1 and sum(map(len, self._waiting.values())) > self._most:
                self._waiting.popitem(last=False)
            self._changed.notify_all()

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def _body(self, key: str) -> bytes | None:
        """Return what is kept for a request, or None if it does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._waiting, self._patience)
            return self._waiting.get(key)


class _Handler(QuietHandler):
    server: StateServer

    def do_GET(self) -> None:
        key = self.path.removeprefix("/states/")
        body = self.server._body(key)
        if body is None:
            self.send_error(404, "no such states: they were fetched before, or dropped")
            return
        self.answer(200, body)
        with self.server._changed:  # they have arrived
            self.server._waiting.pop(key, None)


def fetch_states(host: str, port: int, key: str) -> dict[str, Tensor]:
    """Fetch the tensors of a request from its `StateServer`.

    Raises:
        OSError: it does not answer, or has none. ValueError, SafetensorError: other bytes.
    """
    url = f"http://{host}:{port}/states/{key}"
    with urllib.request.urlopen(url, timeout=2 * _PATIENCE) as answer:
        return load(answer.read())
