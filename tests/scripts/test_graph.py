"""Which tests a change needs, on small graphs; and the map of the rooms in CONTRIBUTING.md."""

import subprocess
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import yaml

from scripts import graph

ROOT = Path(__file__).parents[2]
SOURCES = {
    "spec_data/__init__.py": "",
    "spec_data/a/__init__.py": '"""Room."""',
    "spec_data/a/low.py": "",
    "spec_data/a/table.py": 'FILE = Path(__file__).with_name("facts.toml")',
    "spec_data/b/high.py": "def f():\n    from spec_data.a.low import x",
    "spec_data/b/named.py": 'KINDS = {"one": "spec_data.a.low.Thing"}',
    "spec_data/b/gone_user.py": "import spec_data.b.gone",
    "tests/conftest.py": "",
    "tests/tools.py": "from spec_data.b import high",
    "tests/x/conftest.py": "import spec_data.a.table",
    "tests/x/test_low.py": "from spec_data.a import low",
    "tests/x/test_own.py": "import json",
    "tests/test_high.py": "from tests.tools import y",
    "tests/test_named.py": "import spec_data.b.named",
    "tests/test_gone.py": "import spec_data.b.gone_user",
    "tests/test_public.py": "import spec_data\nspec_data.made()",
    "tests/test_page.py": 'PAGE = ROOT / "docs" / "page.md"',
    "tests/test_house.py": 'FILES = list((ROOT / "spec_data").rglob("*.py"))',
}
STUBS = {"spec_data/__init__.pyi": "from .b.high import f as made"}
EDGES = graph.edges_of(SOURCES, STUBS)
LOW = "tests/x/test_low.py tests/test_high.py tests/test_named.py tests/test_public.py"
BELOW = "tests/x/test_low.py tests/x/test_own.py"


@pytest.mark.parametrize(
    ("changed", "tests"),
    [
        ("spec_data/a/low.py", LOW),  # imported, in a function, in a text, as a public name
        ("spec_data/a/__init__.py", f"{LOW} {BELOW}"),  # of every module of the folder
        ("spec_data/b/high.py", "tests/test_high.py tests/test_public.py"),
        ("spec_data/b/gone.py", "tests/test_gone.py"),  # it was deleted
        ("spec_data/a/facts.toml", BELOW),  # by the module that names it, through a conftest.py
        ("tests/x/conftest.py", BELOW),
        ("tests/x/test_own.py", "tests/x/test_own.py"),
        ("docs/page.md", "tests/test_page.py"),
        ("docs/other.md", "tests/test_page.py"),  # the folder is named
        ("tests/tools.py", "tests/test_high.py"),
    ],
)
def test_a_change_needs_the_tests_that_reach_it(changed, tests):
    found = graph.needed([changed], SOURCES, EDGES)
    assert found == {*tests.split(), "tests/test_house.py"}  # which reads every file


@pytest.mark.parametrize("changed", ["pyproject.toml", "unknown.bin", "tests/conftest.py"])
def test_what_nothing_refers_to_and_what_all_use_need_every_test(changed):
    found = graph.needed(["tests/x/test_own.py", changed], SOURCES, EDGES)
    every = {path for path in SOURCES if "/test_" in path}
    assert found in ({"tests"}, every)


def test_no_change_needs_no_test():
    assert graph.needed([], SOURCES, EDGES) == set()


@pytest.mark.long
def test_a_change_of_this_repository_is_found():
    sources, stubs = graph.read_sources()
    edges = graph.edges_of(sources, stubs)
    found = graph.needed(["spec_data/capture/served.py"], sources, edges)
    assert "tests/spec_data/conversion/test_served.py" in found
    assert "tests/test_tolerance.py" not in found
    every = {p for p in sources if p.startswith("tests/") and "/test_" in p}
    assert graph.needed(["tests/conftest.py"], sources, edges) == every


def test_files_that_changed_are_asked_of_git(tmp_path, monkeypatch):
    def git(*words: str) -> None:
        subprocess.run(["git", *words], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    git("config", "user.email", "a@b.c")
    git("config", "user.name", "a")
    for name in ("kept", "edited", "gone"):
        (tmp_path / f"{name}.py").write_text("")
    git("add", "-A")
    git("commit", "-m", "first")
    git("checkout", "-b", "mine")
    git("rm", "gone.py")
    git("commit", "-m", "second")
    (tmp_path / "edited.py").write_text("1")
    (tmp_path / "fresh.py").write_text("")
    monkeypatch.setattr(graph, "ROOT", tmp_path)
    assert graph.changed_files(None) == ["edited.py", "fresh.py", "gone.py"]
    assert graph.changed_files("HEAD") == ["edited.py", "fresh.py"]
    with pytest.raises(SystemExit, match="no-such"):
        graph.changed_files("no-such")


def test_the_map_of_the_rooms_is_true_and_has_no_circle():
    """`python scripts/graph.py map --write` draws it again."""
    sources, stubs = graph.read_sources()
    product = {path: text for path, text in sources.items() if path.startswith(graph.PACKAGES)}
    rooms = graph.rooms_of(graph.edges_of(product, stubs))
    TopologicalSorter(rooms).prepare()  # also those named in texts, such as BACKENDS
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert graph.START in page
    assert page == graph.with_map(page, graph.drawn(rooms))


def test_the_map_leaves_out_what_a_longer_way_says():
    rooms = {"spec_data/a": {"spec_data/b", "spec_data/c"}, "spec_data/b": {"spec_data/c"}}
    assert "spec_data.a[a] --> spec_data.b\n" in graph.drawn(rooms | {"spec_data/c": set()})


def test_the_hooks_of_pre_commit_are_the_checks_of_the_suite_and_fetch_nothing():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]
    said = (ROOT / "scripts" / "test.sh").read_text()
    for hook in hooks[0]["hooks"]:
        words = hook["entry"].removeprefix("python ").split(" --force")[0]
        assert hook["language"] == "system" and f'"$PY" {words}' in said
    assert said.count('"$PY" -m ruff') + said.count('"$PY" -m mypy') == len(hooks[0]["hooks"])
