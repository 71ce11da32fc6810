"""Which loss of one's own a run has: a text that names it, and the function that it names.

A text is FILE.py:NAME or MODULE:NAME; `#` and the digest of its source follow, so that a run that
resumes, or a fit.json that is used again, notices another loss. No torch here.
"""

import contextlib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_data.shards.errors import ConfigError, an

_FLAG = "--loss-fn"
_KNOWN: dict[str, Callable[..., Any]] = {}  # by text, of this process
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def named_loss(given: str | os.PathLike[str] | Callable[..., Any]) -> str:
    """Return the text of a loss: of FILE.py:NAME, of MODULE:NAME, or of a function in memory.

    Raises:
        ConfigError: there is no such function, or its source is not that of the digest.
    """
    if callable(given):
        text = f"{_module_of(given)}:{_name_of(given)}#{_digest(_source_of(given))}"
        _KNOWN[text] = given
        return text
    given = os.fspath(given)
    if given in _KNOWN:
        return given
    place, _, digest = given.partition("#")
    where, colon, name = place.rpartition(":")
    if not colon or not where or not name:
        raise ConfigError(f"{_FLAG} {given}: expected FILE.py:NAME or MODULE:NAME")
    if where.endswith(".py"):
        where = str(Path(where).expanduser().absolute())
        module = _loaded(where, given)
    else:
        module = _imported(where, given)
    try:
        found = functools.reduce(getattr, name.split("."), module)
    except AttributeError:
        raise ConfigError(f"{_FLAG} {given}: there is no {name} in {where}") from None
    if not callable(found):
        raise ConfigError(f"{_FLAG} {given}: {name} is {an(type(found).__name__)}, not a function")
    _check_arguments(found, given, name)
    file = getattr(module, "__file__", None) or ""
    readable = file.endswith(".py") and Path(file).is_file()  # not of a compiled module
    source = Path(file).read_text(encoding="utf-8") if readable else _source_of(found)
    now = {_digest(source), _digest(_source_of(found))}
    if digest and digest not in now:
        raise ConfigError(
            f"{_FLAG} {given}: the source of {name} has changed since; restore it, or leave out "
            f"#{digest} and begin another run"
        )
    text = f"{where}:{name}#{digest or _digest(source)}"
    _KNOWN[text] = found
    return text


def loss_function(text: str) -> Callable[..., Any]:
    """Return the function of a text of `named_loss`."""
    return _KNOWN[text] if text in _KNOWN else _KNOWN[named_loss(text)]


def identity(text: str) -> str:
    """Return what may not change while a run resumes: name and source, wherever the file lies."""
    return text.rpartition(":")[2]


def _check_arguments(found: Callable[..., Any], given: str, name: str) -> None:
    """Refuse a class, and a function that does not take what a loss is called with."""
    if inspect.isclass(found):
        raise ConfigError(f"{_FLAG} {given}: {name} is a class; name a function, or an object")
    try:
        inspect.signature(found).bind("logits", "teacher", "weights")
    except TypeError as error:
        raise ConfigError(
            f"{_FLAG} {given}: a loss is called with logits, teacher and weights, and {name} does "
            f"not take them: {error}"
        ) from None
    except ValueError:  # some functions written in C do not tell
        return


@contextlib.contextmanager
def _running(given: str) -> Iterator[None]:
    """Name the file whose code fails while it is loaded."""
    try:
        yield
    except Exception as error:  # of code that is not ours: anything
        raise ConfigError(
            f"{_FLAG} {given}: its code fails while it is loaded: {type(error).__name__}: {error}"
        ) from error


def _imported(name: str, given: str) -> ModuleType:
    try:
        if importlib.util.find_spec(name) is None:
            raise ImportError(f"No module named {name!r}")
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"{_FLAG} {given}: {error}; a loss in a file is FILE.py:NAME, and one that a program "
            "has in memory is handed over there: loss_fn=NAME"
        ) from None
    with _running(given):
        return importlib.import_module(name)


def _loaded(path: str, given: str) -> ModuleType:
    """Run a file as a module."""
    if not Path(path).is_file():
        raise ConfigError(f"{_FLAG} {given}: there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"loss_of_{_digest(path)}", path)
    assert spec is not None and spec.loader is not None  # of a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look for it there
    with _running(given):
        spec.loader.exec_module(module)
    return module


def _unwrapped(given: Any) -> Any:
    return given.func if isinstance(given, functools.partial) else given


def _name_of(given: Any) -> str:
    inner = _unwrapped(given)
    return str(getattr(inner, "__qualname__", type(inner).__qualname__))


def _module_of(given: Any) -> str:
    inner = _unwrapped(given)
    return str(getattr(inner, "__module__", type(inner).__module__))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _source_of(given: Any) -> str:
    """Return what decides a function as far as it can be read: source, defaults, closure, fields.

    Of a value that is no number or text, its type counts.
    """
    inner = _unwrapped(given)
    whole = inner if inspect.isroutine(inner) or inspect.isclass(inner) else type(inner)
    try:
        text = textwrap.dedent(inspect.getsource(whole))
    except (OSError, TypeError):  # of an interpreter's prompt
        code = getattr(whole, "__code__", None)
        text = repr(code and (code.co_code, code.co_names, _values(code.co_consts)))
    held: list[Any] = [getattr(inner, "__defaults__", None), getattr(inner, "__kwdefaults__", None)]
    for cell in getattr(inner, "__closure__", None) or ():
        held.append(_values(cell.cell_contents))
    if whole is not inner:
        held.append(_values(vars(inner)))
    if isinstance(given, functools.partial):
        held += [_values(given.args), _values(given.keywords)]
    return text + repr([_values(value) for value in held])


def _values(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return [_values(part) for part in value]
    if isinstance(value, dict):
        return {str(name): _values(part) for name, part in value.items()}
    if inspect.isfunction(value):
        return _source_of(value)
    return re.sub(r" at 0x[0-9a-f]+", "", repr(type(value)))
