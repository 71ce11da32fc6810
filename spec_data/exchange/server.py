"""A small HTTP server, for requests that take seconds and answers that take gigabytes.

One thread runs all connections (asyncio), a few send what is large, and h11 reads the requests.
Servers of web frameworks (uvicorn, waitress) would be further packages in the process of an engine,
put limits neither on the time of a request nor on who asks, and waitress writes large bodies to
files.

A connection is one request and one answer. What is bounded: connections, the seconds of each step,
the bytes of the head and of the body, and the requests that are worked on at once. Before a body is
read, the request has named this server, its protocol and its access token.
"""

import asyncio
import hmac
import logging
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

import h11

from spec_data.exchange.access import (
    PROTOCOL,
    PROTOCOL_HEADER,
    TOKEN_VARIABLE,
    ServerToken,
    is_own_host,
)

log = logging.getLogger(__name__)

_CONNECTIONS = 256  # open at once; file descriptors are the engine's as well
_HEAD_BYTES, _HEAD_SECONDS = 16 << 10, 10.0
_BODY_SECONDS = 120.0  # for a whole body of a request
_STALLED = 60.0  # seconds in which a piece of an answer must have left
_PIECE = 1 << 20  # bytes that are sent at once
_SENDERS = 8  # threads that send large answers; others wait
_FRESH = 1.0  # seconds for which a connection without a request is not closed for another one
_LINGER_SECONDS, _LINGER_BYTES = 2.0, 16 << 20  # of a body that is not read, after its refusal

Buffer = bytes | memoryview


class Refused(Exception):
    """What a request gets in place of an answer: a status and a sentence."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass
class Answer:
    """The parts of a body, one after the other, and headers beside the usual ones."""

    parts: Sequence[Buffer]
    headers: dict[str, str] = field(default_factory=dict)
    sent: Callable[[], None] = lambda: None
    """Called when all of it has left."""


class _Connection:
    """The server's end of one connection."""

    def __init__(self, sock: socket.socket, senders: ThreadPoolExecutor) -> None:
        self.sock, self.senders = sock, senders
        self.http = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    async def event(self) -> Any:
        """Return the next event of the request; ConnectionError: the client has left."""
        loop = asyncio.get_running_loop()
        while (event := self.http.next_event()) is h11.NEED_DATA:
            self.http.receive_data(await loop.sock_recv(self.sock, 1 << 16))
        if isinstance(event, h11.ConnectionClosed):
            raise ConnectionError("closed before its request was whole")
        return event

    async def invite_body(self) -> None:
        """Answer `Expect: 100-continue`, with which curl asks before a large body."""
        if self.http.they_are_waiting_for_100_continue:
            go_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"")
            await self._send(self.http.send(go_on) or b"")

    async def send(self, status: int, headers: dict[str, str], parts: Sequence[Buffer]) -> None:
        """Send an answer; TimeoutError: the client does not take it."""
        size = sum(map(len, parts))
        lines = {"Content-Length": str(size), "Connection": "close", PROTOCOL_HEADER: PROTOCOL}
        lines |= headers
        response = h11.Response(status_code=status, headers=list(lines.items()), reason=b"")
        await self._send(self.http.send(response) or b"")
        for part in parts:
            await self._send(part)

    async def _send(self, data: Buffer) -> None:
        loop = asyncio.get_running_loop()
        if len(data) > _PIECE:
            sending = loop.run_in_executor(self.senders, self._send_large, memoryview(data))
            try:
                await asyncio.shield(sending)
            except asyncio.CancelledError:  # the socket is closed once no thread uses it
                with suppress(OSError):
                    self.sock.shutdown(socket.SHUT_RDWR)
                await asyncio.wait([sending])
                raise
            return
        async with asyncio.timeout(_STALLED):
            await loop.sock_sendall(self.sock, data)

    def _send_large(self, view: memoryview) -> None:
        """Send in a thread, which costs half of what waiting for a socket in the loop does."""
        self.sock.settimeout(_STALLED)
        try:
            for start in range(0, len(view), _PIECE):
                self.sock.sendall(view[start : start + _PIECE])
        finally:
            self.sock.setblocking(False)

    async def linger(self) -> None:
        """Read what still comes; closed before, the client would lose the answer as well."""
        loop, left = asyncio.get_running_loop(), _LINGER_BYTES
        with suppress(OSError):  # it has left, or says more than is waited for
            self.sock.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(_LINGER_SECONDS):
                while left > 0 and (data := await loop.sock_recv(self.sock, 1 << 16)):
                    left -= len(data)


class Request:
    """A request whose sender may ask; its body is read when a server wants it."""

    def __init__(self, head: h11.Request, connection: _Connection) -> None:
        self.method, self.path = head.method.decode(), head.target.decode("latin-1")
        self.headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
        self._connection = connection

    def must_be(self, method: str) -> None:
        """Raise Refused for another method."""
        if self.method != method:
            raise Refused(405, f"{self.path} is asked with {method}, not {self.method}")

    async def body(self, most: int) -> bytes:
        """Return the body.

        Raises:
            Refused: it has more than `most` bytes, does not say how many, or does not come.
        """
        if "content-length" not in self.headers or "transfer-encoding" in self.headers:
            raise Refused(411, "a request says how long it is: Content-Length is missing")
        if (size := int(self.headers["content-length"])) > most:
            raise Refused(413, f"a body of {size:,} bytes, and this server reads {most:,} at most")
        found = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                await self._connection.invite_body()
                while not isinstance(event := await self._connection.event(), h11.EndOfMessage):
                    found += event.data
        except TimeoutError:
            raise Refused(408, f"the body did not come in {_BODY_SECONDS:g} seconds") from None
        return bytes(found)


class WebServer(ABC):
    """Answers at `url` while `serve_forever` runs; `shutdown` and `server_close` end it."""

    at_once = 64
    """Requests that are worked on and answered together; of others, no body is in memory."""

    def __init__(
        self, host: str, port: int, *, token: str | None = None, hosts: Collection[str] = ()
    ) -> None:
        """Listen.

        Args:
            host, port: where; port 0 takes a free one, and the host 0.0.0.0 lets other machines
                ask.
            token: which those who ask must have; None: that of SPEC_SERVER_TOKEN, else a new one,
                in a file that clients of the same user find.
            hosts: names under which it is asked, beside addresses and the name of the machine:
                that of a proxy before it, if requests still have it.

        Raises:
            OSError: the port is taken, or may not be used. ConfigError: the token is none, or its
                file cannot be written.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # many requests of a capture come together; more than these would be refused
        self._socket = socket.create_server((host, port), family=family, backlog=1024)
        self._socket.setblocking(False)
        self.host, self.port = self._socket.getsockname()[:2]
        try:
            self._token = ServerToken(self.port, token)
        except BaseException:
            self._socket.close()
            raise
        self._hosts = (*hosts, host)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping, self._ended = threading.Event(), threading.Event()
        self._ended.set()

    @property
    def url(self) -> str:
        """Where it listens."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    @property
    def token(self) -> str:
        """The access token that requests must have."""
        return self._token.value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.server_close()

    def serve_forever(self) -> None:
        """Answer requests until `shutdown`."""
        self._ended.clear()
        try:
            asyncio.run(self._serve())
        finally:
            self._loop = None
            self._ended.set()

    def shutdown(self) -> None:
        """Make `serve_forever` return, and wait for that; requests on their way are cut."""
        self._stopping.set()
        if (loop := self._loop) is not None:
            with suppress(RuntimeError):  # it has ended meanwhile
                loop.call_soon_threadsafe(self._stop.set)
        self._ended.wait()

    def server_close(self) -> None:
        """Stop listening, and delete the file of the access token."""
        self._socket.close()
        self._token.close()

    @abstractmethod
    async def respond(self, request: Request) -> Answer:
        """Return the answer to a request; Refused: it gets none."""

    # -- connections ------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._senders = ThreadPoolExecutor(_SENDERS, "sender")
        self._stop, self._work = asyncio.Event(), asyncio.Semaphore(self.at_once)
        self._open = set[asyncio.Task[None]]()
        self._silent = dict[asyncio.Task[None], float]()  # without a request yet; since when
        self._loop = asyncio.get_running_loop()
        if self._stopping.is_set():
            return
        accepting = asyncio.create_task(self._accept(self._loop))
        await self._stop.wait()
        for task in (accepting, *self._open):
            task.cancel()
        await asyncio.gather(accepting, *self._open, return_exceptions=True)
        self._senders.shutdown(wait=False, cancel_futures=True)

    async def _accept(self, loop: asyncio.AbstractEventLoop) -> NoReturn:
        while True:
            while len(self._open) >= _CONNECTIONS:
                self._close_a_silent_one(loop)
                await asyncio.wait(self._open, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
            await self._knock(loop)
            try:
                sock, _ = self._socket.accept()
            except BlockingIOError:  # it has left again
                continue
            except OSError as error:  # such as no file descriptor
                log.info("a connection was not taken (%s)", error)
                self._close_a_silent_one(loop)
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            task = asyncio.create_task(self._one(sock))
            self._open.add(task)
            self._silent[task] = loop.time()
            task.add_done_callback(partial(self._forget, sock))

    async def _knock(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for a connection; `sock_accept` of a loop that ends would lose one."""
        coming = asyncio.Event()
        loop.add_reader(self._socket, coming.set)
        try:
            await coming.wait()
        finally:
            loop.remove_reader(self._socket)

    def _close_a_silent_one(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make room: those who open connections and say nothing do not keep others out."""
        task, since = next(iter(self._silent.items()), (None, 0.0))
        if task is not None and loop.time() - since > _FRESH:
            task.cancel()

    def _forget(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._silent.pop(task, None)
        sock.close()

    async def _one(self, sock: socket.socket) -> None:
        """Answer the request of a connection."""
        connection = _Connection(sock, self._senders)
        try:
            async with AsyncExitStack() as work:
                status, answer = await self._answer(connection, work)
                await connection.send(status, answer.headers, answer.parts)
                answer.sent()
            await connection.linger()
        except (OSError, h11.LocalProtocolError) as error:
            log.info("a client left before it had its answer (%s)", error or type(error).__name__)

    async def _answer(self, connection: _Connection, work: AsyncExitStack) -> tuple[int, Answer]:
        task = asyncio.current_task()
        assert task is not None
        try:
            try:
                async with asyncio.timeout(_HEAD_SECONDS):
                    head = await connection.event()
            except TimeoutError:
                text = f"no whole request in {_HEAD_SECONDS:g} seconds"
                raise Refused(408, text) from None
            finally:
                self._silent.pop(task, None)
            request = Request(head, connection)
            self._check(request)
            await work.enter_async_context(self._work)
            return 200, await self.respond(request)
        except Refused as error:
            status, text = error.status, error.text
        except h11.RemoteProtocolError as error:
            status, text = error.error_status_hint, f"this is no request of HTTP ({error})"
        except OSError:
            raise
        except Exception as error:  # of what answers: said to who asked, and here
            log.exception("a request failed")
            status, text = 500, f"{type(error).__name__}: {error}"
        return status, Answer([text.encode()], {"Content-Type": "text/plain; charset=utf-8"})

    def _check(self, request: Request) -> None:
        """Raise Refused unless the sender may ask."""
        headers = request.headers
        if not is_own_host(headers.get("host", ""), self._hosts) or "origin" in headers:
            raise Refused(
                403,
                "this server is asked by its address or the name of its machine, and by no web "
                "page. Behind a proxy that keeps the name of its own in Host, give that name to "
                "the server (hosts, or states_hosts of vLLM's connector)",
            )
        if (found := headers.get(PROTOCOL_HEADER.lower())) != PROTOCOL:
            raise Refused(
                426,
                f"this server speaks version {PROTOCOL} of its protocol, and the request "
                f"{f'version {found[:20]}' if found else 'an older one'}: install the same release "
                "of this package on both sides",
            )
        given = headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, f"Bearer {self.token}".encode()):
            raise Refused(401, f"the access token is missing or another one ({TOKEN_VARIABLE})")
