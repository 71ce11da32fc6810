"""The kinds of drafts by name, and the one way from a name to options and class. No torch here.

A name is that of a draft of this project, that of one which an installed package declares, or
says where the code is: FILE.py:NAME, MODULE:NAME (`spec_data.shards.draft_code`). Code runs when a
user names it, and only then: a run or a draft from elsewhere is read by its kind, and if that is
the kind of a draft from outside, the user must name the code again (--draft-code).
"""

import dataclasses
import importlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from spec_data.shards.draft_code import (
    OutsideDraft,
    installed_drafts,
    is_code,
    load_code,
    outside_draft,
    remember,
)
from spec_data.shards.errors import DraftError
from spec_data.terminal.console import did_you_mean
from spec_train.options.draft_options import DraftOptions
from spec_train.options.kinds import BUILT_IN, DRAFT_OPTIONS, folder_of


@dataclass(frozen=True)
class Kind:
    """A kind of draft."""

    name: str
    """As config.json has it."""
    options: type[DraftOptions]
    typed: str
    """As the user names it on the command line."""
    outside: Any = None
    """Its class, if it is from outside."""

    @property
    def code(self) -> str | None:
        """What --draft-code must name to read such a draft; None: nothing, its name is enough."""
        return self.typed if is_code(self.typed) else None

    def draft_class(self) -> Any:
        """Return the class; imports torch."""
        if self.outside is not None:
            return self.outside
        module, _, name = BUILT_IN[self.name].partition(":")
        return getattr(importlib.import_module(f"{folder_of(self.name)}.{module}"), name)


_REGISTERED: dict[str, Kind] = {}
_USED: set[str] = set()
"""The codes of classes from outside that a draft was read or made with."""
_OF_FAMILIES: dict[tuple[str, str], Any] = {}
"""By architecture of the target and kind: the class of a family, instead of this project's."""
_CODES: dict[Any, tuple[str, tuple[str, ...]]] = {}
"""By class from outside: its code as a user named it, and the architectures of the targets whose
class it is; () of a kind of its own."""


def kind_named(name: str) -> Kind:
    """Return the kind of draft that a user named; its code is loaded for it.

    Raises:
        MissingError: no such file or module.
        DraftError: there is no draft of that name; its code does not import; what it names lacks
            something that a draft needs, which is named.
    """
    if name in DRAFT_OPTIONS:
        return Kind(name, DRAFT_OPTIONS[name], name)
    if name in _REGISTERED:
        return _REGISTERED[name]
    found = outside_draft(name)
    if found is None:
        known = [*DRAFT_OPTIONS, *_REGISTERED, *installed_drafts()]
        raise DraftError(
            f"unknown draft {name!r}; drafts are {', '.join(sorted({*known}))}"
            f"{did_you_mean(name, known)}. A draft of your own is FILE.py:NAME or MODULE:NAME"
        )
    return _register(found, name)


def register_draft(draft: type, architecture: str | None = None) -> Kind:
    """Make a class of your own known by its `config_class.draft`, as --draft-code does.

    Needed in Python before `fit`, `load_draft` and others meet such a draft. With `architecture`,
    an entry of `architectures` of a target's config.json, the class is that of drafts for such
    targets only, instead of this project's class of the same kind, whose options it has.

    Raises:
        DraftError: the class lacks something that a draft needs, which is named.
    """
    name = f"{draft.__module__}:{draft.__qualname__}"
    if architecture is not None:
        return _register_for(draft, (architecture,), name)
    return _register(remember(draft, name), name)


def class_of(kind: Kind, architectures: Sequence[str]) -> Any:
    """Return the class of a kind of draft for a target; the first architecture with one decides."""
    own = (_OF_FAMILIES.get((name, kind.name)) for name in architectures)
    found = next((one for one in own if one is not None), None) or kind.draft_class()
    note_used(found)
    return found


def codes_of(drafts: Iterable[type]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the codes of those classes that are from outside, for `load_codes` in a new process.

    Raises:
        DraftError: that process cannot import a class, such as one that is made in a function.
    """
    codes = [_CODES[draft] for draft in drafts if draft in _CODES]
    for name, _ in codes:
        if is_code(name):
            load_code(name)
    return codes


def code_names(drafts: Iterable[type]) -> list[str]:
    """Return what --draft-code must name for those classes that are from outside."""
    return sorted({_CODES[draft][0] for draft in drafts if draft in _CODES})


def load_codes(codes: Iterable[tuple[str, tuple[str, ...]]]) -> None:
    """Make the classes from outside known that another process trains with."""
    for name, architectures in codes:
        if architectures:
            _register_for(load_code(name), architectures, name)
        else:
            kind_named(name)


def note_used(draft: type) -> None:
    """Note that a draft was read or made with this class."""
    _USED.add(getattr(draft, "code", ""))


def use_code(name: str) -> None:
    """Load the code of --draft-code; errors as of `kind_named`."""
    _USED.discard(_file_name(name))
    kind_named(name)


def unused_code(names: Sequence[str]) -> str | None:
    """Return what to say of names of --draft-code of which no draft was read or made; else None."""
    unused = [name for name in names if _file_name(name) not in _USED]
    if not unused:
        return None
    return f"--draft-code {', '.join(unused)}: this command read no draft of that code"


def _file_name(typed: str) -> str:
    """Return what files record of a typed code: no folder of this machine."""
    return re.split(r"[/\\]", typed)[-1]


def known_kind(name: str) -> Kind | None:
    """Return the kind of draft that a file names; code is loaded of an installed package only.

    None: there is none of that name, or a user must name its code first.
    """
    if name in DRAFT_OPTIONS or name in _REGISTERED or name in installed_drafts():
        return kind_named(name)
    return None


def kind_of_class(draft: type) -> Kind:
    """Return the kind of draft of a class; one from outside is registered."""
    for name in BUILT_IN:
        if (kind := kind_named(name)).draft_class() is draft:
            return kind
    return register_draft(draft)


def kind_of_options(options: Any) -> Kind:
    """Return the kind of draft whose options these are.

    Raises:
        DraftError: of a draft from outside that was not registered.
    """
    every = [kind_named(name) for name in DRAFT_OPTIONS]
    for kind in (*every, *_REGISTERED.values()):
        if type(options) is kind.options:
            return kind
    raise DraftError(
        f"{type(options).__name__} are options of no known draft; call "
        "spec_train.register_draft with its class first"
    )


def installed_names() -> dict[str, str]:
    """Return the names of drafts that installed packages declare, and the package of each."""
    points = installed_drafts().values()
    return {point.name: point.dist.name if point.dist else point.value for point in points}


def family_class(kind: str, code: str) -> Any:
    """Return the class of a family that a file of a kind names as its code; None: not known yet."""
    own = (found for (_, name), found in _OF_FAMILIES.items() if name == kind)
    return next((found for found in own if found.code == code), None)


# -- what a draft from outside must have -----------------------------------------------------------


def _register(found: OutsideDraft, typed: str) -> Kind:
    """Check a class from outside against the contract; make its kind known by both names."""
    if faults := list(_faults(found.code)):
        raise DraftError(f"{typed} is no complete kind of draft: {'; '.join(faults)}")
    if found.name in DRAFT_OPTIONS and found.code.architectures:
        return _register_for(found.code, found.code.architectures, typed)
    if found.name in DRAFT_OPTIONS:
        raise DraftError(
            f"{typed}: the kind {found.name!r} is one of spec-train; give its config_class.draft "
            "another name, or name in its `architectures` the targets whose drafts it is"
        )
    kind = Kind(found.name, found.code.options_class, typed, found.code)
    found.code.code = "" if kind.code is None else _file_name(kind.code)
    _CODES[found.code] = typed, ()
    _REGISTERED[found.name] = _REGISTERED[typed] = kind
    return kind


def _register_for(draft: Any, architectures: Sequence[str], typed: str) -> Kind:
    """Make a class that of the drafts of some targets; return its kind, one of this project."""
    kind = getattr(getattr(draft, "config_class", None), "draft", None)
    own = DRAFT_OPTIONS.get(kind) if isinstance(kind, str) else None
    faults = list(_faults(draft)) if isinstance(draft, type) else ["it is no class"]
    if own is None:
        faults.append(
            f"config_class.draft is {kind!r}, and only drafts of {', '.join(DRAFT_OPTIONS)} have a "
            "class for a family of targets"
        )
    elif getattr(draft, "options_class", None) is not own:
        faults.append(f"its options_class is not {own.__name__}, the options of `fit {kind}`")
    if faults or own is None:
        raise DraftError(f"{typed} is no {kind} draft for a family: {'; '.join(faults)}")
    draft.code = _file_name(typed)
    _CODES[draft] = typed, tuple(architectures)
    _OF_FAMILIES.update(dict.fromkeys(((name, str(kind)) for name in architectures), draft))
    return Kind(str(kind), own, str(kind))


def _faults(draft: Any) -> Iterator[str]:
    """Yield what a class lacks of the contract of `drafts.draft.Draft`."""
    from spec_train.drafts.config import DraftConfig  # torch: the class has imported it
    from spec_train.drafts.draft import Draft

    if not issubclass(draft, Draft):
        yield "it is no subclass of spec_train.drafts.Draft"
        return
    if lacking := sorted(draft.__abstractmethods__):
        yield f"it does not define {', '.join(lacking)}"
    options, config = getattr(draft, "options_class", None), draft.config_class
    if not (isinstance(options, type) and issubclass(options, DraftOptions)):
        yield "its options_class is no subclass of spec_train.drafts.DraftOptions"
    elif not _is_own_dataclass(options):
        yield f"{options.__name__} needs @dataclass(frozen=True, kw_only=True)"
    else:
        yield from _faults_of_options(options)
    if not issubclass(config, DraftConfig):
        yield "its config_class is no subclass of spec_train.drafts.DraftConfig"
    elif not _is_own_dataclass(config):
        yield f"{config.__name__} needs @dataclass(frozen=True, kw_only=True)"


def _faults_of_options(options: type[DraftOptions]) -> Iterator[str]:
    lacking = [f.name for f in dataclasses.fields(options) if f.default is dataclasses.MISSING]
    if lacking:
        yield f"options without a default: {', '.join(lacking)}"
    elif not hasattr(options, options.rounds):
        yield f"{options.__name__} has no {options.rounds}: the tokens that a round drafts"


def _is_own_dataclass(kind: type) -> bool:
    return "__dataclass_fields__" in vars(kind)
