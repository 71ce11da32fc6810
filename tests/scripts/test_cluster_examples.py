"""The example jobs of docs/clusters.md: every command parses, and is one that the page explains."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from spec_data.cli import build_parser
from spec_data.generation.worker_place import find_place
from spec_data.options.generate_options import GenerateConfig
from spec_data.terminal.config import resolve

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = sorted((DOCS / "examples").glob("*.sh"))


def parsed(words: list[str]):
    """The parsed command line; a flag that does not exist ends the test."""
    return build_parser().parse_args(words)


@pytest.fixture(autouse=True)
def paths_of_a_cluster(monkeypatch):
    """The examples name files that are not on this machine."""
    monkeypatch.setattr("spec_data.terminal.config.check_paths", lambda *_: None)


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_the_commands_of_a_script_parse(file):
    text = file.read_text()
    subprocess.run(["bash", "-n", file], check=True)
    commands = re.findall(r"^(?:srun .*?)?(spec-data .*)$", text, re.M)
    assert commands
    for command in commands:
        words = shlex.split(re.sub(r"\$\{?\w+(:-([^}]*))?\}?", r"x\2", command))
        args = parsed(words[1:])
        if args.command == "generate":
            assert resolve(GenerateConfig, args).places_itself
    for option in re.findall(r"^#SBATCH (\S+)", text, re.M):
        assert re.fullmatch(r"--[a-z-]+(=\S+)?", option)


def test_the_job_of_kubernetes_parses_and_counts_its_pods():
    job = yaml.safe_load((DOCS / "examples" / "kubernetes-job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["spec-data"]
    config = resolve(GenerateConfig, parsed(container["args"]))
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(given["JOB_COMPLETIONS"]) == job["spec"]["completions"]
    place = find_place(config.workers, environ=given | {"JOB_COMPLETION_INDEX": "7"})
    assert place.workers == "7/8"


def test_the_page_names_flags_that_exist_and_every_example():
    page = (DOCS / "clusters.md").read_text()
    for file in (*SCRIPTS, *(DOCS / "examples").glob("*.yaml")):
        assert f"(examples/{file.name})" in page
    known = set()
    for parser in build_parser()._subparsers._group_actions[0].choices.values():
        known |= set(parser._option_string_actions)
    launchers = {"--nproc-per-node", "--no-python"}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - launchers <= known
