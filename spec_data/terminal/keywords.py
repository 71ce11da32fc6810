"""Options as keyword arguments of the Python functions: from plain values to an option class.

The option classes of the commands are the one definition of names, defaults, types and help. A
function that takes `**options` is decorated with `takes_options`, which shows them in its signature
and docstring, and builds the class with `from_keywords`.
"""

import dataclasses
import functools
import inspect
import json
import os
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from spec_data.shards.errors import OptionError, SpecDataError
from spec_data.terminal.config import from_dict, in_words_of
from spec_data.terminal.console import nearest

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


def from_keywords(cls: type[T], given: Mapping[str, Any], function: str) -> T:
    """Build the option class `cls` from the keyword arguments of a function.

    Raises:
        OptionError: an unknown keyword. ConfigError: a value of the wrong type or range.
    """
    return from_dict(cls, plain_values(cls, given, function), where=f"{function}()")


def plain_values(
    cls: type, given: Mapping[str, Any], function: str, without: Collection[str] = ()
) -> dict[str, Any]:
    """Return keyword arguments as the plain values that a config file would hold.

    Paths become texts, and numbers of numpy or torch become those of Python. For an option that is
    one text, a list becomes a text with commas (layers) and a mapping becomes JSON
    (chat_template_kwargs). `without` are fields that are no keywords.

    Raises:
        OptionError: a keyword that `cls` does not have.
    """
    names = [f.name for f in dataclasses.fields(cls) if f.name not in without]
    for name in given:
        if name not in names:
            near = nearest(name, names)
            advice = f"did you mean {near}?" if near else f"its options: {', '.join(sorted(names))}"
            raise OptionError(f"{function}() has no option {name!r}; {advice}")
    hints = typing.get_type_hints(cls)
    return {name: _plain(value, _takes_several(hints[name])) for name, value in given.items()}


def _takes_several(annotation: Any) -> bool:
    parts = (annotation, *typing.get_args(annotation))
    return any(typing.get_origin(part) is tuple for part in parts)


def _plain(value: Any, several: bool) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    if isinstance(value, (list, tuple, range)):
        items = [_plain(item, False) for item in value]
        return items if several else ",".join(map(str, items))
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()  # a number of numpy or torch
    return value


def takes_options(cls: type, without: Collection[str] = (), more: str = "") -> Callable[[F], F]:
    """Show the fields of `cls` in the signature and docstring of a function with `**options`.

    Its errors name options as Python does. `without` are fields that it does not take; `more` is a
    line after the list.
    """

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        kept = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        skipped = {p.name for p in kept} | set(without)
        hints, lines, options = typing.get_type_hints(cls), [], []
        for field in dataclasses.fields(cls):
            if field.name in skipped:
                continue
            options.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=hints[field.name],
                )
            )
            text = f"{field.name}: {field.metadata['help']} (default: {field.default!r})"
            lines.append(f"    {text}")

        @functools.wraps(function)
        def called(*args: Any, **keywords: Any) -> Any:
            try:
                return function(*args, **keywords)
            except SpecDataError as error:
                error.args = (in_words_of(str(error), cls, f"{function.__name__}()"),)
                raise

        shown = signature.replace(parameters=[*kept, *options])
        called.__signature__ = shown  # type: ignore[attr-defined]
        head = inspect.cleandoc(function.__doc__ or "")
        called.__doc__ = "\n".join([head, "", "Options:", *lines, *([more] if more else []), ""])
        return called  # type: ignore[return-value]

    return decorate
