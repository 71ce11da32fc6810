"""Commands: one typed function is the command line, the Python function and their one description.

    @command
    def select(data: Dataset, out: NewDataset, *, where: str = "", seed: Count = 0) -> View:
        '''Write a view of some of the documents of a dataset.

        Examples:
            spec-data select data/all data/short --where "length < 1024"

        Args:
            data: the dataset.
            ...
        '''

Its signature declares options, types and defaults, its docstring explains them, what it returns is
printed (`Result`). `Program.add` puts it on the command line by way of cyclopts: `max_length`
becomes --max-length, `for_` --for. Options in the group of `types.more` are shown by --help-all
only. Nothing here imports torch, so `--help` is instant.
"""

import argparse
import ctypes
import dataclasses
import functools
import html
import inspect
import json
import logging
import os
import re
import shlex
import sys
import textwrap
import time
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cyclopts import App, CycloptsError, MissingArgumentError, Parameter, UnknownOptionError
from cyclopts.config import Dict

from spec_data.shards.errors import ConfigError, SpecDataError
from spec_data.shards.files import remove_dead_of, write_atomically
from spec_data.terminal import NOTICE, WIDTH
from spec_data.terminal.config import checked, flag, read_config_file
from spec_data.terminal.console import (
    did_you_mean,
    lenient_streams,
    print_text,
    run_cli,
    start_log_file,
)
from spec_data.terminal.given import Options, is_no_text
from spec_data.terminal.kept import forgotten
from spec_data.terminal.paths import at_home, check_file_to_write, check_value
from spec_data.terminal.printable import printable, printable_json
from spec_data.terminal.rules import check_rules
from spec_data.terminal.types import JOINED, ON, comma_list

logger = logging.getLogger(__name__)
P = ParamSpec("P")
R = TypeVar("R")


class Result:
    """What a command returns: `str()` of it is printed, in a few lines.

    Attributes:
        next_command: words of the command to run next, which is named at the end.
        exit_code: that of the process.
        again: what the same command, without --dry-run, does then, such as "resume": it is named.
    """

    next_command: Sequence[str] = ()
    exit_code: int = 0
    again: str = ""

    def facts(self) -> Mapping[str, Any]:
        """Return what --json writes: the fields that `repr` shows, unless a subclass says more."""
        if not dataclasses.is_dataclass(self):
            return vars(self)
        shown = {field.name for field in dataclasses.fields(self) if field.repr}
        return {name: v for name, v in dataclasses.asdict(self).items() if name in shown}

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what is printed, unless a subclass has a page."""
        return f"<pre>{html.escape(printable(str(self)))}</pre>"

    def details(self) -> str:
        """Return what --verbose prints before the result, and the log file has too."""
        return ""

    def __str__(self) -> str:
        return ""


# -- the function -----------------------------------------------------------------------------


def command(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a typed function before it is called, by its annotations.

    Errors name an argument as on the command line: --max-length. Rules about several arguments
    are those of `rules.ruled`.

    Raises:
        ConfigError: an argument of another type or out of its bounds; MissingError: a path that
            is not what it should be.
    """
    signature = inspect.signature(function)
    defaults = {name: parameter.default for name, parameter in signature.parameters.items()}
    rules = getattr(function, "rules", ())

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = signature.bind(*args, **kwargs)
        for name in [n for n, v in bound.arguments.items() if is_no_text(v, defaults[n])]:
            del bound.arguments[name]  # "", the default: as not given
        hints = _hints(called)
        given = {name for name, value in bound.arguments.items() if value is not None}
        with forgotten():
            for name, value in bound.arguments.items():
                bound.arguments[name] = checked(name, value, hints[name])
            check_rules(rules, defaults | bound.arguments, given, defaults)
            return function(*bound.args, **bound.kwargs)

    # the parser resolves annotations, and a result may be of a heavy module
    called.__annotations__ = {k: v for k, v in function.__annotations__.items() if k != "return"}
    return called


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of the arguments of a command."""
    return typing.get_type_hints(function, include_extras=True)


def _takes_several(notes: Sequence[Any]) -> bool:
    """Return whether several values follow an option with these notes, separated by spaces."""
    return any(isinstance(note, Parameter) and note.consume_multiple for note in notes)


def _alternatives(function: Callable[..., Any]) -> list[tuple[str, ...]]:
    """Return the groups of options of a command of which only one may be given."""
    kinds = [hint for hint in _hints(function).values() if isinstance(hint, type)]
    return [names for kind in kinds if issubclass(kind, Options) for names in kind.alternatives()]


def words_of(function: Callable[..., Any], values: Mapping[str, Any]) -> list[str]:
    """Return `values` of a command as words of its command line: of options those that were given.

    What is None is left out.
    """
    words: list[str] = []
    for name, parameter in inspect.signature(function).parameters.items():
        value, notes = values.get(name), getattr(parameter.annotation, "__metadata__", ())
        if value is None:
            continue
        if isinstance(value, Options):
            words += words_of(type(value), value.given_values())
        elif isinstance(value, bool):
            off = "--no-" + flag(name)[2:] if ON in notes else f"{flag(name)}=false"
            words.append(flag(name) if value else off)
        elif isinstance(value, (list, tuple)) and _takes_several(notes):
            words += [flag(name), *map(str, value)]
        else:
            text = json.dumps(value) if isinstance(value, dict) else comma_list(value)
            words += [f"{flag(name)}={text}"] if text.startswith("-") else [flag(name), text]
    return words


def command_text(words: Sequence[str]) -> str:
    """Return a command as a shell reads it, on lines that are narrower than the terminal."""
    lines, indent = [""], "\n      "
    for number, word in enumerate(map(shlex.quote, words)):
        after = words[number + 1] if number + 1 < len(words) else ""
        pair = word if not word.startswith("--") or after.startswith("--") else f"{word} {after}"
        if number and len(lines[-1]) + len(pair) > WIDTH - 12:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return f" \\{indent}".join(lines)


# -- the command line -------------------------------------------------------------------------

COMMON = {
    "--config FILE": "options from a TOML, YAML or JSON table; those typed replace them",
    "--json [FILE]": "write the result as JSON to FILE; without FILE, print it instead of text",
    "--quiet": "results, warnings and errors only: no bars, no next command",
    "--verbose": "(-v) everything that is known and done, not only results and warnings",
    "--debug": "show the Python traceback of an error; add it to a bug report",
}
"""The options of every command."""
_OF_PROGRAM = {
    "--version": "print the version",
    "--print-completion bash|zsh|fish": "print a script that completes commands and options in "
    "this shell",
}

_DEFAULT = Parameter(negative_bool=(), negative_iterable=(), negative_none=())
"""Only a switch that may be on by default has a --no- (`types.ON`)."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    """A command of a program; see `Program.add`."""

    function: Callable[..., Any]
    app: App
    summary: str
    usage: str
    stopped: Callable[[Mapping[str, Any]], str] | None
    logs: Callable[[Mapping[str, Any]], str | os.PathLike[str] | None] | None
    epilog: str
    config: Callable[[dict[str, Any], str], dict[str, Any]] | None
    common: Mapping[str, Any]
    """The options of every command that the program has beside COMMON."""

    @functools.cached_property
    def arguments(self) -> list[Any]:
        """The arguments, all of which --help-all shows."""
        every = self.app.assemble_argument_collection(
            default_parameter=_DEFAULT, parse_docstring=True
        )
        return [argument for argument in every if not argument.children_recursive]

    def refuse_empty(self, words: Sequence[str], table: Mapping[str, Any]) -> None:
        """Raise ConfigError for an option with an empty text, as of an unset shell variable.

        In Python, "" may stand for a text that is not given; typed, and in --config, it is refused.
        """
        known = {name: argument for argument in self.arguments for name in argument.names}
        for word, after in zip(words, (*words[1:], None), strict=True):
            name, equals, value = word.partition("=")
            if name in known and not _is_switch(known[name]) and (value if equals else after) == "":
                check_value(flag(known[name].field_info.name), "")
        for name, value in table.items():
            if value == "":
                check_value(flag(name), "")

    def each_once(self, words: Sequence[str]) -> list[str]:
        """Return words with every option once: the parts of a list follow each other.

        Raises:
            ConfigError: another option is typed twice.
        """
        known = {name: argument for argument in self.arguments for name in argument.names}
        places: dict[str, list[int]] = {}
        for place, word in enumerate(words):
            if (argument := known.get(word.partition("=")[0])) is not None:
                places.setdefault(argument.field_info.name, []).append(place)
        result: list[str | None] = list(words)
        for name, at in places.items():
            argument = known[words[at[0]].partition("=")[0]]
            if len(at) == 1 or argument.parameter.consume_multiple:
                continue
            typed, values = [], []
            for place in at:
                word, after = words[place], (*words[place + 1 : place + 2], "")[0]
                separate = "=" not in word and not _is_switch(argument)
                typed.append(f"{word} {after}".rstrip() if separate else word)
                values.append(after if separate else word.partition("=")[2])
                result[place : place + 1 + separate] = [None] * (1 + separate)
            if argument.parameter.converter is not JOINED.converter:
                raise ConfigError(f"{' and '.join(typed)}: give {flag(name)} once")
            result[at[0]] = f"{flag(name)}={','.join(values)}"
        return [word for word in result if word is not None]

    def several(self) -> bool:
        """Return whether several paths may be given without an option."""
        many = {a.field_info.name for a in self.arguments if a.parameter.consume_multiple}
        return bool(many & set(self.positional()))

    def positional(self) -> list[str]:
        """Return the names of required arguments that are written without their flags.

        They are, unless one of several values stands before another one.
        """
        required = [a for a in self.arguments if a.required and a.index is not None]
        several = [a for a in required if a.parameter.consume_multiple]
        return [] if several and several != required[-1:] else [a.field_info.name for a in required]

    def usage_line(self) -> str:
        """Return the required arguments as they are written."""
        words, positional = [], self.positional()
        for argument in self.arguments if not self.usage else ():
            name, parameter = argument.field_info.name, argument.parameter
            metavar = name.upper() if name in positional else parameter.metavar or "NAME"
            metavar += f" [{metavar} ...]" if parameter.consume_multiple else ""
            if argument.required:
                words.append(metavar if name in positional else f"{flag(name)} {metavar}")
        return f"{self.usage or ' '.join(words)} [options]".lstrip()


class Program:
    """A command line made of typed functions."""

    def __init__(self, name: str, description: str, epilog: str, version: str) -> None:
        """Make a program; `description` and `epilog` stand around the commands in its help."""
        self.name, self.version = name, version
        self._description, self._epilog = description.strip(), epilog.strip()
        self.entries: dict[tuple[str, ...], _Entry] = {}
        self._others: dict[str, tuple[Callable[[str], bool], Callable[[], Mapping[str, str]]]] = {}
        self._common: dict[str, tuple[str, Callable[[str], object]]] = {}
        self._unused: dict[str, Callable[[Sequence[str]], str | None]] = {}
        self._app = _new_app(name)

    def add(
        self,
        function: Callable[..., Any],
        name: str = "",
        *,
        summary: str = "",
        usage: str = "",
        stopped: Callable[[Mapping[str, Any]], str] | None = None,
        logs: Callable[[Mapping[str, Any]], str | os.PathLike[str] | None] | None = None,
        epilog: str = "",
        config: Callable[[dict[str, Any], str], dict[str, Any]] | None = None,
    ) -> None:
        """Add a function that `command` decorates.

        Args:
            function: the command.
            name: of the command; not given: that of the function. "fit eagle3" is one of a group.
            summary: what it does; not given: the first paragraph of its docstring.
            usage: what follows the name in the usage line; not given: its required arguments.
            stopped: called with the arguments when the command was interrupted; says what is kept.
            logs: called with the arguments; returns the path that is made, PATH: the log file is
                PATH.log.
            epilog: text at the end of the help; its first paragraph is that of -h.
            config: called with the table of --config and its path; returns the table of options
                that it stands for, if it is a file of another kind.
        """
        words = tuple((name or function.__name__).split())
        app = self._app
        for word in words[:-1]:
            if word not in app:
                app.command(_new_app(word))
            app = app[word]
        app.command(function, name=words[-1])
        summary = summary or _description(function)[0].partition("\n\n")[0]
        self.entries[words] = _Entry(
            function, app[words[-1]], summary, usage, stopped, logs, epilog, config, self._common
        )

    def add_others(
        self, group: str, add: Callable[[str], bool], listed: Callable[[], Mapping[str, str]]
    ) -> None:
        """Say how commands of a group are found that are not known when the program starts.

        Args:
            group: the first word of the commands.
            add: called with the second word; adds that command, or returns False: it is unknown.
            listed: called for help; returns the names of some of them, each with a text.
        """
        self._others[group] = add, listed

    def add_common(
        self,
        option: str,
        text: str,
        use: Callable[[str], object],
        unused: Callable[[Sequence[str]], str | None],
    ) -> None:
        """Add an option of every command, such as "--draft-code NAME", that may be there often.

        Args:
            option: with the name of its value. text: of --help-all.
            use: called with each value, before the command.
            unused: called with all values after it; says which of them changed nothing.
        """
        self._common[option] = text, use
        self._unused[option.partition(" ")[0]] = unused

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Run a command line and return its exit code.

        A character that the terminal cannot show is printed as a question mark.
        """
        with lenient_streams():
            return self._main(arguments)

    def _main(self, arguments: Sequence[str] | None) -> int:
        words = [at_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
        uses = {option.partition(" ")[0]: use for option, (_, use) in self._common.items()}
        try:
            common, rest = _take_common(words, uses)
            for option, use in uses.items():
                for value in getattr(common, option):
                    use(value)
            added = self._add_named(rest)
        except (argparse.ArgumentError, SpecDataError) as error:
            return self._refuse((), str(error))
        try:
            return self._run(
                words, common, rest, [f for o in uses for v in getattr(common, o) for f in (o, v)]
            )
        finally:
            if added:  # the next command line may mean other code by this name
                del self.entries[added], self._app[added[0]][added[1]]

    def _add_named(self, rest: Sequence[str]) -> tuple[str, ...]:
        """Add the command of a group that only these words name; return its words, () for none."""
        chain = tuple(rest[:2])
        if len(chain) < 2 or chain in self.entries or chain[1].startswith("-"):
            return ()
        add = self._others.get(chain[0])
        return chain if add and add[0](chain[1]) else ()

    def _run(self, words: Sequence[str], common: Any, rest: list[str], kept: Sequence[str]) -> int:
        """Run the command line `words`, of which `rest` is not `common` to all commands.

        `kept` are words for the next command, too.
        """
        chain, _, tokens = self._app.parse_commands(rest)
        entry, given = self.entries.get(chain), dict[str, Any]()
        unknown = entry is None and bool(tokens)  # there is no help about it
        text = ""
        if common.version:
            text = f"{self.name} {self.version}"
        elif common.print_completion:
            text = self._app.generate_completion(shell=common.print_completion)
        elif (common.help or common.help_all) and not unknown:
            text = self.help(chain, common.help_all)
        if text:
            return print_text(text)

        def stopped() -> str:
            if entry is None or entry.stopped is None:
                return "interrupted"
            progress = entry.stopped(given) if given else "nothing was written yet"
            return f"stopped: {progress}\nresume:  {command_text([self.name, *words])}"

        def run() -> int:
            if entry is None:
                return self._refuse(chain, self._no_command(chain, tokens))
            try:
                call = self._parsed(entry, rest, common)
            except MissingArgumentError as error:
                assert entry is not None and error.argument is not None
                name = error.argument.field_info.name
                word = name.upper() if name in entry.positional() else flag(name)
                word += " needs a value" if word in rest else " is missing"
                return self._refuse(chain, word)
            except CycloptsError as error:
                error.verbose = False
                message = str(error).strip()
                if isinstance(error, UnknownOptionError):  # a key of --config: "[max_length]"
                    message = re.sub(r'"\[(\w+)\]"', lambda key: f'"{flag(key[1])[2:]}"', message)
                return self._refuse(chain, message)
            assert entry is not None
            if common.json in words and entry.several() and os.path.isfile(common.json):  # noqa: PTH113
                raise ConfigError(
                    f"--json {common.json}: this file exists, and the command reads such files; to "
                    f"replace it, write --json={common.json}"
                )
            given.update(call.arguments)
            started = time.monotonic()
            keep_freed_memory()
            file = start_log_file(entry.logs(given)) if entry.logs else None
            result = entry.function(*call.args, **call.kwargs)
            for option, unused in self._unused.items():
                values = getattr(common, option)
                if values and (text := unused(values)):
                    logger.warning("warning[%s]: %s", option.strip("-"), text)
            if isinstance(result, Result) and (details := result.details()):
                logger.info("%s", details)
            _show(result, common.json)
            if file is not None and file.written:
                seconds = time.monotonic() - started
                logger.log(NOTICE, "%.0f seconds; everything else: %s", seconds, file.path)
            return self._finish(result, words, bool(given.get("dry_run")), kept)

        return run_cli(run, common, stopped)

    def _parsed(
        self, entry: _Entry | None, words: list[str], common: Any
    ) -> inspect.BoundArguments:
        """Return the arguments of one command: those typed, over --config's table."""
        table = read_config_file(Path(common.config)) if entry and common.config else {}
        if entry and entry.config and table:
            table = entry.config(table, common.config)
        table = {name: value for name, value in table.items() if value is not None}
        if entry and table:
            own = {argument.field_info.name for argument in entry.arguments}
            commands = {chain[0] for chain in self.entries if chain}
            if wrong := sorted((commands & table.keys()) - own):  # cyclopts passes them over
                raise ConfigError(
                    f"--config {common.config}: {wrong[0]} is a command, and no option of this "
                    "one; write the options of one command into a file, without a heading"
                )
            typed = {word.partition("=")[0] for word in words}
            for names in _alternatives(entry.function):
                if any(flag(name) in typed for name in names):
                    table = {name: v for name, v in table.items() if name not in names}
            several = {a.field_info.name for a in entry.arguments if a.parameter.consume_multiple}
            for name, value in table.items():  # one text where an option takes one
                if isinstance(value, dict):
                    table[name] = json.dumps(value, default=str)  # YAML and TOML have dates
                elif isinstance(value, list) and name not in several:
                    table[name] = comma_list(value)
        source = f"--config {common.config}"
        config = Dict(table, source=source, use_commands_as_keys=False)
        self._app.config = (config,) if table else ()
        if common.config is not None:
            check_value("--config", common.config)
        if common.json is not None and common.json != "-":
            check_file_to_write("--json", common.json)
        if entry is not None:
            entry.refuse_empty(words, table)
        return self._app.parse_args(entry.each_once(words) if entry else words)[1]

    def _finish(
        self, result: Any, words: Sequence[str], dry: bool, kept: Sequence[str] = ()
    ) -> int:
        """Name the command to run next, which is no `dry` run; return the exit code.

        `kept` are words of options of every command that it has too.
        """
        if not isinstance(result, Result):
            return 0
        following = list(result.next_command)
        if following[:1] == [self.name] and not set(kept) <= set(following):
            following += kept
        if result.again:
            following = [self.name, *(w for w in words if not w.startswith("--dry-run"))]
            if dry and not any(word.startswith("--dry-run") for word in words):  # of --config
                following.append("--dry-run=false")
        if following:
            logger.log(NOTICE, "\n%s:  %s", result.again or "next", command_text(following))
        return result.exit_code

    def _refuse(self, chain: tuple[str, ...], message: str) -> int:
        print(f"{self._usage(chain)}\nerror: {printable(message)}", file=sys.stderr)
        print(f"All options: {self._words(chain)} --help-all", file=sys.stderr)
        return 2

    def _no_command(self, chain: tuple[str, ...], tokens: Sequence[str]) -> str:
        """Say that no command is named, or none of its name, and which there are."""
        kind, count = _kind_of(chain), len(chain)
        names = [c[count] for c in self.entries if c[:count] == chain and len(c) > count]
        others = self._others[chain[0]][1]() if chain and chain[0] in self._others else ()
        names = list(dict.fromkeys([*names, *others]))  # a group has several entries
        known = f"({kind}s: {', '.join(names)})"
        if tokens and not tokens[0].startswith("-"):
            return f'unknown {kind} "{tokens[0]}"{did_you_mean(tokens[0], names)} {known}'
        before = f" before {tokens[0]}" if tokens else ""
        return f"{kind.upper()} is missing{before} {known}"

    def _words(self, chain: tuple[str, ...]) -> str:
        return " ".join((self.name, *chain))

    def _usage(self, chain: tuple[str, ...]) -> str:
        missing = f"{_kind_of(chain).upper()} [options]"
        entry = self.entries.get(chain)
        usage = f"usage: {self._words(chain)} {entry.usage_line() if entry else missing}"
        return "\n".join(textwrap.wrap(usage, WIDTH, subsequent_indent=" " * 7))

    # -- help --

    def help(self, chain: tuple[str, ...] = (), everything: bool = False) -> str:
        """Return the help of a command: its first options, or with `everything` all of them."""
        if chain not in self.entries:
            return self._help_of_group(chain)
        entry = self.entries[chain]
        text, examples = _description(entry.function)
        groups: dict[str, list[str]] = {"options": []}
        hidden, positional = 0, entry.positional()
        for argument in entry.arguments:
            names = [group.name for group in argument.parameter.group or ()]
            title = "options" if names[:1] in ([], ["Parameters"], ["Arguments"]) else names[0]
            if title != "options" and not everything:
                hidden += 1
                continue
            groups.setdefault(title, []).extend(_option_lines(argument, positional, everything))
        if everything:
            groups["every command"] = _rows(self._every_command)
        lines = [self._usage(chain), "", text if everything else text.partition("\n\n")[0]]
        for title, rows in groups.items():
            lines += ["", f"{title}:", *rows]
        if not everything:
            count = f"{hidden} more option{'s' * (hidden > 1)} and " if hidden else ""
            lines += [f"{count}those of every command: {self._words(chain)} --help-all"]
        if examples:
            lines += ["", "examples:", textwrap.indent(examples, "  ")]
        if entry.epilog:
            lines += ["", entry.epilog if everything else entry.epilog.partition("\n\n")[0]]
        return "\n".join(lines)

    @property
    def _every_command(self) -> dict[str, str]:
        """The options of every command, with their texts."""
        return COMMON | {option: text for option, (text, _) in self._common.items()}

    def _help_of_group(self, chain: tuple[str, ...]) -> str:
        texts: dict[str, str] = {}
        description, depth = self._description, len(chain)
        for words, entry in self.entries.items():
            if words[:depth] == chain:
                about = _description(entry.function)[0].partition("\n\n")[0]
                texts.setdefault(words[depth], entry.summary if words[depth + 1 :] == () else about)
                description = about if chain else description
        if chain[:1] and chain[0] in self._others:
            for name, package in self._others[chain[0]][1]().items():
                texts.setdefault(name, f"of the installed package {package}")
        lines = [self._usage(chain), "", description]
        lines += ["", f"{_kind_of(chain)}s:", *_rows(texts)]
        if chain:
            of = f"{self._words(chain)} {_kind_of(chain).upper()}"
            lines += ["", f"{of} -h shows its first options, --help-all all."]
        if not chain:
            lines += ["", "every command:", *_rows(self._every_command)]
            lines += ["", "of the program:", *_rows(_OF_PROGRAM), "", self._epilog]
        return "\n".join(lines)


def _new_app(name: str) -> App:
    app = App(name=name, help_flags=(), version_flags=(), default_parameter=_DEFAULT)
    app.exit_on_error = app.print_error = False
    return app


class _Once(argparse.Action):
    """Keeps the value of an option, which is refused if it is there twice."""

    def __call__(self, _parser: Any, common: Any, value: Any, name: str | None = None) -> None:
        before, value = getattr(common, self.dest), self.const if value == [] else value
        if before not in (None, False):
            both = f"{name} and {name}" if value is True else f"{name} {before} and {name} {value}"
            raise argparse.ArgumentError(None, f"{both}: give {name} once")
        setattr(common, self.dest, self.const if value is None else value)


def _take_common(words: Sequence[str], often: Iterable[str] = ()) -> tuple[Any, list[str]]:
    """Split off the options of every command; `--json DIR` leaves DIR to the command.

    `often` are options that a program adds; each becomes the list of its values.

    Raises:
        argparse.ArgumentError: one of them lacks its value, is there twice, or contradicts another.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    switch: dict[str, Any] = {"action": _Once, "nargs": 0, "const": True, "default": False}
    parser.add_argument("--quiet", **switch)
    parser.add_argument("--debug", **switch)
    parser.add_argument("-v", "--verbose", **switch)
    for names in (("--version",), ("--help-all",), ("-h", "--help")):
        parser.add_argument(*names, action="store_true")
    parser.add_argument("--json", nargs="?", const="-", action=_Once)
    parser.add_argument("--config", action=_Once)
    parser.add_argument("--print-completion", choices=("bash", "zsh", "fish"), action=_Once)
    for option in often:
        parser.add_argument(option, dest=option, action="append", default=[])
    words = list(words)
    for at, word in enumerate(words[:-1]):
        # isdir: of a name that no file system takes, Path.is_dir raises
        if word == "--json" and (
            os.path.isdir(words[at + 1]) or re.match("-.", words[at + 1])  # noqa: PTH112
        ):
            words[at] = "--json=-"
    common, rest = parser.parse_known_args(words)
    if common.quiet and common.verbose:
        raise argparse.ArgumentError(None, "--quiet and --verbose: choose one")
    return common, rest


def _kind_of(chain: tuple[str, ...]) -> str:
    """Return what the word after these is."""
    return "draft" if chain else "command"


def _description(function: Callable[..., Any]) -> tuple[str, str]:
    """Return the text of a docstring before its sections, and its examples."""
    text, _, _ = (inspect.getdoc(function) or "").partition("\nArgs:\n")
    text, _, examples = text.partition("\nExamples:\n")
    return text.strip(), textwrap.dedent(examples).strip()


_NOT_SHOWN = (None, inspect.Parameter.empty, False, "", (), -1)
"""Defaults that --help does not show: they stand for a value that is not given."""


def _option_lines(argument: Any, positional: Sequence[str], everything: bool) -> list[str]:
    """Return the lines of --help about one option; not `everything`: one sentence."""
    names = [name for name in argument.names if name.startswith("--")]
    choices, default = argument.get_choices(), argument.field_info.default
    text = " ".join((argument.parameter.help or "").split())
    if not everything:  # "0: all" stays whole
        text = re.split(r"(?<=.{12})(?:[.;]|(?<!\d):) (?=\D)", text, maxsplit=1)[0]
    text = text.removesuffix(".")
    if choices:
        text += f" (one of {', '.join(choices)})"
    if _is_switch(argument):
        text += " [on]" if default is True else ""
        return _columns(", ".join(sorted(names, key=lambda n: not n.startswith("--no-"))), text)
    if default == default and default not in _NOT_SHOWN:
        text += f" [{default}]"
    if argument.field_info.name in positional:
        return _columns(argument.field_info.name.upper(), text)
    metavar = "NAME" if choices else argument.parameter.metavar or _metavar(argument.hint)
    many = " ..." if argument.parameter.consume_multiple else ""
    return _columns(f"{names[0]} {metavar}{many}", text)


def _is_switch(argument: Any) -> bool:
    """Return whether no value follows an option: --on-policy, --norm-before-fc."""
    return argument.is_flag() or any(name.startswith("--no-") for name in argument.names)


def _metavar(hint: Any) -> str:
    """Return what stands for a value of the first type of an annotation."""
    while typing.get_origin(hint) is not None:
        hint = typing.get_args(hint)[0]
    return {str: "TEXT", int: "N", float: "X"}.get(hint, "")


def _rows(texts: Mapping[str, str]) -> list[str]:
    return [line for name, text in texts.items() for line in _columns(name, text)]


def _columns(left: str, right: str) -> list[str]:
    """Return a name and its text as lines of two columns, 80 wide."""
    indent = 24
    head = f"  {left}".ljust(indent)
    lines = textwrap.wrap(right, 80 - indent, break_on_hyphens=False)
    if not head.endswith(" ") or not lines:
        lines.insert(0, "")
    return [(head + lines[0]).rstrip(), *(" " * indent + line for line in lines[1:])]


def keep_freed_memory() -> bool:
    """Let glibc keep what is freed, up to 32 MB, its limit: a new tensor needs no new pages then.

    This saves 3 to 13 % of the CPU-seconds of a command. Return whether malloc took it; settings
    of the environment stay.
    """
    m_trim_threshold, m_mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # another C library
        return False
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    return bool(mallopt(m_trim_threshold, 2**31 - 1) and mallopt(m_mmap_threshold, 1 << 25))


def _show(result: Any, file: str | None) -> None:
    """Print a result as text or JSON, or write its JSON to the file of --json."""
    if file != "-" and result is not None and str(result):
        print(printable(str(result)), flush=True)
    if file is not None:
        limited = file == "-" and not str(sys.stdout.encoding or "utf").lower().startswith("utf")
        text = json.dumps(result.facts(), indent=2, ensure_ascii=limited, default=str)
        if file == "-":
            print(printable_json(text), flush=True)
        else:
            remove_dead_of(Path(file).absolute())
            write_atomically(Path(file).absolute(), text + "\n")
