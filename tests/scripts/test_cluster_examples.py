"""The example jobs of docs/clusters.md: every command parses, and is one that the page explains."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

import spec_train.cli
from spec_data.cli import PROGRAM
from spec_data.generation.workers import launched_worker
from tests.terminal_tools import flags_of

DOCS = Path(__file__).parents[2] / "docs"
SCRIPTS = sorted((DOCS / "examples").glob("*.sh"))


def check(words: list[str]) -> None:
    """Check the options of a command line."""
    words = [part for word in words for part in word.split("=", 1)]
    used = {word for word in words if word.startswith("--")}
    if words[0] == "fit":
        assert used <= set(flags_of(spec_train.cli.PROGRAM.entries[words[0], words[1]])), words
        return
    assert used <= set(flags_of(PROGRAM.entries[words[0],])), words
    if words[0] == "generate":
        assert words[words.index("--workers") + 1].startswith("auto")


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_the_commands_of_a_script_parse(file):
    text = file.read_text().replace("\\\n", " ")
    subprocess.run(["bash", "-n", file], check=True)
    commands = re.findall(r"^(?:srun .*?)?(spec-data .*|spec_train .*?)'?$", text, re.M)
    assert commands
    for command in commands:
        words = shlex.split(re.sub(r"\$\{?\w+(:-([^}]*))?\}?", r"x\2", command))
        check(words[1:])
    for option in re.findall(r"^#SBATCH (\S+)", text, re.M):
        assert re.fullmatch(r"--[a-z-]+(=\S+)?", option)


def test_the_job_of_kubernetes_parses_and_counts_its_pods():
    job = yaml.safe_load((DOCS / "examples" / "kubernetes-job.yaml").read_text())
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["command"] == ["spec-data"]
    check(container["args"])
    (workers,) = (w.partition("=")[2] for w in container["args"] if w.startswith("--workers"))
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    assert job["spec"]["completionMode"] == "Indexed"
    assert int(given["JOB_COMPLETIONS"]) == job["spec"]["completions"]
    assert str(launched_worker(workers, environ=given | {"JOB_COMPLETION_INDEX": "7"})) == "7/8"


def test_the_page_names_flags_that_exist_and_every_example():
    page = (DOCS / "clusters.md").read_text()
    for file in (*SCRIPTS, *(DOCS / "examples").glob("*.yaml")):
        assert f"(examples/{file.name})" in page
    flags = set().union(*map(flags_of, PROGRAM.entries.values()))
    flags |= set(flags_of(spec_train.cli.PROGRAM.entries["fit", "eagle3"]))
    launchers = {"--nproc-per-node", "--no-python", "--nnodes", "--node-rank", "--gpus-per-task"}
    launchers |= {"--master-addr", "--master-port", "--array", "--signal"}
    assert set(re.findall(r"--[a-z][a-z-]+", page)) - launchers <= flags
