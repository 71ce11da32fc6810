"""Who may ask a server of this project: those who have its access token, and no web page.

A server makes a token when it starts, and keeps it in a file that its user alone can read, as
Jupyter does. A client of the same user on the same machine, or with the same home directory, reads
it there. Where there is no such file in common, both have SPEC_SERVER_TOKEN.
"""

import contextlib
import ipaddress
import os
import re
import secrets
import socket
from collections.abc import Collection, Iterator
from pathlib import Path
from urllib.parse import quote, urlsplit

from spec_data.shards.errors import ConfigError
from spec_data.shards.files import CACHE_VARIABLE, cache_directory, temporary_name

TOKEN_VARIABLE = "SPEC_SERVER_TOKEN"
PROTOCOL_HEADER, PROTOCOL = "Spec-Protocol", "2"
"""Which form requests and answers have; the first one had neither a token nor this header."""
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # what the header of a request can hold


def checked_token(token: str, where: str) -> str:
    """Return an access token.

    Raises:
        ConfigError: it is too short, or a header cannot hold it.
    """
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"{where}: an access token has 16 to 512 letters, digits or . _ ~ + / = -, such as "
            "that of: openssl rand -hex 32"
        )
    return token


class ServerToken:
    """The access token of a server that listens at `port`; `close` deletes its file."""

    def __init__(self, port: int, given: str | None) -> None:
        """Take the given token, else that of SPEC_SERVER_TOKEN, else make one and its file.

        Raises:
            ConfigError: see `checked_token`; or the file cannot be written.
        """
        self._file: Path | None = None
        if token := given or os.environ.get(TOKEN_VARIABLE):
            self.value = checked_token(token, "token" if given else TOKEN_VARIABLE)
            return
        self.value = secrets.token_urlsafe(32)
        self._file = _token_file(socket.gethostname(), port)
        temporary = temporary_name(self._file)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with open(temporary, "x", encoding="ascii", opener=_private) as file:
                file.write(self.value)
            temporary.replace(self._file)
        except OSError as error:
            raise ConfigError(
                f"{self._file}: the access token of the server cannot be written "
                f"({error.strerror}). Set {CACHE_VARIABLE} to a folder that can be written, or "
                f"give server and client a token by {TOKEN_VARIABLE}"
            ) from None

    def close(self) -> None:
        """Delete the file, unless it is that of a later server."""
        with contextlib.suppress(OSError):
            if self._file is not None and self._file.read_text("ascii") == self.value:
                self._file.unlink()


def client_token(url: str, given: str | None) -> str | None:
    """Return the access token for the server at `url`, or None if nothing says it.

    Raises:
        ConfigError: see `checked_token`.
    """
    if token := given or os.environ.get(TOKEN_VARIABLE):
        return checked_token(token, "token" if given else TOKEN_VARIABLE)
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    for name in _machines(parts.hostname or ""):
        with contextlib.suppress(OSError, UnicodeDecodeError):
            token = _token_file(name, port).read_text("ascii").strip()
            if _TOKEN.fullmatch(token):
                return token
    return None


def no_entry(url: str) -> str:
    """Return what one does whose access token is missing or wrong."""
    port = urlsplit(url).port
    return (
        f"{url}: the server wants its access token. A client of the same user on the same machine "
        f"finds it by itself, in the file HOST-{port or 'PORT'} of {cache_directory('servers')}; "
        f"otherwise set {TOKEN_VARIABLE} to the same text for the server and for this command"
    )


def is_loopback(host: str) -> bool:
    """Whether a host name or address means this machine, also the 0.0.0.0 that servers print."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback or address.is_unspecified
    return host.lower().rstrip(".") == "localhost"


def is_own_host(header: str, names: Collection[str]) -> bool:
    """Whether the Host header of a request names this server.

    A page that a browser shows can reach a server by a name of its own that leads here (DNS
    rebinding), but by no address, and by no name of this machine.
    """
    try:
        host = (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    machine = socket.gethostname().lower()
    return host in {"localhost", machine, machine.partition(".")[0], *(n.lower() for n in names)}


def _machines(host: str) -> Iterator[str]:
    """Yield the names under which the machine of a URL may have written its token."""
    if is_loopback(host):
        host = socket.gethostname()
    yield host
    yield host.partition(".")[0]
    own = socket.gethostname()  # a URL has it in lower case, and perhaps with its domain
    if host.lower() == own.lower() or host.lower() == own.partition(".")[0].lower():
        yield own


def _token_file(machine: str, port: int) -> Path:
    return cache_directory("servers") / f"{quote(machine, safe='')}-{port}"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
