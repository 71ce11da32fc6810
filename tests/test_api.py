"""The Python functions: cheap to import, the commands' defaults; those of spec_data in detail."""

import doctest
import inspect
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

import spec_data
import spec_train
import spec_train.api
from tests import api_workspace

ROOT = Path(__file__).parent.parent
workspace, here = api_workspace.workspace, api_workspace.here
PACKAGES = (spec_data, spec_train)
FUNCTIONS = [
    *(getattr(spec_data, name) for name in ("open_dataset", "generate", "regenerate", "estimate")),
    *(getattr(spec_data, name) for name in ("verify", "status", "convert", "export_dataset")),
    *(getattr(spec_train, name) for name in ("fit", "dry_run", "export", "load_draft", "doctor")),
    *(spec_train.simulate_acceptance, spec_train.loader),
]


@pytest.mark.parametrize("package", ["spec_data", "spec_train"])
def test_importing_a_package_is_cheap_and_dir_lists_its_names(package):
    program = (
        f"import sys, {package} as package\n"
        "names = dir(package)\n"
        "assert set(package.__all__) <= set(names), names\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pyarrow', 'numpy', 'tqdm'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "assert package.SpecDataError.__name__ == 'SpecDataError'\n"
        "assert not heavy & set(sys.modules), 'an error class needs none of them'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_exists(package):
    for name in package.__all__:
        assert getattr(package, name) is not None
    with pytest.raises(AttributeError, match="nothing"):
        _ = package.nothing


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_the_examples_of_a_docstring_run(function, workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "prompts.jsonl", "data", "run"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    names = {"spec_data": spec_data, "spec_train": spec_train}
    text = inspect.getdoc(function) or ""
    test = doctest.DocTestParser().get_doctest(text, names, function.__name__, None, None)
    lines: list[str] = []
    assert not doctest.DocTestRunner().run(test, out=lines.append).failed, "".join(lines)


def test_the_examples_of_the_page_run_in_order(workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "prompts.jsonl"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("spec_train"), "level", logging.NOTSET)  # a block sets it
    page = (ROOT / "docs" / "python-api.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    code = "\n".join(blocks)
    for package in PACKAGES:
        for name in set(package.__all__):
            assert re.search(rf"\b{name}\b", page), f"{name} is not on the page"
    for function in FUNCTIONS:
        assert f".{function.__name__}(" in code, f"{function.__name__} has no example"
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/python-api.md, block {number}", "exec"), names)


def test_generate_estimate_and_verify_agree_with_the_dataset(here, tmp_path, capsys):
    options = spec_data.CaptureOptions(layers=[0, 2, 4], codec="bf16", device="cpu", limit=6)
    sizes = spec_data.estimate(Path("target"), [Path("chats.jsonl")], tmp_path / "new", options)
    assert not (tmp_path / "new").exists()
    made = spec_data.generate(Path("target"), [Path("chats.jsonl")], tmp_path / "new", options)
    assert made == spec_data.generate("target", "chats.jsonl", str(tmp_path / "new"), options)
    dataset = spec_data.open_dataset(made.path)
    assert made.path == tmp_path / "new" and made.fingerprint == dataset.manifest.fingerprint
    assert made.documents == sizes.documents == len(dataset) == 6
    assert made.tokens == sizes.tokens == int(dataset.lengths.sum())
    assert made.supervised_tokens == sizes.supervised_tokens == int(dataset.supervised.sum())
    assert made.bytes == sizes.bytes == sum(s.bytes for s in dataset.manifest.shards)
    assert made.layers == sizes.layers == (0, 2, 4) and sizes.fits
    running = spec_data.EngineOptions(device="cpu")
    report = spec_data.verify(made.path, target="target", samples=3, running=running)
    assert report.ok and not report.failures and len(report.proven) >= 5
    assert capsys.readouterr().out == "", "functions print nothing"
