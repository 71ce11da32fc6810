"""The documentation site: hooks of mkdocs, and the reference that is made from the functions.

    pip install '.[docs]'; mkdocs serve      # or: mkdocs build --strict

The pages of docs/ are read on GitHub as well, so they hold nothing that only mkdocs knows. The
navigation is the list of docs/README.md. Pages are added that are not in docs/: every command as
`--help-all` prints it, every public name as `help()` prints it, and `OUTSIDE`. The paragraphs
between `<!-- tabs -->` and `<!-- end tabs -->` that begin with bold words become tabs.
"""

import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import spec_data
import spec_data.cli
import spec_train
import spec_train.cli
from spec_data.terminal.command import Program
from spec_train.diagnosis.checks import CHECKS

ROOT = Path(__file__).parents[1]
OUTSIDE = ("CHANGELOG.md", "CONTRIBUTING.md", "spec_data/shards/FORMAT.md")
PROGRAMS: tuple[Program, ...] = (spec_data.cli.PROGRAM, spec_train.cli.PROGRAM)
_LINK = re.compile(r"\[([^\[\]]*)\]\((?!https?:|#)(?:\.\./)*(?:docs/)?([^)#]+)(#[^)]*)?\)")
_TABS = re.compile(r"<!-- tabs -->\n(.*?)<!-- end tabs -->\n", re.DOTALL)
_TAB = re.compile(r"^\*\*(.+?)\.\*\* ", re.MULTILINE)


# -- the reference -----------------------------------------------------------------------------


def first_sentence(function: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    return " ".join((inspect.getdoc(function) or "").partition("\n\n")[0].split())


def command_list() -> str:
    """Return the list of docs/commands.md, which a test compares; drafts of `fit` share a line."""
    lines = {}
    for program in PROGRAMS:
        for chain, entry in program.entries.items():
            lines[f"- `{program.name} {chain[0]}`: "] = first_sentence(entry.function)
    return "\n".join(name + text for name, text in lines.items())


def doctor_codes() -> str:
    """Return the sections of docs/doctor.md about the codes, which a test compares."""
    sections = []
    for name, code in CHECKS.items():
        text = f"{code.symptom[0].upper()}{code.symptom[1:]}. *Cause*: {code.cause}."
        text += f" *Fix*: {code.fix}." * bool(code.fix)
        text = textwrap.fill(text, 120, break_on_hyphens=False)
        sections.append(f"### {name}\n\n{text}\n")
    return "\n".join(sections)


def command_pages() -> Iterator[str]:
    """Yield the sections of a page of all commands; those of several words are tabs of one."""
    headings = set()
    for program in PROGRAMS:
        for chain in program.entries:
            heading = f"## {program.name} {chain[0]}\n"
            text = f"```\n{program.help(chain, everything=True).strip()}\n```\n"
            if len(chain) > 1:
                text = _tab(" ".join(chain[1:]), text)
            yield text if heading in headings else f"{heading}\n{text}"
            headings.add(heading)


def _without_notes(thing: Any) -> inspect.Signature:
    """Return a signature whose types have no notes for the command line."""
    signature = inspect.signature(thing)
    hints = typing.get_type_hints(thing.__init__ if inspect.isclass(thing) else thing)
    given = signature.parameters.values()
    plain = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in given]
    return signature.replace(parameters=plain)


def api_pages() -> Iterator[str]:
    """Yield the sections of a page of all functions: signature and docstring of public names."""
    for package in (spec_data, spec_train):
        for name in sorted(package.__all__):
            thing = getattr(package, name)
            try:
                signature = str(_without_notes(thing))
            except (TypeError, ValueError, NameError):  # no signature, or types for checkers alone
                signature = "(...)" if callable(thing) else ""
            text = inspect.getdoc(thing) or ""
            yield f"## {package.__name__}.{name}\n\n```python\n{name}{signature}\n\n{text}\n```\n"


# -- hooks of mkdocs ---------------------------------------------------------------------------


def _tab(title: str, text: str) -> str:
    return f'=== "{title}"\n\n{textwrap.indent(text, "    ")}\n'


def tabs(markdown: str) -> str:
    """Return a page with its marked paragraphs as tabs."""

    def one(match: re.Match[str]) -> str:
        before, *parts = _TAB.split(match[1])
        return before + "".join(map(_tab, parts[::2], parts[1::2]))

    return _TABS.sub(one, markdown)


def links(markdown: str, names: set[str]) -> str:
    """Return a page whose links to files of the repository lead to pages, or are only words."""

    def one(match: re.Match[str]) -> str:
        text, path, anchor = match.groups(default="")
        if (name := Path(path).name if path in OUTSIDE else path) in names:
            return f"[{text}]({name}{anchor})"
        return text

    return _LINK.sub(one, markdown)


def on_config(config: Any) -> Any:
    """Make the navigation of the list of docs/README.md."""
    text = links((ROOT / "docs" / "README.md").read_text(encoding="utf-8"), _names(config))
    nav: list[Any] = [{"Start": "README.md"}]
    for section in text.split("\n## ")[1:]:
        title, _, lines = section.partition("\n")
        pages = re.findall(r"^- \[(.+?)\]\(([^)]+\.md)\)", lines, re.MULTILINE)
        nav.append({title: [{f"{name[0].upper()}{name[1:]}": path} for name, path in pages]})
    next(part for part in nav if "Reference" in part)["Reference"] += [
        {"Every option": "all-commands.md"},
        {"Every function": "all-api.md"},
    ]
    config.nav = [*nav, {"Project": ["CHANGELOG.md", "CONTRIBUTING.md"]}]
    return config


def _names(config: Any) -> set[str]:
    docs = Path(config.docs_dir)
    inside = {str(file.relative_to(docs)) for file in docs.rglob("*") if file.is_file()}
    return inside | {Path(path).name for path in OUTSIDE}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are not in docs/."""
    from mkdocs.structure.files import File

    pages = {Path(path).name: (ROOT / path).read_text(encoding="utf-8") for path in OUTSIDE}
    pages["all-commands.md"] = "# Every option\n\n" + "\n".join(command_pages())
    pages["all-api.md"] = "# Every function\n\n" + "\n".join(api_pages())
    for name, content in pages.items():
        files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make a page of the repository one of the site."""
    return markdown if page.file.name.startswith("all-") else tabs(links(markdown, _names(config)))
