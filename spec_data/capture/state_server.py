"""Hidden states on their way from an engine to the process that stores them: HTTP, in memory.

An engine `put`s the states of a request when it has computed them; the one who asked for them
takes them, once. They never touch a disk, so a killed process leaves no half file.

    POST /states/KEY   -> tensors (`exchange.frames`), which are dropped once they have left

The key is in the answer of the engine to the request. The server's access token is in a file that
clients of the same user on the same machine find; others have SPEC_SERVER_TOKEN.
"""

import asyncio
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from spec_data.exchange.access import no_entry
from spec_data.exchange.client import NoAnswer, Refusal, WrongAnswer, ask_tensors, own_headers
from spec_data.exchange.frames import CHECKSUM_HEADER, Layout, checksum, encode
from spec_data.exchange.server import Answer, Refused, Request, WebServer
from spec_data.shards.errors import ConfigError

ASKED = "hidden_states"
"""The key of `kv_transfer_params` by which a request asks for its states."""
KEY, PORT = "handle", "states_port"
"""Keys of the answer's `kv_transfer_params`: where the states are."""
HOST, EVERY, MOST_BYTES = "states_host", "every_request", "states_bytes"
HOSTS = "states_hosts"
"""Keys of `kv_connector_extra_config`, beside PORT."""
STATES, IDS = "hidden_states", "token_ids"
"""The tensors of a request: [T, n, H] and int64 [T]."""
_PATIENCE = 60.0  # seconds for which a request for states waits until they are there
_SECONDS = 600.0  # for an answer, from the request to the last byte
_MOST_BYTES = 4 << 30  # of states that wait, and of an answer
_KEYS = re.compile(r"[\w.:-]{1,200}", re.ASCII)


def transfer_config(port: int, **others: Any) -> dict[str, Any]:
    """Return the --kv-transfer-config with which vLLM hands states over at `port`."""
    return {
        "kv_connector": "ServedStates",
        "kv_connector_module_path": "spec_data.capture.vllm_connector",
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {PORT: port} | others,
    }


@dataclass
class _Body:
    """The states of a request, as they are sent."""

    parts: list[memoryview]
    headers: dict[str, str] = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.headers = {CHECKSUM_HEADER: checksum(self.parts)}
        self.size = sum(map(len, self.parts))


class StateServer(WebServer):
    """States by the key of their request, served on `host` and `port` until they are taken.

    Where more than `most_bytes` wait, the oldest are dropped: who asked for them is gone.
    """

    at_once = 256  # those that wait hold no memory of their own

    def __init__(self, host: str, port: int, most_bytes: int = _MOST_BYTES, **given: Any) -> None:
        """Listen; port 0 takes a free one, see `port`. `given` are token and hosts of `WebServer`.

        Raises:
            OSError: the port is taken, or may not be used. ConfigError: as `WebServer`.
        """
        super().__init__(host, port, **given)
        self._most, self._waiting = most_bytes, OrderedDict[str, _Body]()
        self._patience, self._lock = _PATIENCE, threading.Lock()
        self._asked = dict[str, list[asyncio.Future[None]]]()  # by those who came before them
        self._thread = threading.Thread(target=self.serve_forever, daemon=True)
        self._thread.start()

    def put(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep copies of the tensors of a request until they are taken."""
        body = _Body(encode({name: tensor.clone() for name, tensor in tensors.items()}))
        with self._lock:
            self._waiting[key] = body
            while (
                len(self._waiting) > 1 and sum(b.size for b in self._waiting.values()) > self._most
            ):
                self._waiting.popitem(last=False)
            loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # it has just ended
                loop.call_soon_threadsafe(self._arrived, key)

    def close(self) -> None:
        """Stop listening."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    async def respond(self, request: Request) -> Answer:
        """Return the states of a request, when they are there."""
        place, _, key = request.path.removeprefix("/").partition("/")
        if place != "states" or not _KEYS.fullmatch(key):
            raise Refused(404, "there are /states/KEY alone, with the key that the engine answered")
        request.must_be("POST")
        await request.body(0)
        if (body := self._waiting.get(key)) is None:
            body = await self._awaited(key)
        return Answer(body.parts, body.headers, partial(self._taken, key, body))

    async def _awaited(self, key: str) -> _Body:
        """Return states that are not there yet."""
        coming = asyncio.get_running_loop().create_future()
        self._asked.setdefault(key, []).append(coming)
        try:
            if key not in self._waiting:  # since then
                await asyncio.wait_for(coming, self._patience)
            return self._waiting[key]
        except (TimeoutError, KeyError):
            raise Refused(404, "no such states: they were taken before, or dropped") from None
        finally:
            self._asked[key].remove(coming)
            if not self._asked[key]:
                del self._asked[key]

    def _arrived(self, key: str) -> None:
        for coming in self._asked.get(key, ()):
            if not coming.done():
                coming.set_result(None)

    def _taken(self, key: str, body: _Body) -> None:
        """Forget states that have left."""
        with self._lock:
            if self._waiting.get(key) is body:
                del self._waiting[key]


def fetch_states(
    host: str,
    port: int,
    key: str,
    check: Callable[[dict[str, Layout]], None] = lambda _: None,
    *,
    most: int = _MOST_BYTES,
    token: str | None = None,
) -> dict[str, Tensor]:
    """Take the tensors of a request from its `StateServer`.

    Args:
        check: raises for tensors that were not asked for, before they are read.
        most: bytes of the largest answer that is read.

    Raises:
        OSError: it does not answer, or has none. ValueError: other bytes, or another release.
        ConfigError: it wants another access token.
    """
    if not 0 < port < 1 << 16 or not _KEYS.fullmatch(key):
        raise WrongAnswer(f"no port and key of states: {port!r}, {key[:80]!r}")
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    headers = own_headers(url, token)
    try:
        return ask_tensors(f"{url}/states/{key}", b"", headers, check, seconds=_SECONDS, most=most)
    except Refusal as error:
        if error.status == 401:
            raise ConfigError(no_entry(url)) from None
        if error.status in (403, 426):
            raise ConfigError(f"{url}: {error.text}") from None
        raise NoAnswer(f"{url}: {error}") from None
