"""Drafts whose code is no part of the two programs: who they are, and how their code is loaded.

Such a draft has one of three names:

    medusa              of an installed package, which has an entry point of the group GROUP
    my_drafts.medusa:Medusa    a class in a module that Python finds
    medusa.py:Medusa    a class in a file

Code runs only because a user named it: by one of the last two names, or by the name of a draft that
a package declares which the user installed. The name in a draft's config.json is never enough.
"""

import hashlib
import importlib
import importlib.util
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from spec_data.shards.errors import DraftError, MissingError

GROUP = "spec_train.drafts"
"""The group of entry points by which packages declare drafts."""
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True)
class OutsideDraft:
    """A draft from outside: what it is called, and how many captured layers it reads."""

    name: str
    """The kind of draft, as its config.json has it."""
    layers: int
    """How many layers it reads by its recipe; 0: the final hidden states alone."""
    code: Any
    """The class."""


_LOADED: dict[str, OutsideDraft] = {}


def installed_drafts() -> dict[str, EntryPoint]:
    """Return the entry points of drafts of installed packages, by name; nothing is imported."""
    return {point.name: point for point in entry_points(group=GROUP)}


def is_code(name: str) -> bool:
    """Return whether a name says where code is: FILE.py:NAME or MODULE:NAME."""
    return ":" in name


def outside_draft(name: str) -> OutsideDraft | None:
    """Return the draft that a user named, whose code is loaded for it; None: there is no such name.

    Raises:
        MissingError: no such file or module.
        DraftError: the code does not import, lacks that name, or what it names is no draft.
    """
    if name in _LOADED:
        return _LOADED[name]
    if is_code(name):
        return remember(load_code(name), name)
    point = installed_drafts().get(name)
    return None if point is None else remember(load_code(point.value), name)


def remember(code: Any, name: str) -> OutsideDraft:
    """Note the draft that a class is, so that its own name is enough from now on.

    Raises:
        DraftError: it says no name, or no number of layers. `name` is what the user typed.
    """
    own = getattr(getattr(code, "config_class", None), "draft", None)
    layers = getattr(code, "recipe_layers", None)
    if not isinstance(code, type) or not isinstance(own, str) or not isinstance(layers, int):
        raise DraftError(
            f"{name}: {code!r} is no kind of draft: name a subclass of spec_train.drafts.Draft "
            "with a config_class whose field `draft` names the kind (docs/own-draft.md)"
        )
    if not _NAME.fullmatch(own):
        raise DraftError(
            f"{name}: its config_class.draft is {own!r}; a name has small letters, digits and _"
        )
    draft = OutsideDraft(own, layers, code)
    _LOADED[own] = _LOADED[name] = draft
    return draft


def load_code(name: str) -> Any:
    """Import FILE.py:NAME or MODULE:NAME; return what it names. Errors as of `outside_draft`."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute.isidentifier():
        raise DraftError(f"{name}: expected FILE.py:NAME or MODULE:NAME, with the name of a class")
    module = _of_file(place) if place.endswith(".py") else _of_module(place)
    if not hasattr(module, attribute):
        classes = [n for n, v in vars(module).items() if isinstance(v, type) and v.__module__ ==
                   module.__name__]  # fmt: skip
        raise DraftError(
            f"{name}: there is no {attribute} in it; its classes: {', '.join(classes) or 'none'}"
        )
    return getattr(module, attribute)


def _of_module(name: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise MissingError(
            f"{name}: Python finds no such module; install its package, or name a file: "
            "FILE.py:NAME"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:  # of code that is not ours: anything
        raise DraftError(f"{name}: does not import: {_where(error)}") from error


def _of_file(path: str) -> ModuleType:
    """Import a file, once in this process; what it imports itself may stand beside it."""
    file = Path(path).expanduser().resolve()
    if not file.is_file():
        raise MissingError(f"{path}: there is no such file")
    digest = hashlib.sha256(str(file).encode()).hexdigest()[:8]
    name = f"draft_code_{file.stem}_{digest}"  # the same in every process: options are sent there
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    try:
        found.loader.exec_module(module)
    except Exception as error:  # of code that is not ours: anything
        del sys.modules[name]
        raise DraftError(f"{path}: does not import: {_where(error)}") from error
    return module


def _where(error: Exception) -> str:
    """Return the error of code that was imported, and the line where it stands."""
    if isinstance(error, SyntaxError):
        return f"line {error.lineno}: {error.msg}"
    trace, lines = error.__traceback__, list[str]()
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if "importlib" not in file and file != __file__:
            lines.append(f"{Path(file).name}, line {trace.tb_lineno}")
        trace = trace.tb_next
    at = f" ({lines[0]})" if lines else ""
    return f"{type(error).__name__}: {error}{at}"
