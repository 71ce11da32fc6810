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

from cyclopts import App, CycloptsError, Group, Parameter
from cyclopts.config import Dict
from cyclopts.exceptions import (
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)

from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.files import write_atomically
from spec_data.terminal.checks import checked, flag, notes_of
from spec_data.terminal.config import read_config_file
from spec_data.terminal.console import nearest, run_cli, say_next
from spec_data.terminal.paths import check_file_to_write
from spec_data.terminal.types import NO_FLAG

P = ParamSpec("P")
R = TypeVar("R")


class Result:
    """What a command returns: `str()` of it is printed.

    Attributes:
        next_command: words of the command to run next, which is named at the end.
        exit_code: that of the process.
        again: where it is set, the next command is the same one without the options that it lists.
        next_label: what stands before the next command.
    """

    next_command: Sequence[str] = ()
    exit_code: int = 0
    again: Sequence[str] | None = None
    next_label: str = "next"

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
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return function(*args, **kwargs)  # Python's own error names the function
        try:
            bound.arguments.update(checked_arguments(function, bound.arguments))
            return function(*bound.args, **bound.kwargs)
        except SpecDataError as error:
            error.args = (_as_keywords(str(error), function), *error.args[1:])
            raise

    return called


def _as_keywords(message: str, function: Callable[..., Any]) -> str:
    names = {flag(name): name for name in inspect.signature(function).parameters}
    for options in _option_classes(function):
        names |= {flag(field.name): field.name for field in dataclasses.fields(options)}
    words = r"`[^`]*`|--[a-z][a-z0-9-]*"  # a command that an error names stays as it is
    return re.sub(words, lambda match: names.get(match[0], match[0]), message)


def _option_classes(function: Callable[..., Any]) -> list[type]:
    """Return the dataclasses of options that a function takes."""
    hints = [hint for name, hint in _hints(function).items() if name != "return"]
    kinds = [kind for hint in hints for kind in (hint, *typing.get_args(hint))]
    return [kind for kind in kinds if isinstance(kind, type) and dataclasses.is_dataclass(kind)]


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return typing.get_type_hints(_parsed_function(function), include_extras=True)


def checked_arguments(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given arguments of a function as its annotations want them.

    Raises:
        ConfigError: a value of another type, out of its bounds, or a text that is empty;
            MissingError: a path that is not what it should be.
    """
    return {name: checked(name, value, _hints(function)[name]) for name, value in given.items()}


def words_of(function: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """Return arguments of a command as words of its command line; defaults are left out."""
    words: list[str] = []
    hints = (
        typing.get_type_hints(function, include_extras=True)
        if isinstance(function, type)
        else _hints(inspect.unwrap(function))
    )
    for name, parameter in inspect.signature(function).parameters.items():
        value = values.get(name, parameter.default)
        unflagged = any(note == NO_FLAG for note in notes_of(hints.get(name)))
        if value == parameter.default or value is None or unflagged:
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


_DEFAULT = Parameter(negative_bool=(), negative_iterable=(), negative_none=(), allow_repeating=True)
"""Switches that are on by default have the note `types.OnOff`. The last of equal options counts."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A command of a program: its function and what the program knows about it."""

    function: Callable[..., Any]
    usage: str
    stopped: Callable[[Mapping[str, Any]], str] | None
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
            default_parameter=_DEFAULT,
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
        epilog: str = "",
    ) -> None:
        """Add a function that `command` decorates.

        Args:
            function: the command.
            name: of the command; not given: that of the function. "fit eagle3" is one of a group.
            usage: what follows the name in the usage line; not given: its required arguments.
            stopped: called with the arguments when the command was interrupted; says what is kept.
            epilog: text at the end of the help; its first paragraph is that of -h.
        """
        words = tuple((name or function.__name__.strip("_").replace("_", "-")).split())
        inner = _parsed_function(inspect.unwrap(function))
        app = self._app
        for word in words[:-1]:
            if word not in app:
                app.command(self._new_app(word))
            app = app[word]
        app.command(inner, name=words[-1])
        self._entries[words] = _Entry(inner, usage or _usage(inner), stopped, epilog)

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

        flags = _flags_of(self._at(chain))
        options = [word.partition("=")[0] for word in rest if re.match("--.", word)]
        if unknown := [self._unknown(chain, name) for name in options if name not in flags]:
            return self._refuse(chain, "; ".join(unknown))

        def run() -> int:
            try:
                call = self._parsed(chain, rest, common)
            except CycloptsError as error:
                return self._refuse(chain, self._in_words(chain, error))
            given.update(call.arguments)
            result = self._entries[chain].function(*call.args, **call.kwargs)
            return self._finish(result, common.json, words)

        return run_cli(run, common, stopped if kept else None)

    def _parsed(
        self, chain: tuple[str, ...], words: list[str], common: Any
    ) -> inspect.BoundArguments:
        """Return the checked arguments of one command: those typed, over --config's table."""
        function, app = self._entries[chain].function, self._app
        table = self._table(chain, Path(common.config)) if common.config else {}
        typed = dict(zip(words, [*words[1:], ""], strict=True))
        for options in _option_classes(function):
            for name in options.replaced(typed) if hasattr(options, "replaced") else ():
                table.pop(name, None)
        unflagged = self._unflagged(chain, table)
        source = f"--config {common.config}"
        app.config = (Dict(table, source=source, use_commands_as_keys=False),) if table else ()
        if common.json and common.json != "-":
            check_file_to_write("--json", common.json)
        if common.json and not hasattr(_hints(function).get("return", Result), "facts"):
            raise ConfigError("--json: this command has no figures to write")
        _, bound, _ = app.parse_args(words)
        for name, values in unflagged.items():
            options = bound.arguments.get(
                name, inspect.signature(function).parameters[name].default
            )
            bound.arguments[name] = dataclasses.replace(options, **values)
        bound.arguments.update(checked_arguments(function, bound.arguments))
        return bound

    def _unflagged(self, chain: tuple[str, ...], table: dict[str, Any]) -> dict[str, Any]:
        """Take those fields of dataclasses out of a table that have no flag, by parameter."""
        flags = _flags_of(self._at(chain))
        taken: dict[str, Any] = {}
        for name, hint in _hints(self._entries[chain].function).items():
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                for field in dataclasses.fields(hint):
                    if field.name in table and flag(field.name) not in flags:
                        taken.setdefault(name, {})[field.name] = table.pop(field.name)
        return taken

    def _table(self, chain: tuple[str, ...], file: Path) -> dict[str, Any]:
        """Return the table of a config file, with one text where an option takes one."""
        several = {
            name.lstrip("-").replace("-", "_")
            for argument in self._at(chain).assemble_argument_collection(default_parameter=_DEFAULT)
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

    def _finish(self, result: Any, file: str | None, words: Sequence[str]) -> int:
        """Show what a command returned, or each of what it yields; return the exit code."""
        for one in result if isinstance(result, Iterator) else (result,):
            result = one
            _show(one, file)
        if not isinstance(result, Result):
            return 0
        if result.again is not None:
            ranks = os.environ.get("LOCAL_WORLD_SIZE")
            start = ["torchrun", "--nproc-per-node", ranks, "-m", self.name.replace("-", "_")]
            left = [word for word in words if word not in result.again]
            if os.environ.get("RANK", "0") == "0":
                say_next(*(start if ranks else [self.name]), *left, label=result.next_label)
        elif result.next_command:
            say_next(*result.next_command, label=result.next_label)
        return result.exit_code

    def _at(self, chain: Sequence[str]) -> App:
        app = self._app
        for word in chain:
            app = app[word]
        return app

    def commands(self) -> dict[str, str]:
        """Return every command, such as "fit eagle3", and its summary."""
        return {" ".join(words): _summary(e.function) for words, e in self._entries.items()}

    def names(self) -> dict[str, str]:
        """Return the first word of every command, such as fit, and its summary."""
        return {name.split()[0]: text for name, text in self.commands().items()} | self._groups

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

    def _unknown(self, chain: tuple[str, ...], word: str, where: str = "") -> str:
        """Return the message about an unknown option, which may be one of a sibling."""
        siblings = [
            words[-1]
            for words in self._entries
            if len(chain) > 1 and words[:-1] == chain[:-1] and words != chain
            if word in _flags_of(self._at(words))
        ]
        if siblings:
            return f"unknown option {word}{where}; it is an option of {', '.join(siblings)}"
        near = nearest(word, sorted(_flags_of(self._at(chain))))
        return f"unknown option {word}{where}" + (f"; did you mean {near}?" if near else "")

    def _in_words(self, chain: tuple[str, ...], error: CycloptsError) -> str:
        """Return the message of a parse error."""
        error.verbose = False
        if isinstance(error, UnknownOptionError) and error.token is not None:
            where = f" in {error.token.source}" if error.token.source not in ("", "cli") else ""
            word = str(error.token.keyword or error.token.value).strip("[]")
            return self._unknown(chain, word, where)
        if isinstance(error, MissingArgumentError) and error.argument is not None:
            if error.argument.tokens:
                return f"{error.argument.name}: expected a value"
            return f"missing option {error.argument.name}"
        if isinstance(error, (UnknownCommandError, UnusedCliTokensError)) and error.unused_tokens:
            return f"unexpected: {' '.join(error.unused_tokens)}"
        return str(error).strip()

    # -- help --

    def help(self, chain: tuple[str, ...] = (), everything: bool = False) -> str:
        """Return the help of a command: its first options, or with `everything` all of them."""
        if chain not in self._entries:
            return self._help_of_group(chain)
        entry = self._entries[chain]
        text, examples = _description(entry.function)
        text = text if everything else text.partition("\n\n")[0]
        lines = [f"usage: {self._usage_line(chain)}", "", *text.splitlines()]
        groups: dict[str, list[str]] = {}
        hidden, positional = 0, _positional(entry.function)
        for argument in self._at(chain).assemble_argument_collection(
            default_parameter=_DEFAULT, parse_docstring=True
        ):
            if not argument.show or not argument.parse or argument.children_recursive:
                continue
            groups_of = typing.cast(Sequence[Group], argument.parameter.group or ())
            title = groups_of[0].name if groups_of else ""
            title = "options" if title in ("", "Parameters", "Arguments") else title
            if title != "options" and not everything:
                hidden += 1
                continue
            groups.setdefault(title, []).extend(_option_lines(argument, positional, everything))
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
        epilog = entry.epilog if everything else entry.epilog.partition("\n\n")[0]
        if epilog:
            lines += ["", *epilog.splitlines()]
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
            lines += ["", "every command:"]
            lines += [line for name, text in _COMMON.items() for line in _columns(name, text)]
            lines += ["", "of the program:", *_columns("--version", "print the version")]
            completion = "print a script that completes commands and options in this shell"
            lines += _columns("--print-completion bash|zsh|fish", completion)
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
    notes = (note for note in notes_of(hint) if isinstance(note, Parameter))
    return next((note.metavar for note in notes if note.metavar), name.upper())


def _takes_several(hint: Any) -> bool:
    return any(isinstance(note, Parameter) and note.consume_multiple for note in notes_of(hint))


def _flags_of(app: App) -> set[str]:
    arguments = app.assemble_argument_collection(default_parameter=_DEFAULT)
    return {
        name
        for argument in arguments
        if argument.parse
        for name in argument.names
        if name.startswith("--")
    }


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


_NOT_SHOWN = (None, inspect.Parameter.empty, False, "", (), -1)
"""Defaults that --help does not show: they stand for a value that is not given."""


def _option_lines(argument: Any, positional: Sequence[str], whole: bool) -> list[str]:
    """Return the lines of --help about one option; `positional` ones need no flag.

    Not `whole`: the first sentence of its text.
    """
    names = [name for name in argument.names if name.startswith("--")]
    kind = _kind(argument.hint)
    metavar = argument.parameter.metavar or (kind.upper() if kind else "")
    choices = argument.get_choices()
    if choices:
        metavar = "NAME"
    many = argument.parameter.consume_multiple
    value = "" if argument.is_flag() else f" {metavar} ..." if many else f" {metavar}"
    text = " ".join((argument.parameter.help or "").split())
    text = (text if whole else re.split(r"[.;:] (?=\D)", text, maxsplit=1)[0]).removesuffix(".")
    if choices:
        text += f" (one of {', '.join(choices)})"
    default = argument.field_info.default
    if argument.is_flag() and default is True:
        names = [name for name in names if name.startswith("--no-")] or names
    elif default == default and default not in _NOT_SHOWN and not argument.is_flag():
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


def _show(result: Any, file: str | None) -> None:
    """Print a result as text or JSON, or write its JSON to the file of --json."""
    if file is None:
        if result is not None and str(result):
            print(result, flush=True)
        return
    text = json.dumps(result.facts(), indent=2, ensure_ascii=False, default=str)
    if file == "-":
        print(text, flush=True)
        return
    print(result, flush=True)
    write_atomically(Path(file).absolute(), text + "\n")


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
