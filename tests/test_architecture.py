"""The rules of the house: no circles, one direction, instant --help, docstrings."""

import ast
import functools
import re
import shlex
import subprocess
import sys
import textwrap
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from spec_train.options.kinds import BUILT_IN

ROOT = Path(__file__).parent.parent
PACKAGES = ("spec_data", "spec_train")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
ROOMS = sorted({f.parent for f in FILES} - {ROOT / package for package in PACKAGES})
SHARED = (
    "spec_data.shards",  # the contract
    "spec_data.__main__",  # one way to start
    "spec_data.models",  # one way to find, identify and load a target
    "spec_data.pages",  # one form of page
    "spec_data.terminal",  # one behaviour on the terminal
    "spec_data.__version__",
)
# What one room of spec_train may import beyond that, and why.
SHARED_WITH = {
    # prompts are read as corpus rows are, and servers are asked as for a corpus
    "spec_train.evaluation": ("spec_data.corpus", "spec_data.regeneration"),
    # a dataset is judged as verify judges it, a target's layers are those of a conversion, and
    # columns of prompts are named as those of a corpus
    "spec_train.diagnosis": (
        *("spec_data.verification", "spec_data.capture.evidence", "spec_data.corpus.facts"),
    ),
}


@functools.cache
def imports_of(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it, also for annotations alone."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found |= {node.module or ""}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def module_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(p for p in parts if p != "__init__")


MODULES = {module_of(file): file for file in FILES}
EDGES = {m: {n for n in imports_of(f) if n in MODULES and n != m} for m, f in MODULES.items()}


def room_of(module: str) -> str:
    """The room that a module is in; a top-level module is its own."""
    file = MODULES[module]
    return module_of(file.parent / "__init__.py") if file.parent in ROOMS else module


def test_import_directions():
    for file in FILES:
        module, names = module_of(file), imports_of(file)
        shared = SHARED + SHARED_WITH.get(room_of(module), ())
        for name in names:
            assert "pickle" not in name, f"{module}: no pickle anywhere"
            if module.startswith("spec_data"):
                assert not name.startswith("spec_train"), f"{module}: spec_data knows no trainer"
            elif name.startswith("spec_data."):
                assert name.startswith(shared), f"{module} may not import {name}"


def cycle_in(edges: dict[str, set[str]]) -> list[str]:
    """A circle of a graph, or nothing."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1][::-1]  # each imports the next one
    return []


def test_no_import_cycles():
    # A package's face imports its own modules; what imports the face is no part of that circle.
    edges = {m: {n for n in found if not m.startswith(f"{n}.")} for m, found in EDGES.items()}
    assert not cycle_in(edges), " -> ".join(cycle_in(edges))


def test_no_circles_between_rooms():
    edges: dict[str, set[str]] = defaultdict(set)
    for module, others in EDGES.items():
        if MODULES[module].name == "__init__.py":
            continue
        for other in others:
            if room_of(other) != room_of(module):
                edges[room_of(module)].add(room_of(other))
                edges[room_of(other)] |= set()
    assert not cycle_in(edges), " -> ".join(cycle_in(edges))


def test_shards_hold_only_what_both_programs_need():
    """No module of the contract is there for training alone."""
    needed: set[str] = set()
    waiting = [m for m in MODULES if m.startswith("spec_data") and ".shards" not in m]
    while waiting:
        module = waiting.pop()
        fresh = EDGES[module] - needed
        needed |= fresh
        waiting.extend(fresh)
    contract = {m for m in MODULES if m.startswith("spec_data.shards.")}
    assert contract <= needed, f"only spec_train uses {sorted(contract - needed)}"


def test_the_trainer_names_no_algorithm():
    text = (ROOT / "spec_train" / "training" / "trainer.py").read_text().lower()
    for name in ("eagle", "dspark", "dflash", "peagle"):
        assert name not in text


def test_nobody_sets_attributes_of_a_trainer_from_outside():
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                owner = ast.unparse(node.value).rpartition(".")[2]
                assert owner != "trainer", f"{file}, line {node.lineno}: say it by a method"


def test_modules_explain_themselves():
    for file in FILES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{file}: a module says what it is for"
        for node in tree.body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{file}: {node.name} has no docstring"


HELPS = {
    "spec_data": "'' estimate generate regenerate inspect verify select convert report",
    "spec_train": "'' 'fit eagle3' 'fit peagle' eval export doctor vectors",
}


# What the commands' words are made with: all together some 0.2 CPU-seconds.
LIGHT = ("attr", "attrs", "cyclopts", "docstring_parser", "lazy_loader", "msgspec", "xxhash")
LIGHT += ("typing_extensions",)


@pytest.mark.parametrize("package", HELPS)
def test_help_imports_nothing_heavy(package):
    """No package but the light ones, whichever help is asked for; seconds depend on the machine."""
    program = (
        f"import sys; before = set(sys.modules); from {package}.cli import main\n"
        f"own = {{'spec_data', 'spec_train', *sys.stdlib_module_names, *{LIGHT}}}\n"
        "for words in sys.argv[1:]:\n"
        "    try: main([*words.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "    heavy = {name.partition('.')[0] for name in set(sys.modules) - before} - own\n"
        "    assert not heavy, (words, heavy)\n"
    )
    words = shlex.split(HELPS[package])
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert len(re.findall(rb"^usage: ", done.stdout, re.M)) == len(words)


def test_drafts_and_datasets_are_used_without_transformers():
    """transformers takes twice as long to import as torch; one activation once cost that."""
    program = """
        import sys, spec_data
        spec_data.open_dataset
        absent = {"transformers", "datasets"}
        assert not {m.partition(".")[0] for m in sys.modules} & absent, "datasets"
        import spec_data.pages.report
        assert not {m.partition(".")[0] for m in sys.modules} & absent, "inspect"
        import spec_train.drafts
        assert not {m.partition(".")[0] for m in sys.modules} & absent, "drafts"
        assert "spec_data.conversion" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True)


def test_nobody_is_told_to_install_a_name_that_is_not_ours():
    """The project is on no index: whoever takes its name there would run code at its users."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    name = "spec[-_](data|train)"
    told = re.compile(rf"pip3? install[^\n`]*{name}|{name}\[[a-z]")
    found = []
    for file in files.stdout.decode().split("\0"):
        # the extras of pyproject.toml name one another in this way
        if file not in ("", "pyproject.toml") and (ROOT / file).is_file():
            text = (ROOT / file).read_text(encoding="utf-8", errors="ignore")
            found += [f"{file}: {match[0]}" for match in told.finditer(text)]
    assert not found


KINDS = re.compile(r"(?i)\b_*(eagle3?|p-?eagle|dspark|dflash2?|domino|lilicorr|xpress|mtp)")
# Files outside the folder of a draft that name a kind, and why. This list only shrinks: what they
# say about a kind belongs into its folder, and what a capture must know of it into its `kind.toml`.
NAMING = {
    # an MTP block is a part of many targets, whatever trains it
    "spec_data/generation/options.py": "--for mtp copies it",
    "spec_data/models/mtp.py": "names of the tensors of such a part",
    "spec_data/models/loading.py": "names of the modules of such a part",
    "spec_data/generation/setup.py": "asks the target for it",
    "spec_data/generation/probe.py": "its bytes",
    "spec_data/generation/proof.py": "its file in a dataset",
    "spec_data/shards/remote.py": "its file in a dataset",
    "spec_train/formats/draft_files.py": "the outer name of its tensors",
    "spec_train/conformance/target.py": "tiny targets that have one",
    # the family of block drafts
    "spec_train/drafts/block/config.py": "the two configurations that all its kinds have",
    "spec_train/drafts/block/files.py": "its two classes; which kind a file of them is",
}


def names_a_kind(file: Path) -> bool:
    """Whether code, not comments and docstrings, names a kind of draft."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        words = [getattr(node, name, None) for name in ("id", "attr", "name", "module", "arg")]
        if isinstance(node, ast.Constant) and id(node) not in texts:
            words.append(node.value)
        if any(isinstance(word, str) and KINDS.search(word) for word in words):
            return True
    return False


def test_no_other_file_names_a_kind_of_draft():
    folders = {ROOT / "spec_train" / "drafts" / kind for kind in BUILT_IN}
    found = {
        file.relative_to(ROOT).as_posix()
        for file in FILES
        if file.parent not in folders and names_a_kind(file)
    }
    known = set(NAMING)
    assert not found - known, "name a kind of draft: put that into the folder of the kind"
    assert not known - found, "name none any more: take them off the list"
