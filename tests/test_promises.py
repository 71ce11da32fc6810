"""promises.toml names the tests that hold what users were promised, by a line each.

A promise goes only by its line, in the same commit. Failures, targets and published drafts have
tables of their own, in planted.toml.
"""

import ast
import re

import pytest

import spec_data.cli
import spec_train.cli
from tests.named_tests import ROOT, source, table

PROMISES = table("promises.toml")
PROGRAMS = {"spec-data": spec_data.cli.PROGRAM, "spec-train": spec_train.cli.PROGRAM}
_CODE = re.compile(r"warning\[([a-z-]+)\]")


def named_by(line: str, heading: str) -> list[str]:
    """The tests of a line: one, or a list."""
    tests = PROMISES[heading][line]
    return [tests] if isinstance(tests, str) else tests


def subjects(heading: str) -> set[str]:
    """What the lines of a table are about: what stands before the colon."""
    return {line.partition(": ")[0] for line in PROMISES[heading]}


@pytest.mark.parametrize("heading", PROMISES)
def test_every_line_names_tests_that_exist(heading: str) -> None:
    """Failed? A promise is kept until its line goes, and the commit that removes it says so."""
    for line in PROMISES[heading]:
        assert named_by(line, heading), line
        for test in named_by(line, heading):
            source(test)


def test_no_line_stands_twice() -> None:
    lines = [line for lines in PROMISES.values() for line in lines]
    lines += [line for lines in table("planted.toml").values() for line in lines]
    assert len(lines) == len(set(lines))


def test_every_warning_has_lines_and_its_tests_say_its_code() -> None:
    """That docs/warnings.md explains it: test_terminal.py."""
    files = [f for name in ("spec_data", "spec_train") for f in (ROOT / name).rglob("*.py")]
    raised = {code for file in files for code in _CODE.findall(file.read_text(encoding="utf-8"))}
    assert subjects("warnings") == raised
    silent = []
    for line in PROMISES["warnings"]:
        code = line.partition(": ")[0]
        sources = [source(test).replace("\\", "") for test in named_by(line, "warnings")]
        silent += [line] * (not any(f"warning[{code}]" in text for text in sources))
    assert not silent, "no test of these lines has the code in its assertions"


def public_names(package: str) -> set[str]:
    """What a package hands out, as editors see it in its stub."""
    tree = ast.parse((ROOT / package / "__init__.pyi").read_text(encoding="utf-8"))
    found = {alias.asname for n in tree.body if isinstance(n, ast.ImportFrom) for alias in n.names}
    found |= {t.id for n in tree.body if isinstance(n, ast.Assign) for t in n.targets}  # type: ignore[attr-defined]
    found |= {n.target.id for n in tree.body if isinstance(n, ast.AnnAssign)}  # type: ignore[union-attr]
    return {f"{package}.{name}" for name in found if name}


def test_every_public_name_has_a_line() -> None:
    assert subjects("names") == public_names("spec_data") | public_names("spec_train")


def test_every_command_has_a_line() -> None:
    known = {" ".join((program, *words)) for program, p in PROGRAMS.items() for words in p.entries}
    assert subjects("commands") == known


def test_every_exit_code_and_variable_of_our_own_has_a_line() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    codes, variables = page.partition("Exit codes:")[2].split("## Environment")
    listed = re.findall(r"^- ([\d, ]+): ", codes, re.M)
    assert subjects("exit-codes") == {code for line in listed for code in line.split(", ")}
    assert subjects("environment") >= set(re.findall(r"`(SPEC_\w+)`", variables))
