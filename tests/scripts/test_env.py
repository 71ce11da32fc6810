"""scripts/_env.sh on a machine of fakes: what is tried, in which order, and what errors say."""

import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from tests.scripts.fake_machine import REPOSITORY, FakeMachine

CONFIGURED = ":env:.find-links='/opt/wheels'"


@pytest.fixture
def machine(tmp_path):
    machine = FakeMachine(tmp_path)
    machine.put_on_path("uv", "uv")
    return machine


@pytest.mark.parametrize(
    ("settings", "tried"),
    [
        ({}, ["uv tested"]),
        ({"FAKE_UV": "any"}, ["uv tested", "uv any"]),
        ({"FAKE_PIP_CONFIG": CONFIGURED + "\nglobal.cert='x'" * 6000}, ["pip tested"]),
        ({"FAKE_PIP_CONFIG": "global.index-url='x'", "FAKE_PIP": "any"}, ["pip tested", "pip any"]),
        ({"FAKE_PIP_CONFIG": "global.cert='/index-url=/find-links='"}, ["uv tested"]),
    ],
)
def test_which_tool_installs_pytorch(machine, settings, tried):
    machine.settings.update(settings)
    result = machine.prepare("test")
    assert (result.code, result.tried) == (0, tried), result.messages
    torch, project = (next(c for c in result.calls[::-1] if x in c) for x in ("torch=", "[test]"))
    with_uv = tried[-1].startswith("uv")
    assert ("--torch-backend=auto" in torch) == with_uv
    assert project.startswith("uv pip" if with_uv else "pip") and "--editable" in project


@pytest.mark.parametrize(("from_pip", "tool"), [("yes", "uv"), ("no", "pip")])
def test_without_uv_on_path_pip_installs_it_or_does_everything(tmp_path, from_pip, tool):
    machine = FakeMachine(tmp_path)
    machine.settings["FAKE_UV_FROM_PIP"] = from_pip
    result = machine.prepare("test")
    assert (result.code, result.tried) == (0, [f"{tool} tested"]), result.messages
    assert sum(call.endswith(" uv") for call in result.calls) == 1
    assert result.calls[-1].startswith(f"{tool} ")


@pytest.mark.parametrize(("locked", "calls"), [("yes", 1), ("no", 2)])
def test_the_tests_run_on_tested_versions_where_they_can_be_had(machine, locked, calls):
    machine.settings["FAKE_LOCKED"] = locked
    result = machine.prepare("test")
    assert result.code == 0, result.messages
    project = [call for call in result.calls if "--editable" in call]
    assert len(project) == calls and ".ci/constraints.txt" in project[0]
    assert "--constraint" not in "".join(project[1:])
    assert ("trying any that fit" in result.messages) == (locked == "no")


def test_the_tested_versions_fit_and_name_no_address():
    lines = (REPOSITORY / ".ci" / "constraints.txt").read_text().splitlines()
    locked = dict(line.split("==") for line in lines)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted = map(Requirement, project["dependencies"])
    names = {canonicalize_name(name): version for name, version in locked.items()}
    assert all(r.name == "torch" or r.specifier.contains(names[r.name]) for r in wanted)
    assert "torch" not in names  # its build depends on the machine


TORCH = '__version__ = "2.13.0"'
NOTHING = {"FAKE_PIP": "no", "FAKE_UV": "no"}


@pytest.mark.parametrize(
    ("settings", "files", "said"),
    [
        (NOTHING, {}, "uv could not install PyTorch"),
        (NOTHING, {"site/torch.py": TORCH}, "uv could not install what spec-data needs"),
        ({"PYTHON": "/nowhere/python"}, {"uv": "#!/bin/sh\nexit 1\n"}, "with /nowhere/python"),
    ],
)
def test_where_nothing_works_the_error_says_so_in_words(machine, settings, files, said):
    machine.settings.update(settings)
    for name, text in files.items():
        (machine.fakes / name).write_text(text)
    result = machine.prepare("test")
    assert result.code == 2 and said in result.messages
    assert not (machine.root / ".venv" / ".spec-data-installed").exists()


@pytest.mark.parametrize(("version", "kept"), [("2.14.1+cu130", True), ("2.12.1", False)])
def test_a_fitting_pytorch_is_kept(machine, version, kept):
    (machine.fakes / "site" / "torch.py").write_text(f'__version__ = "{version}"')
    result = machine.prepare()

    assert result.code == 0, result.messages
    assert (result.tried == []) == kept


def test_a_second_run_calls_nothing_unless_pyproject_has_changed(machine):
    assert machine.prepare("test").code == 0
    for extra in ("test", ""):  # what test installs includes the rest
        again = machine.prepare(extra)
        assert (again.code, again.calls, again.messages) == (0, [], "")
    with (machine.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    again = machine.prepare()
    assert any("--editable" in call for call in again.calls) and again.tried == []


def test_a_python_without_its_venv_module_is_replaced_by_uv(machine):
    machine.settings["FAKE_VENV_MODULE"] = "no"
    result = machine.prepare()

    assert result.code == 0, result.messages
    assert result.calls[0].startswith("uv venv")


def test_the_versions_are_those_of_pyproject(machine):
    done = machine.bash('printf "%s\\n" "$TORCH_ANY" "$TORCH_TESTED"')
    any_version, tested = done.stdout.split()
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert any_version in project["dependencies"]
    assert tested.split("==")[1] in SpecifierSet(any_version.removeprefix("torch"))
