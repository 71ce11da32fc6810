"""Tables that name tests: planted.toml and promises.toml. A test that is named must exist."""

import ast
import functools
import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_TEST = re.compile(r"(tests/[\w/]+\.py)::(test_\w+)(\[[\w -]+\])?")


@functools.cache
def table(name: str) -> dict[str, dict[str, Any]]:
    """The tables of a file of tests/: by heading and line, the tests of the line."""
    return tomllib.loads((ROOT / "tests" / name).read_text(encoding="utf-8"))


@functools.cache
def tests_of(file: str) -> dict[str, str]:
    """The source of every test of a file, with its decorators; of a file that is gone, none."""
    path = ROOT / file
    if not path.is_file():
        return {}
    text = path.read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            first = min(part.lineno for part in (node, *node.decorator_list))
            found[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
    return found


def source(test: str) -> str:
    """The source of a test, `path::name`; AssertionError: there is none."""
    named = _TEST.fullmatch(test)
    assert named, f"{test!r}: expected tests/PATH.py::test_NAME"
    assert named[2] in tests_of(named[1]), f"{test} does not exist"
    return tests_of(named[1])[named[2]]
