"""What a Python program hands to a command as an object, instead of a file, under a name.

Commands pass names on. An object is kept as long as a call that has named it: other calls, in other
threads or inside this one, may name the same object, or end earlier.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Generic, TypeVar

T = TypeVar("T")
_named: ContextVar[list[tuple["Kept", str]] | None] = ContextVar("named", default=None)


class Kept(Generic[T]):
    """Objects of one sort by name."""

    def __init__(self) -> None:
        self._objects: dict[str, T] = {}
        self._calls: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """Return the number of names."""
        return len(self._objects)

    def keep(self, name: str, thing: T) -> str:
        """Keep an object under a name until the call ends that is running; return the name."""
        with self._lock:
            self._objects[name] = thing
            self._calls[name] += 1
        if (names := _named.get()) is not None:
            names.append((self, name))
        return name

    def get(self, name: str) -> T | None:
        """Return the object of a name, in any thread; None: it is no such name."""
        return self._objects.get(name)

    def drop(self, name: str) -> None:
        """Forget a name for one of the calls that have it."""
        with self._lock:
            self._calls[name] -= 1
            if self._calls[name] <= 0:
                del self._calls[name], self._objects[name]


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget at the end what is named inside."""
    names: list[tuple[Kept, str]] = []
    token = _named.set(names)
    try:
        yield
    finally:
        _named.reset(token)
        for kept, name in names:
            kept.drop(name)
