"""Commands: one typed function is the command line, the Python function and their one description.

    @command
    def select(data: Dataset, out: NewDataset, *, where: str = "", seed: Count = 0) -> View:
        '''Write a view of some of the documents of a dataset.

        More about it.

        Examples:
            spec-data select data/all data/short --where "length < 1024"

        Args:
            data: the dataset.
            ...
        '''

Its signature declares options, types and defaults, its docstring explains them. In Python it is
called as it stands, and an editor sees every option. `Program.add` puts it on the command line by
way of cyclopts: `max_length` becomes --max-length, `for_` --for. What it returns is printed
(`Result`). Options in the group of `types.more` are shown by --help-all only.

Both ways in check the arguments alike, before any work: types, choices and bounds by msgspec, paths
by `types.Holds`. Nothing here imports torch, so `--help` is instant.
"""

import argparse
import dataclasses
import functools
import inspect
import json
import os
import re
import shlex
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Dict
from cyclopts.exceptions import MissingArgumentError, UnknownCommandError, UnknownOptionError

from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.terminal.config import read_config_file
from spec_data.terminal.console import nearest, run_cli, say_next
from spec_data.terminal.paths import (
    check_dataset_place,
    check_file_to_write,
    check_path,
    check_value,
)
from spec_data.terminal.types import Holds

P = ParamSpec("P")
R = TypeVar("R")


class Result:
    """What a command returns: `str()` of it is printed.

    Attributes:
        next_command: words of the command to run next, which is named at the end.
        retry: the same command is worth another try, and is named at the end.
        exit_code: that of the process.
    """

    next_command: Sequence[str] = ()
    retry: bool = False
    exit_code: int = 0

    def facts(self) -> Mapping[str, Any]:
        """Return what --json writes: the fields of the result, unless a subclass says more."""
        if dataclasses.is_dataclass(self):
            return dataclasses.asdict(self)
        return vars(self)


# -- the function -----------------------------------------------------------------------------


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a typed function before it is called, by its annotations.

    Errors that name an option (--max-length) name the keyword (max_length) where Python calls.

    Raises:
        ConfigError: an argument of another type or out of its bounds; MissingError: a path that
            is not what it should be.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        try:
            bound.arguments.update(checked_arguments(function, bound.arguments))
            return function(*bound.args, **bound.kwargs)
        except SpecDataError as error:
            error.args = (_as_keywords(str(error), function), *error.args[1:])
            raise

    return called


def flag(name: str) -> str:
    """Return the option of a parameter: --max-length of max_length, --for of for_."""
    return "--" + name.rstrip("_").replace("_", "-")


def _as_keywords(message: str, function: Callable[..., Any]) -> str:
    names = {flag(name): name for name in inspect.signature(function).parameters}
    return re.sub(r"--[a-z][a-z0-9-]*", lambda match: names.get(match[0], match[0]), message)


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(_parsed_function(function), include_extras=True)


def checked_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments of a function as its annotations want them.

    Raises:
        ConfigError: a value of another type, out of its bounds, or a text that is empty;
            MissingError: a path that is not what it should be.
    """
    return {name: _checked(name, value, _hints(function)[name]) for name, value in given.items()}


def _checked(name: str, value: Any, hint: Any) -> Any:
    value = _plain(value)
    if isinstance(value, str) and _several_only(hint):
        value = [value]
    if not dataclasses.is_dataclass(value):
        try:
            value = msgspec.convert(value, hint)
        except msgspec.ValidationError as error:
            reason = str(error).replace("`", "").partition(" - at ")[0]
            choices = _choices(hint)
            if choices:
                near = nearest(str(value), choices)
                reason = f"choose from {', '.join(choices)}"
                reason += f"; did you mean {near}?" if near else ""
            text = " ".join(repr(value).split())[:100]
            raise ConfigError(f"{flag(name)} {text}: {reason[0].lower()}{reason[1:]}") from None
    holds = next((note for note in _notes(hint) if isinstance(note, Holds)), Holds())
    for text in [value] if isinstance(value, str) else value if isinstance(value, list) else []:
        if isinstance(text, str):
            _check_text(name, text, holds)
    return value


def _plain(value: Any) -> Any:
    """Return paths as texts, scalars of numpy and torch as numbers, and sequences as lists."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, (list, tuple, range)):
        return [_plain(item) for item in value]
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    return value


def _check_text(name: str, text: str, holds: Holds) -> None:
    if holds.dataset:
        check_dataset_place(flag(name), text, holds.dataset == "write")
    elif not holds.urls:
        check_value(flag(name), text)
    if holds.kind is not None:
        check_path(flag(name), text, holds.kind)


def _notes(hint: Any) -> Iterator[Any]:
    """All notes of an annotation, also of the parts of a union."""
    yield from getattr(hint, "__metadata__", ())
    for part in typing.get_args(hint):
        if typing.get_origin(hint) is not typing.Literal:
            yield from _notes(part)


def _several_only(hint: Any) -> bool:
    """Whether an annotation wants several texts, so that a single one means a list of one."""
    if typing.get_origin(hint) is typing.Annotated:
        consume = [n.consume_multiple for n in hint.__metadata__ if isinstance(n, Parameter)]
        return any(consume) or _several_only(typing.get_args(hint)[0])
    return False


def _choices(hint: Any) -> list[str]:
    if typing.get_origin(hint) is typing.Literal:
        return [str(choice) for choice in typing.get_args(hint)]
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


def words_of(function: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """Return arguments of a command as words of its command line; defaults are left out."""
    words: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        value = values.get(name, parameter.default)
        if value == parameter.default or value is None:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            words += words_of(
                type(value), {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
            )
        elif isinstance(value, bool):
            words.append(flag(name) if value else "--no-" + flag(name)[2:])
        elif isinstance(value, (list, tuple)) and name not in ("layers",):
            words += [flag(name), *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            words += [f"{flag(name)}={text}"] if text.startswith("-") else [flag(name), text]
    return words


# -- the command line -------------------------------------------------------------------------

_COMMON = {
    "--config FILE": "options from a TOML, YAML or JSON table; those typed replace them",
    "--json [FILE]": "write the result as JSON to FILE; without FILE, print it instead of text",
    "--quiet": "results, warnings and errors only: no bars and no log lines",
    "--log-file FILE": "append every log line with its time to FILE, also with --quiet",
    "--debug": "show the Python traceback of an error; add it to a bug report",
}
"""The options of every command."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A command of a program: its function and what the program knows about it."""

    function: Callable[..., Any]
    usage: str
    stopped: Callable[[Mapping[str, Any]], str] | None
    fill: Callable[[dict[str, Any]], dict[str, Any]] | None
    epilog: str


class Program:
    """A command line made of typed functions."""

    def __init__(self, name: str, description: str, epilog: str, version: str) -> None:
        """Make a program; `description` and `epilog` stand around the commands in its help."""
        self.name, self.version = name, version
        self._description, self._epilog = description, epilog
        self._entries: dict[tuple[str, ...], _Entry] = {}
        self._groups: dict[str, str] = {}
        self._app = self._new_app(name)

    def _new_app(self, name: str) -> App:
        return App(
            name=name,
            help_flags=(),
            version_flags=(),
            default_parameter=Parameter(negative_bool=(), negative_iterable=(), negative_none=()),
            exit_on_error=False,
            print_error=False,
        )

    def add(
        self,
        function: Callable[..., Any],
        *,
        name: str = "",
        usage: str = "",
        stopped: Callable[[Mapping[str, Any]], str] | None = None,
        fill: Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        epilog: str = "",
    ) -> None:
        """Add a function that `command` decorates.

        Args:
            function: the command.
            name: of the command; not given: that of the function. "fit eagle3" is one of a group.
            usage: what follows the name in the usage line; not given: its required arguments.
            stopped: called with the arguments when the command was interrupted; says what is kept.
            fill: called with the given arguments; returns those for the ones that are missing.
            epilog: text at the end of the help.
        """
        words = tuple((name or function.__name__.strip("_").replace("_", "-")).split())
        inner = _parsed_function(inspect.unwrap(function))
        app = self._app
        for word in words[:-1]:
            if word not in app:
                app.command(self._new_app(word))
            app = app[word]
        app.command(inner, name=words[-1])
        self._entries[words] = _Entry(inner, usage or _usage(inner), stopped, fill, epilog)

    def add_group(self, name: str, description: str) -> None:
        """Describe the group of commands that begin with `name`, such as fit."""
        self._groups[name] = description

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run a command line and return its exit code."""
        words = list(sys.argv[1:] if arguments is None else arguments)
        try:
            common, rest = _take_common(words)
        except argparse.ArgumentError as error:
            return self._refuse((), str(error))
        chain, _, tokens = self._app.parse_commands(rest)
        if common.version:
            print(f"{self.name} {self.version}")
            return 0
        if common.print_completion:
            print(self._app.generate_completion(shell=common.print_completion))
            return 0
        if common.help or common.help_all:
            print(self.help(chain, common.help_all), end="")
            return 0
        if chain not in self._entries:
            return self._refuse(chain, self._no_command(chain, tokens))
        given: dict[str, Any] = {}
        kept = self._entries[chain].stopped

        def stopped() -> str:
            text = kept(given) if kept and given else "nothing was written yet"
            return f"stopped: {text}\nresume:  {shlex.join([self.name, *words])}"

        def run() -> int:
            try:
                call = self._parsed(chain, rest, common)
            except CycloptsError as error:
                return self._refuse(chain, self._in_words(chain, error))
            given.update(call.arguments)
            result = self._entries[chain].function(*call.args, **call.kwargs)
            return _finish(result, common.json, [self.name, *words])

        return run_cli(run, common, stopped if kept else None)

    def _parsed(
        self, chain: tuple[str, ...], words: list[str], common: Any
    ) -> inspect.BoundArguments:
        """Return the checked arguments of one command: those typed, over --config's table."""
        entry, app = self._entries[chain], self._app
        table = self._table(chain, Path(common.config)) if common.config else {}
        source = f"--config {common.config}"
        app.config = (Dict(table, source=source, use_commands_as_keys=False),) if table else ()
        if common.json and common.json != "-":
            check_file_to_write("--json", common.json)
        if common.json and not hasattr(_hints(entry.function).get("return", Result), "facts"):
            raise ConfigError("--json: this command has no figures to write")
        _, bound, _ = app.parse_args(words)
        if entry.fill:
            bound.arguments.update(entry.fill(dict(bound.arguments)))
        bound.arguments.update(checked_arguments(entry.function, bound.arguments))
        return bound

    def _table(self, chain: tuple[str, ...], file: Path) -> dict[str, Any]:
        """Return the table of a config file, with one text where an option takes one."""
        several = {
            name.lstrip("-").replace("-", "_")
            for argument in self._at(chain).assemble_argument_collection()
            if argument.parameter.consume_multiple
            for name in argument.names
        }
        table = read_config_file(file)
        for name, value in table.items():
            if isinstance(value, dict):
                table[name] = json.dumps(value)
            elif isinstance(value, list) and name not in several:
                table[name] = ",".join(map(str, value))
        return table

    def _at(self, chain: Sequence[str]) -> App:
        app = self._app
        for word in chain:
            app = app[word]
        return app

    def commands(self) -> dict[str, str]:
        """Return every command, such as "fit eagle3", and its summary."""
        return {" ".join(words): _summary(e.function) for words, e in self._entries.items()}

    def flags(self, command: str) -> list[str]:
        """Return the options of a command, those of every command included."""
        return sorted(_flags_of(self._at(command.split())) | {w.split()[0] for w in _COMMON})

    # -- what is wrong --

    def _refuse(self, chain: tuple[str, ...], message: str) -> int:
        print(f"usage: {self._usage_line(chain)}\nerror: {message}", file=sys.stderr)
        words = " ".join((self.name, *chain))
        print(f"All options: {words} --help-all", file=sys.stderr)
        return 2

    def _usage_line(self, chain: tuple[str, ...]) -> str:
        words = " ".join((self.name, *chain))
        if chain in self._entries:
            return f"{words} {self._entries[chain].usage}".rstrip() + " [options]"
        return f"{words} {'DRAFT' if chain else 'COMMAND'} [options]"

    def _commands_of(self, chain: tuple[str, ...]) -> list[str]:
        depth = len(chain)
        names = [words[depth] for words in self._entries if words[:depth] == chain]
        return list(dict.fromkeys(names))

    def _no_command(self, chain: tuple[str, ...], tokens: Sequence[str]) -> str:
        names = self._commands_of(chain)
        what = "DRAFT" if chain else "COMMAND"
        if not tokens or tokens[0].startswith("-"):
            return f"{what} is missing; write it before the options: {', '.join(names)}"
        near = nearest(tokens[0], names)
        hint = f"; did you mean {near}?" if near else f"; choose from {', '.join(names)}"
        return f"unknown {what.lower()} {tokens[0]}{hint}"

    def _in_words(self, chain: tuple[str, ...], error: CycloptsError) -> str:
        """Return the message of a parse error; an unknown option may be one of a sibling."""
        error.verbose = False
        if isinstance(error, UnknownOptionError) and error.token is not None:
            word = str(error.token.keyword or error.token.value)
            siblings = [
                words[-1]
                for words, entry in self._entries.items()
                if len(chain) > 1 and words[:-1] == chain[:-1] and words != chain
                if word in _flags_of(self._at(words))
            ]
            if siblings:
                return f"unknown option {word}; it is an option of {', '.join(siblings)}"
            near = nearest(word.strip("[]"), sorted(_flags_of(self._at(chain))))
            where = f" in {error.token.source}" if error.token.source not in ("", "cli") else ""
            return f"unknown option {word.strip('[]')}{where}" + (
                f"; did you mean {near}?" if near else ""
            )
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            if error.argument.tokens:
                return f"{error.argument.name}: expected a value"
            return f"missing option {error.argument.name}"
        if isinstance(error, UnknownCommandError) and error.unused_tokens:
            return f"unexpected: {' '.join(error.unused_tokens)}"
        return str(error).strip()

    # -- help --

    def help(self, chain: tuple[str, ...] = (), everything: bool = False) -> str:
        """Return the help of a command: its first options, or with `everything` all of them."""
        if chain not in self._entries:
            return self._help_of_group(chain)
        entry = self._entries[chain]
        text, examples = _description(entry.function)
        lines = [f"usage: {self._usage_line(chain)}", "", *text.splitlines()]
        groups: dict[str, list[str]] = {}
        hidden, positional = 0, _positional(entry.function)
        for argument in self._at(chain).assemble_argument_collection(parse_docstring=True):
            if not argument.show or argument.children_recursive:
                continue
            groups_of = typing.cast(Sequence[Group], argument.parameter.group or ())
            title = groups_of[0].name if groups_of else ""
            title = "options" if title in ("", "Parameters", "Arguments") else title
            if title != "options" and not everything:
                hidden += 1
                continue
            groups.setdefault(title, []).extend(_option_lines(argument, positional))
        for title in sorted(groups, key=lambda name: name != "options"):
            lines += ["", f"{title}:", *groups[title]]
        if everything:
            lines += ["", "every command:"]
            lines += [line for name, text in _COMMON.items() for line in _columns(name, text)]
        else:
            words = " ".join((self.name, *chain))
            count = f"{hidden} more options and " if hidden else ""
            lines += [f"{count}those of every command: {words} --help-all"]
        if examples:
            lines += ["", "examples:", *textwrap.indent(examples, "  ").splitlines()]
        if entry.epilog:
            lines += ["", *entry.epilog.splitlines()]
        return "\n".join(lines) + "\n"

    def _help_of_group(self, chain: tuple[str, ...]) -> str:
        name = " ".join(chain)
        description = self._groups.get(name, "") if chain else self._description
        lines = [f"usage: {self._usage_line(chain)}", "", *description.splitlines(), ""]
        lines += ["drafts:" if chain else "commands:"]
        for word in self._commands_of(chain):
            entry = self._entries.get((*chain, word))
            text = _summary(entry.function) if entry else self._groups.get(word, "")
            lines += _columns(word, text.partition("\n\n")[0].replace("\n", " "))
        if not chain:
            lines += ["", *self._epilog.splitlines()]
        return "\n".join(lines) + "\n"


def _take_common(words: Sequence[str]) -> tuple[Any, list[str]]:
    """Split off the options of every command; `--json DIR` leaves DIR to the command."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for name in ("--quiet", "--debug", "--version", "--help-all"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--json", nargs="?", const="-")
    for name in ("--log-file", "--config"):
        parser.add_argument(name)
    parser.add_argument("--print-completion", choices=("bash", "zsh", "fish"))
    words = list(words)
    for at, word in enumerate(words[:-1]):
        if word == "--json" and (Path(words[at + 1]).is_dir() or re.match("-.", words[at + 1])):
            words[at] = "--json=-"
    common, rest = parser.parse_known_args(words)
    return common, rest


def _positional(function: Callable[..., Any]) -> list[str]:
    """Return the required parameters that are written without their flags.

    They are, unless one of several values stands before another one.
    """
    required = [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    several = [name for name in required if _takes_several(_hints(function)[name])]
    return [] if several and several != required[-1:] else required


def _usage(function: Callable[..., Any]) -> str:
    """Return the required arguments as they are written."""
    positional = _positional(function)
    words = []
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty:
            hint = _hints(function)[name]
            metavar = name.upper() if name in positional else _metavar(name, hint)
            metavar += f" [{metavar} ...]" if _takes_several(hint) else ""
            words.append(metavar if name in positional else f"{flag(name)} {metavar}")
    return " ".join(words)


def _metavar(name: str, hint: Any) -> str:
    notes = (note for note in _notes(hint) if isinstance(note, Parameter))
    return next((note.metavar for note in notes if note.metavar), name.upper())


def _takes_several(hint: Any) -> bool:
    return any(isinstance(note, Parameter) and note.consume_multiple for note in _notes(hint))


def _flags_of(app: App) -> set[str]:
    arguments = app.assemble_argument_collection()
    return {name for argument in arguments for name in argument.names if name.startswith("--")}


def _description(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the text of a docstring before its sections, and its examples."""
    text, _, _ = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    text, _, examples = text.partition("\nExamples:\n")
    return text.strip(), textwrap.dedent(examples).strip()


def _summary(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring: that of the variant where there is one."""
    variant = (getattr(function, "__defaults__", None) or (None,))[-1]
    if dataclasses.is_dataclass(variant):
        return inspect.getdoc(variant) or ""
    return _description(function)[0]


def _option_lines(argument: Any, positional: Sequence[str]) -> list[str]:
    """Return the lines of --help about one option; `positional` ones need no flag."""
    names = [name for name in argument.names if name.startswith("--")]
    kind = _kind(argument.hint)
    metavar = argument.parameter.metavar or (kind.upper() if kind else "")
    choices = argument.get_choices()
    if choices:
        metavar = "NAME"
    many = argument.parameter.consume_multiple
    value = "" if argument.is_flag() else f" {metavar} ..." if many else f" {metavar}"
    text = " ".join((argument.parameter.help or "").split())
    if choices:
        text += f" (one of {', '.join(choices)})"
    default = argument.field_info.default
    if argument.is_flag() and default is True:
        names = [name for name in names if name.startswith("--no-")] or names
    elif default not in (None, inspect.Parameter.empty, False, "", ()) and not argument.is_flag():
        text += f" [{default}]"
    if argument.field_info.name in positional:
        return _columns(argument.field_info.name.upper(), text)
    return _columns(names[0] + value, text)


def _kind(hint: Any) -> str:
    """Return the name of the first type of an annotation, for a metavar."""
    while typing.get_origin(hint) is not None:
        hint = typing.get_args(hint)[0]
    return {"str": "TEXT", "int": "N", "float": "X"}.get(getattr(hint, "__name__", ""), "")


def _columns(left: str, right: str) -> list[str]:
    """Return a name and its text as lines of two columns, 80 wide."""
    head, indent = f"  {left}", 24
    text = textwrap.wrap(right, 80 - indent, break_on_hyphens=False) or [""]
    if len(head) >= indent - 1:
        return [head, *(" " * indent + line for line in text)]
    return [head.ljust(indent) + text[0], *(" " * indent + line for line in text[1:])]


def _finish(result: Any, file: str | None, words: Sequence[str]) -> int:
    """Show what a command (`words`) returned, or each of what it yields; return the exit code."""
    for one in result if isinstance(result, Iterator) else (result,):
        result = one
        _show(one, file)
    if getattr(result, "next_command", ()):
        say_next(*result.next_command)
    if getattr(result, "retry", False):
        say_next(*words, label="retry")
    return getattr(result, "exit_code", 0)


def _show(result: Any, file: str | None) -> None:
    """Print a result as text or JSON, or write its JSON to the file of --json."""
    if file is None:
        if result is not None:
            print(result, flush=True)
        return
    text = json.dumps(result.facts(), indent=2, ensure_ascii=False, default=str)
    if file == "-":
        print(text, flush=True)
        return
    print(result, flush=True)
    try:
        Path(file).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {file}: {error.strerror}") from None


def specialised(function: Callable[..., Any], name: str, value: Any) -> Callable[..., Any]:
    """Return a function whose parameter `name`, the only one of its kind, has the default `value`.

    Its type is the class of `value`: so one typed `fit` is the command of every kind of draft.
    """
    return _copied(inspect.unwrap(function), (value,), {name: type(value)})


def _parsed_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for the parser, which resolves annotations.

    The class of its result may be of a heavy module, and is then written as a text; left out here.
    """
    if not isinstance(function.__annotations__.get("return"), str):
        return function
    return _copied(function, None, {})


def _copied(
    function: Callable[..., Any], defaults: tuple[Any, ...] | None, annotations: dict[str, Any]
) -> Callable[..., Any]:
    """Return a copy of a function with other defaults or annotations; a text is left out."""
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__,
        defaults or function.__defaults__, function.__closure__,
    )  # fmt: skip
    copy.__kwdefaults__, copy.__doc__ = function.__kwdefaults__, function.__doc__
    copy.__module__ = function.__module__
    copy.__annotations__ = {
        k: v
        for k, v in (function.__annotations__ | annotations).items()
        if k != "return" or not isinstance(v, str)
    }
    return copy
