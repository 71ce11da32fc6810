"""Write the whole reference of the commands and of the Python API as two Markdown files.

    python scripts/reference.py --out build      # build/commands.md, build/api.md

Both are made from the typed functions: what `--help-all` prints, and what `help()` prints. They are
longer than all other pages together, so they are made where they are wanted and not part of the
repository; the list of docs/commands.md is `command_list`, which a test compares.
"""

import argparse
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spec_data
import spec_data.cli
import spec_train
import spec_train.cli
from spec_data.terminal.command import Program

PROGRAMS: tuple[Program, ...] = (spec_data.cli.PROGRAM, spec_train.cli.PROGRAM)


def first_sentence(function: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def command_list() -> str:
    """Return the list of all commands; the drafts of `fit` share a line."""
    lines = {}
    for program in PROGRAMS:
        for chain, entry in program.entries.items():
            lines[f"- `{program.name} {chain[0]}`: "] = first_sentence(entry.function)
    return "\n".join(name + text for name, text in lines.items())


def command_pages() -> Iterator[str]:
    """Yield the sections of commands.md: what --help-all prints of every command."""
    for program in PROGRAMS:
        for chain in program.entries:
            title = " ".join((program.name, *chain))
            yield f"## {title}\n\n```\n{program.help(chain, everything=True).strip()}\n```\n"


def _without_notes(thing: Any) -> inspect.Signature:
    """Return a signature whose types have no notes for the command line."""
    signature = inspect.signature(thing)
    hints = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    given = signature.parameters.values()
    plain = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in given]
    return signature.replace(parameters=plain)


def api_pages() -> Iterator[str]:
    """Yield the sections of api.md: signature and docstring of every public name."""
    for package in (spec_data, spec_train):
        for name in sorted(package.__all__):
            thing = getattr(package, name)
            try:
                signature = str(_without_notes(thing))
            except (TypeError, ValueError, NameError):  # no signature, or types for checkers alone
                signature = "(...)" if callable(thing) else ""
            text = inspect.getdoc(thing) or ""
            yield f"## {package.__name__}.{name}\n\n```python\n{name}{signature}\n\n{text}\n```\n"


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    for name, title, sections in (
        ("commands.md", "Commands", command_pages()),
        ("api.md", "Python API", api_pages()),
    ):
        text = f"# {title}\n\n" + "\n".join(sections)
        (folder / name).write_text(text, encoding="utf-8")
        print(f"wrote {folder / name}: {len(text.split()):,} words")


if __name__ == "__main__":
    main()
