"""One way to ask servers: no redirects, a bound for every answer, and an end to the waiting.

A key or access token goes to the address that the user named and to no other. Proxies are those of
the environment (HTTP_PROXY, NO_PROXY), but none for this machine.
"""

import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urljoin, urlsplit

from torch import Tensor

from spec_data.exchange.access import PROTOCOL, PROTOCOL_HEADER, client_token, is_loopback
from spec_data.exchange.frames import CHECKSUM_HEADER, FrameError, Layout, receive
from spec_data.shards.errors import ConfigError

_PIECE = 1 << 20
_WORDS = 2000  # bytes that are read of a refusal


class NoAnswer(OSError):
    """Nothing answers, or the answer was cut or did not come in time."""


class Refusal(Exception):
    """A status other than 200: `status`, and `text` that can be shown."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {text}")
        self.status, self.text = status, text


class WrongAnswer(ValueError):
    """An answer that is not what was asked for."""


def check_url(url: str) -> str:
    """Return the URL of a server without a slash at its end.

    Raises:
        ConfigError: it is none of http or https, or holds a password.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or parts.username or parts.password or not url.isprintable() or " " in url:
        raise ConfigError(f"{url!r}: expected the URL of a server, such as http://host:8001")
    return url.rstrip("/")


class Response:
    """The body of an answer, whose length is known: `size` bytes."""

    def __init__(self, answer: http.client.HTTPResponse, size: int | None) -> None:
        self.headers, self.size, self._answer = answer.headers, size, answer

    def read_into(self, view: memoryview) -> None:
        """Fill `view` with the next bytes; NoAnswer: there are fewer."""
        while len(view):
            if not (got := self._answer.readinto(view[:_PIECE])):
                raise NoAnswer(f"the answer was cut {len(view):,} bytes before its end")
            view = view[got:]

    def read(self, most: int) -> bytes:
        """Return the whole body; WrongAnswer: it has more than `most` bytes."""
        found = bytearray()
        while piece := self._answer.read(min(_PIECE, most + 1 - len(found))):
            found += piece
            if len(found) > most:
                raise WrongAnswer(f"an answer of more than {most:,} bytes")
        if self.size is not None and len(found) < self.size:
            raise NoAnswer(f"the answer was cut {self.size - len(found):,} bytes before its end")
        return bytes(found)


@contextmanager
def asked(
    url: str,
    body: bytes | None = None,
    headers: Mapping[str, str] | None = None,
    *,
    method: str | None = None,
    seconds: float,
    most: int,
) -> Iterator[Response]:
    """Ask, and yield the answer while it is read.

    Args:
        body: of a POST; None: a GET, unless `method` says otherwise.
        seconds: for everything, to the last byte.
        most: bytes of the largest answer that is read.

    Raises:
        NoAnswer, Refusal, WrongAnswer: see there; also while the answer is read.
    """
    request = urllib.request.Request(url, body, dict(headers or {}), method=method)
    try:
        with _opener(url, time.monotonic() + seconds).open(request, timeout=seconds) as answer:
            size = answer.length  # None: in chunks
            if size is not None and size > most:
                raise WrongAnswer(f"an answer of {size:,} bytes, and {most:,} are asked for")
            yield Response(answer, size)
    except urllib.error.HTTPError as error:
        with error:
            raise Refusal(error.code, _words(error, url)) from None
    except (OSError, http.client.HTTPException) as error:  # the last: cut in its middle
        reason: Any = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, TimeoutError):
            reason = f"no whole answer in {seconds:g} seconds"
        raise NoAnswer(shown(str(reason) or type(reason).__name__)) from None


def ask(url: str, body: bytes | None = None, **options: Any) -> bytes:
    """Return the body of an answer; see `asked`."""
    with asked(url, body, **options) as answer:
        return answer.read(options["most"])


def own_headers(url: str, token: str | None) -> dict[str, str]:
    """Return the headers of a request to a server of this project.

    Raises:
        ConfigError: see `client_token`.
    """
    headers = {PROTOCOL_HEADER: PROTOCOL}
    if found := client_token(url, token):
        headers["Authorization"] = f"Bearer {found}"
    return headers


def check_protocol(answer: Response) -> None:
    """Raise WrongAnswer unless a server of this project and of this protocol has answered."""
    if (found := answer.headers[PROTOCOL_HEADER]) != PROTOCOL:
        what = f"version {shown(found)[:20]} of the protocol" if found else "an older release"
        raise WrongAnswer(
            f"what answers there is {what}, or another server, and this one speaks version "
            f"{PROTOCOL}: install the same release of this package on both sides"
        )


def ask_tensors(
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    check: Callable[[dict[str, Layout]], None],
    *,
    seconds: float,
    most: int,
) -> dict[str, Tensor]:
    """Return the tensors of an answer of a server of this project.

    `check` gets their layouts before values are read.

    Raises:
        NoAnswer, Refusal, WrongAnswer: see `asked`; WrongAnswer also for damage on the way.
    """
    with asked(url, body, headers, seconds=seconds, most=most) as answer:
        check_protocol(answer)
        if answer.size is None:
            raise WrongAnswer("an answer that does not say how long it is")
        try:
            tensors, digest = receive(answer.read_into, answer.size, check)
        except FrameError as error:
            raise WrongAnswer(f"its answer is damaged: {shown(str(error))}") from None
        if digest != answer.headers[CHECKSUM_HEADER]:
            raise WrongAnswer("its answer is damaged: the checksum is another one")
    return tensors


def shown(text: str) -> str:
    """Return words of a server as one line that a terminal can show."""
    return "".join(c if c.isprintable() else " " for c in text[:_WORDS]).strip()


def _words(error: urllib.error.HTTPError, url: str) -> str:
    """Return what a refusal says."""
    if error.code in (301, 302, 303, 307, 308):
        there = urljoin(url, error.headers.get("Location", ""))
        return f"it sends requests on to {shown(there)}, which is not followed: name that server"
    try:
        return shown(error.read(_WORDS).decode(errors="replace"))
    except (OSError, http.client.HTTPException):
        return "it did not come to its end"


def _opener(url: str, until: float) -> urllib.request.OpenerDirector:
    """Return what opens http or https, follows nothing, and waits `until` then."""
    opener = urllib.request.OpenerDirector()
    parts = urlsplit(url)
    for handler in (
        urllib.request.ProxyHandler({} if is_loopback(parts.hostname or "") else None),
        _Https(until) if parts.scheme == "https" else _Http(until),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


# A socket has a timeout for each piece: who sends a byte a minute would be waited for for ever.


def _wait(sock: socket.socket, until: float) -> None:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    if not left < (sock.gettimeout() or 0.0) < 1.1 * left + 0.01:  # a call of the system
        sock.settimeout(left)


class _Socket(socket.socket):
    until = 0.0

    def recv_into(self, *args: Any, **options: Any) -> int:
        _wait(self, self.until)
        return super().recv_into(*args, **options)


class _SecureSocket(ssl.SSLSocket):
    until: float | None = None  # during the handshake

    def recv_into(self, *args: Any, **options: Any) -> int:
        if self.until is not None:
            _wait(self, self.until)
        return super().recv_into(*args, **options)


class _Http(urllib.request.HTTPHandler):
    def __init__(self, until: float) -> None:
        super().__init__()
        self._until = until

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        until = self._until

        class Connection(http.client.HTTPConnection):
            def connect(self) -> None:
                super().connect()
                plain: socket.socket = self.sock
                self.sock = _Socket(plain.family, plain.type, plain.proto, plain.detach())
                self.sock.until = until
                _wait(self.sock, until)

        return self.do_open(Connection, req)


class _Https(urllib.request.HTTPSHandler):
    def __init__(self, until: float) -> None:
        context = ssl.create_default_context()
        context.sslsocket_class = _SecureSocket
        super().__init__(context=context)
        self._tls, self._until = context, until

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        until = self._until

        class Connection(http.client.HTTPSConnection):
            def connect(self) -> None:
                super().connect()
                secure: Any = self.sock
                secure.until = until

        return self.do_open(Connection, req, context=self._tls)
