"""The rules of the house: who may import whom, how fast --help is, what a file may look like."""

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("spec_data", "spec_train")
FILES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))


def imports_of(file: Path) -> set[str]:
    """Every module that a file imports, anywhere in it."""
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


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_import_directions(file):
    module, names = module_of(file), imports_of(file)
    if module.startswith("spec_data"):
        assert not any(n.startswith("spec_train") for n in names), "spec_data knows no trainer"
    if module.startswith("spec_data.shards"):
        foreign = {n for n in names if n.split(".")[0] in PACKAGES}
        assert all(n.startswith("spec_data.shards") for n in foreign), "shards stand alone"
    if module.startswith("spec_train"):
        allowed = ("spec_data.shards", "spec_data.config", "spec_data.__version__")
        for name in names:
            if name.startswith("spec_data."):
                assert name.startswith(allowed), f"{module} may not import {name}"
    for name in names:
        assert "pickle" not in name, "no pickle anywhere"


def test_no_import_cycles():
    modules = {module_of(f): f for f in FILES}
    edges = {m: {n for n in imports_of(f) if n in modules and n != m} for m, f in modules.items()}
    for module, file in modules.items():  # imports for annotations alone are no cycle
        guarded = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
                for inner in node.body:
                    if isinstance(inner, ast.ImportFrom):
                        guarded.add(inner.module or "")
        edges[module] -= guarded
        edges[module] -= {m for m in edges[module] if module.startswith(m + ".")}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(edges[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in modules:
        visit(module, ())


def test_the_trainer_names_no_algorithm():
    text = (ROOT / "spec_train" / "training" / "trainer.py").read_text().lower()
    for name in ("eagle", "dspark", "dflash", "peagle"):
        assert name not in text


@pytest.mark.parametrize("file", FILES, ids=module_of)
def test_files_are_one_reading_and_explain_themselves(file):
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 400
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "a module says what it is for"
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} has no docstring"


@pytest.mark.parametrize(
    "arguments",
    [
        "spec_data --help",
        "spec_data generate --help",
        "spec_train --help",
        "spec_train fit eagle3 --help",
        "spec_train fit peagle --help",
        "spec_train eval --help",
        "spec_train export --help",
    ],
)
def test_help_is_instant(arguments):
    package, *rest = arguments.split()
    program = (
        f"import sys; from {package}.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    best = 9.0
    for _ in range(3):
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program, *rest], capture_output=True)
        best = min(best, time.perf_counter() - start)
        assert done.returncode == 0, done.stderr.decode()
        assert b"--help" in done.stdout
    assert best < 2, f"{best:.2f} s even at its best"
