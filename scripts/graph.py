"""The import graph of this repository: which tests a change needs, and the map of the rooms.

    python scripts/graph.py changed [BASE]  # test files that the changes since BASE need
    python scripts/graph.py map [--write]   # who imports whom, as in CONTRIBUTING.md

A module depends on what it imports anywhere in it, and on what it names in a text such as
"spec_data.capture.model.Target"; a test also on the conftest.py files above it. Of a package that
is imported as a whole, the public names count that are used. A changed file that is no module needs
the modules that name it or its folder; if none does, everything. `changed` prints a file a line,
"tests" for everything, and nothing if no test is needed. BASE is a commit; not given: where this
branch left main. What is not committed counts as changed.
"""

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("spec_data", "spec_train")
EVERYTHING = ("pyproject.toml", "scripts/test.sh", "scripts/_env.sh")
"""Files that decide how tests run."""
START, END = (
    "<!-- rooms: python scripts/graph.py map --write -->\n```mermaid\n",
    "```\n<!-- end -->",
)
Sources = Mapping[str, str]


def module_of(path: str) -> str:
    """Return the module of a file: spec_data/shards/__init__.py is spec_data.shards."""
    parts = PurePosixPath(path).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def names_in(text: str) -> tuple[set[str], set[str], set[str]]:
    """Return what a module imports, with members; what it takes of modules; and its texts."""
    imported, used, texts = set[str](), set[str](), set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return imported, used, texts


def public_names(stub: str, package: str) -> dict[str, str]:
    """Return the module of every public name of a package, by its __init__.pyi."""
    found: dict[str, str] = {}
    for node in ast.walk(ast.parse(stub)):
        if isinstance(node, ast.ImportFrom):
            module = f"{package}.{node.module}" if node.level else str(node.module)
            found |= {f"{package}.{a.asname or a.name}": f"{module}.{a.name}" for a in node.names}
    return found


def edges_of(sources: Sources, stubs: Sources = {}) -> dict[str, set[str]]:  # noqa: B006
    """Return what every Python file depends on, both by their paths.

    Args:
        sources: the text of every file, by its path.
        stubs: those of the __init__.pyi of packages whose names are imported on first use.
    """
    paths = {module_of(path): path for path in sources}
    public: dict[str, str] = {}
    for path, text in stubs.items():
        public |= public_names(text, module_of(path))
    packages = {module_of(path) for path in stubs}

    def path_of(name: str) -> set[str]:
        name = public.get(name, name)
        while name and name not in paths:
            name = name.rpartition(".")[0]
        return {paths[name]} if name and name not in packages else set()

    edges: dict[str, set[str]] = {}
    for path, text in sources.items():
        imported, used, texts = names_in(text)
        named = {t.partition(":")[0] for t in texts if re.fullmatch(r"(\w+\.)+\w+(:\w+)?", t)}
        of_package = {n for n in used if n.partition(".")[0] in packages & imported}
        edges[path] = {p for n in imported | named | of_package for p in path_of(n)} - {path}
        for folder in PurePosixPath(path).parents:
            if path.startswith("tests/") and (above := f"{folder}/conftest.py") in sources:
                edges[path] |= {above} - {path}
    return edges


def needed(changed: Iterable[str], sources: Sources, edges: Mapping[str, set[str]]) -> set[str]:
    """Return the test files that changed files need; {"tests"} is all of them.

    A file that is gone is as one that was edited: what imports it still names it.
    """
    users: dict[str, set[str]] = defaultdict(set)
    for path, others in edges.items():
        for other in others:
            users[other].add(path)
    waiting, seen = list[str](), set[str]()
    for path in changed:
        if path in EVERYTHING:
            return {"tests"}
        referring = {path}
        if path.endswith("/__init__.py"):
            referring |= {p for p in sources if p.startswith(path.removesuffix("__init__.py"))}
        elif path not in sources:
            referring = _referring(path, sources)
            if not referring:
                return {"tests"}
        waiting += referring
    readers = {p for p, text in sources.items() if p.startswith("tests/") and _reads_tree(text)}
    waiting += readers if waiting else ()
    while waiting:
        if (path := waiting.pop()) not in seen:
            seen.add(path)
            waiting += users[path]
    return {p for p in seen if p.startswith("tests/") and PurePosixPath(p).name.startswith("test_")}


def _reads_tree(text: str) -> bool:
    """Whether a test reads all sources: the rules of the house, the documentation."""
    return bool(re.search(r"ROOT\b.*\.(rglob|glob)\(|\"ls-files\"", text))


def _referring(path: str, sources: Sources) -> set[str]:
    """Return the Python files that name another file, its module, or a folder that it is in."""
    file = PurePosixPath(path)
    folders = {str(folder) for folder in file.parents} | {folder.name for folder in file.parents}
    whole = {f'"{name}"' for name in folders - {"", ".", *PACKAGES, "tests"}}
    whole |= {module_of(path)} if file.suffix == ".py" else set()
    return {
        user
        for user, text in sources.items()
        if re.search(rf"(?<![\w.]){re.escape(file.name)}(?!\w)", text)
        or any(name in text for name in whole)
    }


def read_sources() -> tuple[Sources, Sources]:
    """Return the Python files of the repository, and the stubs of its packages."""
    python = [p for p in _git("ls-files", "--cached", "--others", "--exclude-standard")
              if p.endswith(".py") and (ROOT / p).is_file()]  # fmt: skip
    stubs = [f"{package}/__init__.pyi" for package in PACKAGES]
    return (
        {path: (ROOT / path).read_text(encoding="utf-8") for path in python},
        {path: (ROOT / path).read_text(encoding="utf-8") for path in stubs},
    )


def changed_files(base: str | None) -> list[str]:
    """Return what differs from a commit, with files that git does not know yet."""
    since = base or _git("merge-base", "HEAD", "main")[0]
    fresh = _git("ls-files", "--others", "--exclude-standard")
    return sorted({*_git("diff", "--name-only", "--no-renames", since), *fresh})


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"git {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout.splitlines()


# -- the map --------------------------------------------------------------------------------------


def room_of(path: str) -> str:
    """Return the room of a file of the product, such as spec_data/shards; "" for the top of one."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 else ""


def rooms_of(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Return which rooms every room imports, of its own package."""
    rooms: dict[str, set[str]] = defaultdict(set)
    for path, others in edges.items():
        if path.startswith(PACKAGES) and (room := room_of(path)):
            same = {room_of(o) for o in others if o.split("/")[0] == path.split("/")[0]}
            rooms[room] |= same - {room, ""}
    return dict(rooms)


def drawn(rooms: Mapping[str, set[str]]) -> str:
    """Return the rooms as a graph of Mermaid: an arrow points at what is imported.

    An arrow is left out where a longer way leads there too, so that the picture can be read.
    """
    lines = ["graph TD"]
    for package in PACKAGES:
        own = sorted(room for room in rooms if room.startswith(f"{package}/"))
        lines.append(f"  subgraph {package}")
        for room in own:
            others = rooms[room]
            further = {far for other in others for far in _reached(rooms, other)}
            shown = sorted(others - further)
            to = " & ".join(f"{package}.{other.split('/')[1]}" for other in shown)
            name = f"{package}.{room.split('/')[1]}[{room.split('/')[1]}]"
            lines.append(f"    {name}" + (f" --> {to}" if to else ""))
        lines.append("  end")
    lines.append("  spec_train --> spec_data")
    return "\n".join(lines) + "\n"


def _reached(rooms: Mapping[str, set[str]], room: str) -> set[str]:
    seen, waiting = set[str](), [*rooms.get(room, ())]
    while waiting:
        if (one := waiting.pop()) not in seen:
            seen.add(one)
            waiting += rooms.get(one, ())
    return seen


def with_map(page: str, graph: str) -> str:
    """Return a page with the map between its two marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}{graph}{END}{after}"


def main() -> None:
    """Print what is asked for."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    of_changes = commands.add_parser("changed", help="test files that a change needs")
    of_changes.add_argument("base", nargs="?", help="a commit; not given: where it left main")
    of_map = commands.add_parser("map", help="the rooms and what they import")
    of_map.add_argument("--write", action="store_true", help="into CONTRIBUTING.md")
    arguments = parser.parse_args()
    sources, stubs = read_sources()
    edges = edges_of(sources, stubs)
    if arguments.command == "changed":
        print(*sorted(needed(changed_files(arguments.base), sources, edges)), sep="\n")
    elif arguments.write:
        page = ROOT / "CONTRIBUTING.md"
        page.write_text(with_map(page.read_text(), drawn(rooms_of(edges))))
    else:
        sys.stdout.write(drawn(rooms_of(edges)))


if __name__ == "__main__":
    main()
