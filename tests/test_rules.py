"""Every rule of options that need or exclude others, of both programs: each is planted."""

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from spec_data import cli
from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.terminal import command
from spec_data.terminal.config import flag
from spec_data.terminal.given import Options
from spec_data.terminal.rules import Excludes, OneOf, Rule, check_rules, conditions
from spec_train import cli as train_cli
from tests.terminal_tools import flags_of

Owner = Any  # a command, or a class of options


def owners() -> dict[str, tuple[Owner, set[str]]]:
    """Every command and class of options that has rules, with the flags that its words may name."""
    found: dict[str, tuple[Owner, set[str]]] = {}
    for program in (cli.PROGRAM, train_cli.PROGRAM):
        for words, entry in program.entries.items():
            hints = typing.get_type_hints(entry.function).values()
            classes = [k for k in hints if isinstance(k, type) and issubclass(k, Options)]
            for owner in (entry.function, *classes):
                if getattr(owner, "rules", ()):
                    name = owner.__name__ if owner in classes else " ".join(words)
                    flags = found.get(name, (owner, set[str]()))[1]
                    found[name] = owner, flags | set(flags_of(entry))
    return found


OWNERS = owners()


def defaults_of(owner: Owner) -> dict[str, Any]:
    if isinstance(owner, type):
        return {field.name: field.default for field in dataclasses.fields(owner)}
    return {name: p.default for name, p in inspect.signature(owner).parameters.items()}


def asking(condition: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    """Return an option and a value of it with which the condition holds."""
    name, equals, value = condition.partition("=")
    default = defaults[name]
    if equals:
        return name, type(default)(value)
    if isinstance(default, bool):
        return name, True
    if isinstance(default, (int, float)):
        return name, default + type(default)(1) if default >= 1 or not default else default / 2
    return name, ["x"] if isinstance(default, tuple) else "auto" if name == "tp_plan" else "x"


_UNLIKE = {"backend": "vllm", "supervision": "logits"}


def planted(rule: Rule, defaults: dict[str, Any]) -> Iterator[tuple[dict[str, Any], bool]]:
    """Yield what is given, and whether the rule refuses it."""
    own = dict(asking(c, defaults) for c in conditions(rule.options))
    if isinstance(rule, OneOf):
        for first, value in own.items():
            yield {first: value}, False
            yield from (({first: value, n: v}, True) for n, v in own.items() if n != first)
        return
    others = [dict([asking(c, defaults)]) for c in conditions(rule.others)]
    excludes = isinstance(rule, Excludes)
    if not any(defaults.get(n) == v for other in others for n, v in other.items()):
        yield own, not excludes
    else:  # such as a backend that is not the default one
        unlike = {n: _UNLIKE[n] for other in others for n in other if n not in own}
        yield own | unlike, not excludes
    for other in others:
        yield own | other, excludes


def test_the_commands_and_classes_with_rules():
    names = {"regenerate", "select", "generate", "eval", "doctor", "export", "vectors"}
    assert names | {"CaptureOptions", "EngineOptions", "Training", "SearchTraining"} <= set(OWNERS)


@pytest.mark.parametrize("name", OWNERS)
def test_every_rule_refuses_what_it_is_about_and_nothing_else(name):
    owner, flags = OWNERS[name]
    defaults = defaults_of(owner)
    for rule in owner.rules:
        seen = set()
        for given, refused in planted(rule, defaults):
            values = {k: "x" if v in _NO_DEFAULT else v for k, v in (defaults | given).items()}
            check_rules([rule], values, set(), defaults) if conditions(rule.options) else None
            seen.add(refused)
            try:
                check_rules([rule], values, set(given), defaults)
                assert not refused, (rule, given)
            except ConfigError as error:
                assert refused, (rule, given)
                typed = " and ".join(f"{flag(n)} {values[n]}" for n in rule.options if n in given)
                assert str(error) == rule.words.format_map(values | {"given": typed})
                words = set(re.findall(r"--[a-z][a-z-]*[a-z]", str(error)))
                assert words <= flags | {"--help"}, (words - flags, rule)
        assert seen == {True, False}, rule


_NO_DEFAULT = (inspect.Parameter.empty, dataclasses.MISSING)


@pytest.mark.parametrize("name", OWNERS)
def test_every_rule_is_checked_where_it_belongs(name, monkeypatch):
    monkeypatch.setattr(command, "checked", lambda name, value, hint: value)  # paths are not there
    owner, _ = OWNERS[name]
    defaults = defaults_of(owner)
    needed = {n: "x" for n, default in defaults.items() if default in _NO_DEFAULT}
    every = [rule.words.partition("{")[0] for rule in owner.rules]
    for rule in owner.rules:
        given = next(given for given, refused in planted(rule, defaults) if refused)
        with pytest.raises(SpecDataError) as refused:
            made = owner(**needed | given)
            made.check()
        said = str(refused.value)
        assert rule.words.partition("{")[0] in said or any(
            map(said.startswith, filter(None, every))
        )


TEXTS = [
    (program, words, argument.field_info.name)
    for program in (cli.PROGRAM, train_cli.PROGRAM)
    for words, entry in program.entries.items()
    for argument in entry.arguments
    if argument.field_info.default == ""
]


def test_an_empty_text_is_not_given_in_python_and_refused_on_the_command_line(capsys, tmp_path):
    assert {name for _, _, name in TEXTS} >= {"columns", "for_", "where", "only", "devices"}
    for program, words, name in TEXTS:
        entry = program.entries[words]
        defaults = defaults_of(entry.function)
        needed = {n: "no/such" for n, v in defaults.items() if v in _NO_DEFAULT}
        if name in defaults and not {"training"} & needed.keys():
            with pytest.raises((SpecDataError, OSError)) as without:
                entry.function(**needed)
            with pytest.raises((SpecDataError, OSError)) as empty:
                entry.function(**needed, **{name: ""})
            assert str(empty.value) == str(without.value)
        file = tmp_path / "options.json"
        file.write_text(json.dumps({name: ""}))
        typed = flag(name)
        for given in ([typed, ""], [f"{typed}="], ["--config", str(file)]):
            assert program.main([*words, *given]) == 2
            assert f"{typed} '': expected a value" in capsys.readouterr().err
    assert CaptureOptions(columns="", for_="", layers="1").given == {"layers"}
