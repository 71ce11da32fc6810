"""Several OpenAI-compatible servers of one model: which one is asked next, and when again.

A server that fails rests, twice as long after each failure in a row; one that asks to wait
(Retry-After) is given that time. Requests go to the server with the fewest in flight among those
that do not rest. So a server that is down for good costs one request in a while, and no data.
"""

import asyncio
import email.utils
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from spec_data.shards.errors import ConfigError

_LONGEST_REST = 60.0  # seconds
_LONGEST_WAIT = 300.0  # seconds that a server may ask for


@dataclass
class Server:
    """One server. `rests_until` is a time of the monotonic clock; `failures` are those in a row."""

    url: str
    client: Any
    failures: int = 0
    flying: int = 0
    rests_until: float = 0.0


class ServerPool:
    """The servers of a run; use it as an asynchronous context manager.

    Args:
        urls: their addresses; without a path, /v1 is added.
        key: the API key that is sent to each.
        timeout: seconds for one answer.
        backoff: seconds that a server rests after its first failure in a row.

    Raises:
        ConfigError: the openai library is not installed.
    """

    def __init__(self, urls: Sequence[str], key: str, timeout: float, backoff: float) -> None:
        try:
            import openai
        except ImportError:
            raise ConfigError("--server needs the openai library: pip install openai") from None
        self._backoff = backoff
        self.servers = [
            Server(
                url,
                openai.AsyncOpenAI(
                    base_url=base_url(url), api_key=key, timeout=timeout, max_retries=0
                ),
            )
            for url in dict.fromkeys(urls)
        ]

    async def __aenter__(self) -> "ServerPool":
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers:
            await server.client.close()

    async def next(self) -> Server:
        """Return the server to ask; wait while all of them rest."""
        while True:
            now = time.monotonic()
            awake = [s for s in self.servers if s.rests_until <= now]
            if awake:
                return min(awake, key=lambda s: (s.failures > 0, s.flying))
            await asyncio.sleep(max(min(s.rests_until for s in self.servers) - now, 0.001))

    def succeeded(self, server: Server) -> None:
        """Note that a server answered."""
        server.failures, server.rests_until = 0, 0.0

    def failed(self, server: Server, wait: float | None = None) -> None:
        """Let a server rest after a failure, for at least `wait` seconds if it asked for that.

        Failures of requests that were in flight together count once: the rest doubles only when
        the server fails again after it.
        """
        now = time.monotonic()
        if server.rests_until <= now:
            server.failures += 1
            rest = min(self._backoff * 2 ** min(server.failures - 1, 30), _LONGEST_REST)
            server.rests_until = now + rest * random.uniform(0.5, 1.0)
        if wait is not None:
            server.rests_until = max(server.rests_until, now + min(wait, _LONGEST_WAIT))


def base_url(url: str) -> str:
    """Return the address under which a server has /chat/completions."""
    plain = url.rstrip("/").removesuffix("/chat/completions")
    return plain if urlsplit(plain).path.strip("/") else f"{plain}/v1"


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of a Retry-After header, None without a usable one."""
    value = headers.get("retry-after")
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = email.utils.parsedate_tz(value)
            seconds = email.utils.mktime_tz(date) - time.time() if date else -1.0
        except (ValueError, OverflowError):  # no such day or year
            return None
    return seconds if 0 <= seconds < float("inf") else None
