"""A folder on remote storage: whole objects are read and written, with retries, through fsspec.

An error that may pass (a reset connection, status 500, a read that ends early) is tried again with
growing pauses; a missing object and refused credentials raise at once. No library is imported
before a storage is used.
"""

import contextlib
import errno
import functools
import os
import random
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from spec_data.shards.errors import ConfigError, RunError

T = TypeVar("T")

PAUSES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0)
"""Seconds between two tries, each with up to as much again at random."""
_ASKED_AT_ONCE = 16
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
_FINAL = (
    *(FileNotFoundError, FileExistsError, RunError, ConfigError),
    *(TypeError, AttributeError, NotImplementedError, MemoryError),
)

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(/?)")  # two letters at least: C:/ is a drive


SCHEMES = {
    "s3": "s3fs",
    "gs": "gcsfs",
    "hf": "huggingface_hub",
    "https": "aiohttp",
    "http": "aiohttp",
    "memory": "fsspec",
}
"""Kinds of storage that are read, and what fsspec imports for each."""
_WRITABLE = ("s3", "memory")  # that gs creates objects once was not tried
_ADVICE = {"file": "write the local path without it", "gcs": "write gs://"}


def scheme_of(text: str | Path) -> str | None:
    """Return the scheme of a URL in lower case; None: the text is a local path.

    A `Path` of a URL has one slash, which is accepted unless there is such a directory.
    """
    match = _SCHEME.match(str(text))
    if not match or (not match[2] and Path(f"{match[1]}:").is_dir()):
        return None
    return match[1].lower()


def check_dataset_url(flag: str, url: str | Path, write: bool = False) -> None:
    """Check that a URL names storage that this package can read (or write, with `write`).

    Raises:
        ConfigError: it does not; the message names the option `flag`.
    """
    scheme = scheme_of(url) or ""
    if scheme not in SCHEMES:
        usual = ", ".join(f"{name}://" for name in SCHEMES if name != "memory")
        advice = _ADVICE.get(scheme, f"use one of {usual}, or the local path of a mount")
        raise ConfigError(f"{flag} {url}: {scheme}:// is not supported; {advice}")
    if write and scheme not in _WRITABLE:
        raise ConfigError(
            f"{flag} {url}: {scheme}:// is read-only here; write to s3://, or to a local "
            "directory, and upload that"
        )
    rest = normal_url(url).partition("://")[2]
    checked = rest.partition("/")[0] if scheme == "hf" else rest  # the Hub has NAME@REVISION
    dots = {".", ".."} & set(rest.split("/"))
    if {"?", "#"} & set(rest) or "@" in checked or dots or not rest:
        raise ConfigError(
            f"{flag} {url}: expected {scheme}://NAME/FOLDER, without . and .., user, password, "
            "query or fragment; credentials come from the library's own places (docs/remote.md)"
        )


def normal_url(url: str | Path) -> str:
    """Return a URL in one form: lower-case scheme, two slashes, none at the end."""
    scheme, _, rest = str(url).partition(":")
    return f"{scheme.lower()}://{rest.strip('/')}"


SOURCES_VARIABLE = "SPEC_DATA_REMOTE_SOURCES"
"""Environment variable with the storage, such as s3://bucket, that views may name as their sources;
several are separated by commas."""


def check_view_sources(view: str, sources: Sequence[str]) -> None:
    """Check that a view may read what it names; nothing is asked.

    What is read on remote storage is read with the user's credentials. So a view that somebody else
    made may name local datasets, or such as lie beside it on the storage that it was read from.

    Raises:
        ConfigError: it names other storage, and SPEC_DATA_REMOTE_SOURCES does not.
    """
    if word := words_for_sources(view, sources):
        raise ConfigError(
            f"{view}: a view whose sources lie on other storage: {word.partition('=')[2]}. They "
            f"would be read with your credentials. If you trust the view: {word}"
        )


def words_for_sources(view: str, sources: Sequence[str]) -> str:
    """Return what allows a view to read its sources on remote storage; nothing: it may."""
    given = os.environ.get(SOURCES_VARIABLE, "").split(",")
    allowed = [normal_url(url.strip()) for url in given if url.strip()]
    asked = []
    for source in dict.fromkeys(sources):
        if scheme_of(source) is None or _owner(source) == _owner(view):
            continue
        url = normal_url(source)
        if not any(url == one or url.startswith(f"{one.rstrip('/')}/") for one in allowed):
            asked.append(_owner(source))
    return f"export {SOURCES_VARIABLE}={','.join(dict.fromkeys(asked))}" if asked else ""


def _owner(url: str) -> str:
    """Return the bucket or host of a URL, of hf:// the user's folder; of a path an empty text."""
    if scheme_of(url) is None:
        return ""
    scheme, _, rest = normal_url(url).partition("://")
    return f"{scheme}://" + "/".join(rest.split("/")[: 2 if scheme == "hf" else 1])


class Storage:
    """The objects below one URL. Names are relative to it, with slashes.

    What asks the storage raises ConfigError (no access) or RunError (all tries failed);
    `read` and `download` raise FileNotFoundError where there is no such object.
    """

    def __init__(self, url: str | Path, flag: str = "--data", write: bool = False) -> None:
        """Make the client; nothing is read.

        Raises:
            ConfigError: the URL is not supported, or a library that it needs is not installed.
        """
        check_dataset_url(flag, url, write)
        self._write = write
        self.url = normal_url(url)
        module = SCHEMES[scheme_of(self.url) or ""]
        if find_spec(module) is None:
            raise ConfigError(
                f"{flag} {self.url}: {module} is not installed; run: pip install {module}"
            )
        from fsspec.core import url_to_fs  # here: local datasets do not need it

        options: dict[str, Any] = {}
        if not self.lists:
            from aiohttp import ClientTimeout

            # a shard may take longer than aiohttp's five minutes; proxies are those of the machine
            timeout = ClientTimeout(total=None, sock_connect=30, sock_read=60)
            options["client_kwargs"] = {"timeout": timeout, "trust_env": True}
        self._system: Any
        self._system, root = url_to_fs(self.url, use_listings_cache=False, **options)
        self._root = root.rstrip("/")
        # s3fs asks for the size of an object that it reads in parts; one request is enough here
        self._whole = {"max_concurrency": 1} if self.url.startswith("s3://") else {}

    @property
    def lists(self) -> bool:
        """Whether the storage can list objects; web servers cannot."""
        return not self.url.startswith(("http://", "https://"))

    def where(self, name: str) -> str:
        """Return the URL of an object, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def read(self, name: str) -> bytes:
        """Read a whole object."""
        return self._tried(name, lambda: self._system.cat_file(self._path(name), **self._whole))

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes; None: there is none."""
        try:
            info = self._tried(name, lambda: self._system.info(self._path(name)))
        except FileNotFoundError:
            return None
        if info.get("type") == "directory":
            return None
        if info.get("size") is None:
            raise RunError(
                f"{self.where(name)}: the server does not say how large it is (Content-Length); "
                "it must serve plain files"
            )
        return info["size"]

    def sizes_of(self, names: Sequence[str]) -> dict[str, int]:
        """Return the sizes of those objects that exist, where the storage cannot list them."""
        with ThreadPoolExecutor(_ASKED_AT_ONCE, thread_name_prefix="sizes") as pool:
            sizes = list(pool.map(self.size, names))
        return {name: size for name, size in zip(names, sizes, strict=True) if size is not None}

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Return the objects below a folder with their sizes; empty: there are none."""
        prefix = self._path(folder)
        try:
            objects = self._tried(folder, lambda: self._system.find(prefix, detail=True))
        except FileNotFoundError:
            return {}
        root = len(self._root) + 1
        names = {path[root:]: info["size"] for path, info in objects.items()}
        # without the empty objects by which consoles show a folder
        return {name: size for name, size in names.items() if name and not name.endswith("/")}

    def write(self, name: str, content: bytes | str | Path, create: bool = False) -> bool:
        """Write an object from bytes, text or a local file; others see the old one or the new one.

        With `create`, it is not replaced: False if it exists, perhaps by a try of this call whose
        answer was lost.
        """
        path, mode = self._path(name), {"mode": "create"} if create else {}
        data = content.encode() if isinstance(content, str) else content

        def put() -> None:
            if isinstance(data, bytes):
                self._system.pipe_file(path, data, **mode)
            else:
                self._system.put_file(str(data), path, **mode)
                size = data.stat().st_size
                if not create and (arrived := self._system.info(path)["size"]) != size:
                    raise EOFError(f"{arrived:,} of {size:,} bytes arrived")

        def put_new() -> None:
            try:
                put()
            except OSError as error:  # s3fs tells it by a part of the answer that only AWS sends
                answer = getattr(error.__cause__, "response", None)
                about = answer.get("ResponseMetadata", {}) if isinstance(answer, dict) else {}
                if about.get("HTTPStatusCode") == HTTPStatus.PRECONDITION_FAILED:
                    raise FileExistsError from error
                raise

        try:
            self._tried(name, put_new if create else put)
            return True
        except FileExistsError:
            return False

    def download(self, name: str, file: Path, stop: threading.Event | None = None) -> None:
        """Copy an object to a local file; `stop` ends it while it runs, with a RunError.

        Raises:
            OSError: the local disk is full.
        """
        from fsspec.callbacks import Callback

        class Stoppable(Callback):
            def relative_update(self, inc: int = 1) -> None:
                if stop is not None and stop.is_set():
                    raise RunError(f"{name}: the download was stopped")

        file.parent.mkdir(parents=True, exist_ok=True)
        path = self._path(name)
        copy = functools.partial(self._system.get_file, path, str(file), callback=Stoppable())
        self._tried(name, copy, stop)

    def delete(self, name: str) -> None:
        """Delete an object, unless it is gone already."""
        with contextlib.suppress(FileNotFoundError):
            self._tried(name, lambda: self._system.rm_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _tried(self, name: str, call: Callable[[], T], stop: threading.Event | None = None) -> T:
        """Call until it succeeds; see the module for which errors are tried again."""
        stop = stop or threading.Event()
        for pause in (*PAUSES, None):
            try:
                return call()
            except FileNotFoundError as error:
                if self._write and "bucket does not exist" in str(error):
                    raise ConfigError(f"{self.where(name)}: {error}; create it first") from None
                raise
            except _FINAL:
                raise
            except Exception as error:
                if isinstance(error, OSError) and error.errno in DISK_FULL:
                    raise
                words = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                if _refused(error):
                    advice = (
                        "renew or set the credentials where the library looks for them "
                        "(docs/remote.md), and run the same command again"
                        if self.lists
                        else "web servers are read without a password; download the dataset"
                    )
                    raise ConfigError(
                        f"{self.where(name)}: access refused ({words}); {advice}"
                    ) from None
                if pause is None:
                    raise RunError(
                        f"{self.where(name)}: {len(PAUSES) + 1} tries failed, the last with: "
                        f"{words}. Run the same command again when the storage answers"
                    ) from None
                if stop.wait(pause * (1 + random.random())):
                    raise RunError(f"{name}: the download was stopped") from None
        raise AssertionError("unreachable")


def _refused(error: Exception) -> bool:
    """Tell whether the storage refused the user, and not only this try."""
    response = getattr(error, "response", None)
    status = getattr(error, "status", None) or getattr(response, "status_code", None)
    # S3 says EINVAL where it may not say why, as to HEAD with expired credentials
    invalid = isinstance(error, OSError) and error.errno == errno.EINVAL
    name = type(error).__name__
    return (
        isinstance(error, PermissionError)
        or invalid
        or status in (401, 403)
        or "Credential" in name
    )
