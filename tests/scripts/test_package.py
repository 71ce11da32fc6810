"""What is handed out: the wheel, in a directory of its own; and the documentation site."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts import reference
from tests.api_workspace import make_workspace

ROOT = Path(__file__).parents[2]
MAIN_JOB = """
import sys, spec_data.cli, spec_train.cli
assert spec_data.__file__.startswith(sys.argv[1]) and spec_train.__file__.startswith(sys.argv[1])
for main, words in (
    (spec_data.cli.main, "generate --target target --corpus chats.jsonl --out data --layers 0,2,4"),
    (spec_data.cli.main, "report data --out data.html"),
    (spec_train.cli.main, "fit eagle3 --data data --out run --steps 2 --seq-len 128"),
    (spec_train.cli.main, "eval --draft run --target target --prompts chats.jsonl --limit 2"),
    (spec_train.cli.main, "export --draft run --format vllm --target target --out out"),
):
    assert main(words.split()) == 0, words
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_wheel_alone_runs_the_main_job(tmp_path: Path) -> None:
    twine = pytest.importorskip("twine", reason="twine is not installed: '.[test]'")
    source, wheels, installed = (tmp_path / name for name in ("source", "wheels", "installed"))
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "spec_data", "spec_train"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    build = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", wheels, source)
    subprocess.run([sys.executable, *build], check=True)
    (wheel,) = wheels.iterdir()
    subprocess.run([sys.executable, "-m", twine.__name__, "check", "--strict", wheel], check=True)
    zipfile.ZipFile(wheel).extractall(installed)
    tracked = subprocess.run(
        ["git", "ls-files", "spec_data", "spec_train"], cwd=ROOT, capture_output=True, text=True
    )
    missing = [name for name in tracked.stdout.split() if not (installed / name).is_file()]
    assert not missing, f"not in the wheel: {missing}; see package-data in pyproject.toml"
    place = tmp_path / "place"
    place.mkdir()
    make_workspace(place, fitted=False)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    job = subprocess.run(
        [sys.executable, "-c", MAIN_JOB, str(installed)],
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert job.returncode == 0, job.stdout + job.stderr


def test_links_of_the_repository_become_links_of_the_site_or_words() -> None:
    text = (
        "[a](../CHANGELOG.md) [b](../spec_data/x.py) [c](../spec_data/shards/FORMAT.md#d) x[0](y)"
    )
    text += " [e](https://x.org/a.md) [f](g.md#h) list[int] [i](docs/g.md) [j](#k)"
    assert reference.links(text, {"CHANGELOG.md", "FORMAT.md", "g.md"}) == (
        "[a](CHANGELOG.md) b [c](FORMAT.md#d) x0"
        " [e](https://x.org/a.md) [f](g.md#h) list[int] [i](g.md) [j](#k)"
    )


def test_marked_paragraphs_become_tabs() -> None:
    text = "a\n<!-- tabs -->\n**B.** c\n\n```\nd\n```\n\n**E F.** g\n<!-- end tabs -->\n**H.** i\n"
    assert reference.tabs(text) == (
        'a\n=== "B"\n\n    c\n\n    ```\n    d\n    ```\n\n\n=== "E F"\n\n    g\n\n**H.** i\n'
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_site_is_built_without_a_broken_link(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: '.[docs]'")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert built.returncode == 0, built.stderr
    for page in (ROOT / "docs").glob("*.md"):
        name = "index.html" if page.stem == "README" else f"{page.stem}.html"
        assert (tmp_path / name).is_file(), page
    commands = (tmp_path / "all-commands.html").read_text(encoding="utf-8")
    assert re.search(r"tabbed-labels.*>eagle3<.*>dspark<", commands, re.DOTALL)
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "all-commands.html" in home and "//fonts." not in home
