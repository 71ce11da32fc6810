"""What a reader of docs follows or types: links, anchors, and every option of a command line."""

import functools
import re
import shlex
from pathlib import Path

import spec_data.cli
import spec_train.cli
from tests.terminal_tools import flags_of

ROOT = Path(__file__).parents[1]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *ROOT.glob("*.md")])
SOURCES = [
    path
    for package in ("spec_data", "spec_train", "scripts")
    for kind in ("*.py", "*.toml", "*.sh")
    for path in sorted((ROOT / package).rglob(kind))
]
PROGRAMS = {"spec-data": spec_data.cli.PROGRAM, "spec-train": spec_train.cli.PROGRAM}
STARTED = {"spec_data": "spec-data", "spec_train": "spec-train"}  # `-m spec_train` of torchrun


@functools.cache
def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in headings}


def check_target(where: Path, target: str) -> None:
    """A file, and an anchor of it, exist."""
    file, _, anchor = target.partition("#")
    path = (where.parent / file).resolve() if file else where
    assert path.exists(), f"{where.name}: {target}"
    assert not anchor or anchor in anchors(path), f"{where.name}: {target}"


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http://", "https://")):
                check_target(page, target)


def test_pages_that_messages_and_help_name_exist() -> None:
    named = [
        (path, target)
        for path in SOURCES
        for target in re.findall(r"docs/[\w-]+\.md(?:#[\w-]+)?", path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 10
    for _, target in named:
        check_target(ROOT / "README.md", target)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in index, page.name


def commands(text: str) -> list[list[str]]:
    """The command lines of our programs in the fenced blocks of a page, from the program on."""
    found = []
    for block in re.findall(r"^```(?:bash|console|)\n(.*?)^```", text, re.M | re.S):
        for line in re.sub(r"\\\n", " ", block).splitlines():
            line = re.sub(r"(\s#.*|\s&&.*|\s\|.*|\.\.\.)", "", line.removeprefix("$ "))
            if not re.match(r"(\S+=\S+ |(srun|watch) |\S*/)*(spec-|.* -m spec_|torchrun )", line):
                continue
            words = shlex.split(line)
            first = next(i for i, w in enumerate(words) if Path(w).name in (*PROGRAMS, *STARTED))
            found.append([Path(words[first]).name, *words[first + 1 :]])
    return found


def test_command_lines_name_commands_and_options_that_exist() -> None:
    lines = [line for page in PAGES for line in commands(page.read_text(encoding="utf-8"))]
    for name, *words in lines:
        entries = PROGRAMS[STARTED.get(name, name)].entries
        entry = entries.get((*words[:2],)) or entries.get((*words[:1],))
        if words and words[0] == "fit" and entry is None:
            continue  # `fit $DRAFT`
        assert entry is not None or words[0].startswith("-"), (name, words)
        used = {word.partition("=")[0] for word in words if word.startswith("--")}
        known = set(flags_of(entry)) if entry else {"--print-completion", "--version", "--help"}
        assert used <= known | {"--help", "--help-all"}, (name, words, used - known)


def test_the_command_lines_are_found() -> None:
    text = "```bash\nA=b torchrun --nnodes 2 -m spec_train fit eagle3 --data D   # why\n```\n"
    assert commands(text) == [["spec_train", "fit", "eagle3", "--data", "D"]]
