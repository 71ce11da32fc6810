"""Options that mean nothing without others, or beside others: as data, with one checker.

A condition is the name of an option that asks for something, or NAME=VALUE. An option asks for
something if it was given a value other than None, "", False or empty, and 0 if that is its default.
What it needs or excludes may come from a preset or a dataset: its value counts, unless it is the
default.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

from spec_data.shards.errors import ConfigError
from spec_data.terminal.types import comma_list, plain

F = TypeVar("F", bound=Callable[..., Any])
Values = Mapping[str, Any]
Conditions = str | tuple[str, ...]


@dataclass(frozen=True)
class Needs:
    """Options that are refused without one of others.

    Attributes:
        options: the condition, or several that must all hold; () always does.
        others: conditions of which one must hold.
        words: what is said otherwise, with {name} for values of options.
        idle: another value of `options` that asks for nothing.
    """

    options: Conditions
    others: Conditions
    words: str
    idle: Any = None

    def broken(self, values: Values, given: Set[str], defaults: Values) -> bool:
        """Return whether `values`, of which some were `given`, break the rule."""
        return self._asked(values, given, defaults) and not self._others(values, defaults)

    def _asked(self, values: Values, given: Set[str], defaults: Values) -> bool:
        return all(
            _name(c) in given
            and _holds(c, values, defaults)
            and plain(values[_name(c)]) != self.idle
            for c in conditions(self.options)
        )

    def _others(self, values: Values, defaults: Values) -> bool:
        return any(
            _holds(c, values, defaults) and ("=" in c or plain(values[c]) != plain(defaults[c]))
            for c in conditions(self.others)
        )


@dataclass(frozen=True)
class Excludes(Needs):
    """Options that are refused beside any of others; see `Needs`."""

    def broken(self, values: Values, given: Set[str], defaults: Values) -> bool:
        """Return whether `values`, of which some were `given`, break the rule."""
        return self._asked(values, given, defaults) and self._others(values, defaults)


@dataclass(frozen=True)
class OneOf:
    """Options of which one may be given: a typed one replaces the others of --config.

    Attributes:
        options: their names.
        words: what is said otherwise, with {given} for those given and {name} for values.
        idle: a value of them that counts as not given, besides None.
    """

    options: tuple[str, ...]
    words: str
    idle: Any = None

    def given_of(self, values: Values, given: Set[str]) -> list[str]:
        """Return those that were given."""
        idle = (None, self.idle)
        return [n for n in self.options if n in given and plain(values[n]) not in idle]

    def broken(self, values: Values, given: Set[str], defaults: Values) -> bool:
        """Return whether two of them were given."""
        return len(self.given_of(values, given)) > 1


Rule = Needs | Excludes | OneOf


def ruled(*rules: Rule) -> Callable[[F], F]:
    """Give a command rules about its arguments; write it below `command`."""

    def with_rules(function: F) -> F:
        function.__dict__["rules"] = rules
        return function

    return with_rules


def check_rules(rules: Iterable[Rule], values: Values, given: Set[str], defaults: Values) -> None:
    """Refuse options that mean nothing, or contradict each other.

    Args:
        rules: each is checked in its turn.
        values: of all options, also those that nobody gave.
        given: the names of those that were given.
        defaults: the values of all that nobody gave.

    Raises:
        ConfigError: the words of the first rule that is broken.
    """
    for rule in rules:
        if rule.broken(values, given, defaults):
            both = rule.given_of(values, given) if isinstance(rule, OneOf) else []
            typed = " and ".join(f"{_flag(n)} {comma_list(values[n])}" for n in both)
            raise ConfigError(rule.words.format_map({**values, "given": typed}))


def conditions(names: Conditions) -> tuple[str, ...]:
    """Return one condition or several as a tuple."""
    return (names,) if isinstance(names, str) else names


def _name(condition: str) -> str:
    return condition.partition("=")[0]


def _flag(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")


def _holds(condition: str, values: Values, defaults: Values) -> bool:
    """Return whether an option has the value of a condition, or asks for something."""
    name, equals, wanted = condition.partition("=")
    value = plain(values[name])
    if equals:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return value == float(wanted) if number else str(value) == wanted
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value != 0 or defaults.get(name) != 0
    if isinstance(value, (bool, str, list, tuple, dict, type(None))):
        return bool(value)
    return True  # rows of a corpus, a function
