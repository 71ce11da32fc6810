"""What a user gave, and what a preset, a dataset or a draft decided: one rule for all options.

A field of an object of options is *given* if it was named when the object was made, with a value
that is not None, nor "" where that is the default: on the command line, in a file of --config, or
in Python. It does not matter whether another value equals the default. Whatever fills options
(`decided`) fills only the others.
"""

import copy
import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import InitVar, dataclass
from typing import Any, ClassVar, Self, TypeVar

from spec_data.terminal.rules import OneOf, Rule, check_rules
from spec_data.terminal.types import plain

T = TypeVar("T", bound="Options")


@dataclass(frozen=True, kw_only=True)
class Options:
    """A dataclass of options that knows which of its fields were given.

    `dataclasses.replace` keeps what was given; a field whose value it changes is given as well.
    Pass `made_of` to nobody: it is how `replace` hands over the object before.
    """

    made_of: InitVar["Options | None"] = None
    rules: ClassVar[tuple[Rule, ...]] = ()
    """What its fields need or exclude."""

    def __new__(cls, *, made_of: "Options | None" = None, **values: Any) -> Self:
        """Note which fields are named."""
        self = super().__new__(cls)
        named = {
            name
            for name, value in values.items()
            if value is not None and not is_no_text(value, getattr(cls, name, None))
        }
        if made_of is not None:
            changed = {n for n in named if values[n] is not getattr(made_of, n, None)}
            named = (set(made_of.given) & named) | changed
        self.__dict__.update(_given=frozenset(named), made_of=self)
        return self

    def __post_init__(self, made_of: "Options | None") -> None:
        """Give a field that is None its default, fill in, and refuse bad values."""
        for field in dataclasses.fields(self):
            value = plain(getattr(self, field.name))
            if value is None and field.default is not dataclasses.MISSING:
                value = field.default
            self._set(field.name, value)
        self.fill(made_of)
        self.validate()

    def fill(self, made_of: "Options | None") -> None:
        """Fill in what the object itself decides of what was not given."""

    def validate(self) -> None:
        """Bring values into their plain form; raise ConfigError for bad ones."""

    def check_rules(self) -> None:
        """Raise ConfigError for fields that mean nothing, or contradict each other."""
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        check_rules(self.rules, self.values(), self.given, defaults)

    @classmethod
    def alternatives(cls) -> list[tuple[str, ...]]:
        """Return the groups of fields of which one may be given."""
        return [rule.options for rule in cls.rules if isinstance(rule, OneOf)]

    @property
    def given(self) -> frozenset[str]:
        """The names of the fields that were given."""
        return typing.cast(frozenset[str], self.__dict__["_given"])

    def values(self) -> dict[str, Any]:
        """Return every field and its value."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def given_values(self) -> dict[str, Any]:
        """Return the fields that were given, and their values."""
        return {name: value for name, value in self.values().items() if name in self.given}

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)


def is_no_text(value: Any, default: Any) -> bool:
    """Return whether a value is the empty text that stands for "not given"."""
    return isinstance(value, str) and isinstance(default, str) and value == default == ""


def decided(options: T, **values: Any) -> T:
    """Return options in which `values` fill the fields that nobody gave; `given` stays as it was.

    Names that these options do not have are left out.
    """
    return changed(options, **free(options, values))


def free(options: Options, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `values` that are fields of the options which nobody gave."""
    own = {field.name for field in dataclasses.fields(options)} - options.given
    return {name: value for name, value in values.items() if name in own}


def changed(options: T, **values: Any) -> T:
    """Return options with other values; `given` stays as it was."""
    if not values:
        return options
    result = copy.copy(options)
    result.__dict__.update(values, made_of=result)
    result.validate()
    return result
