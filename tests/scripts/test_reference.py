"""Pages that are made from functions or from other packages: commands, and moving from others."""

import json
import re
from pathlib import Path

import pytest

import spec_data
import spec_train
from scripts import peer_options
from scripts.reference import api_pages, command_list, command_pages
from spec_data import __all__ as of_data
from spec_train import __all__ as of_train
from tests import api_workspace
from tests.spec_train import flat
from tests.terminal_tools import flags_of
from tests.test_failures_page import tables

workspace = api_workspace.workspace
DOCS = Path(__file__).parents[2] / "docs"


def test_the_list_of_commands_is_that_of_the_functions() -> None:
    assert command_list() in (DOCS / "commands.md").read_text(encoding="utf-8")


def test_the_reference_has_every_option_and_every_public_name() -> None:
    from scripts.reference import PROGRAMS

    pages = "\n".join(command_pages())
    for program in PROGRAMS:
        for chain, entry in program.entries.items():
            section = pages.partition(f"## {program.name} {chain[0]}\n")[2]
            section = section.partition("\n## ")[0]
            for tab in chain[1:]:
                section = section.partition(f'=== "{tab}"\n')[2].partition("\n=== ")[0]
            flags = {*flags_of(entry)} - {f"--{n}" for n in entry.positional()}
            for flag in flags:
                assert flag in section or f"--no-{flag[2:]}" in flags, (chain, flag)
    named = re.findall(r"^## \w+\.(\w+)$", "\n".join(api_pages()), re.M)
    assert sorted(named) == sorted([*of_data, *of_train])


@pytest.mark.parametrize("peer", ["SpecForge", "speculators", "NeMo AutoModel", "ModelOpt"])
def test_names_of_other_trainers_are_those_of_their_packages(peer: str) -> None:
    record = json.loads(peer_options.RECORD.read_text(encoding="utf-8"))[peer]
    assert record["package"] == peer_options.PACKAGES[peer]
    assert f"`{record['package']}`" in (DOCS / "moving.md").read_text(encoding="utf-8")
    told = [
        name
        for header, *rows in tables("moving.md")
        if peer in header
        for row in rows
        for name in re.findall(r"`([^`]+)`", row[header.index(peer)])
    ]
    assert len(told) > 15
    assert set(told) <= set(record["names"]), set(told) - set(record["names"])


@pytest.mark.parametrize("peer", ["NeMo AutoModel", "ModelOpt"])
def test_what_is_here_for_names_of_a_peer_is_here(peer: str) -> None:
    """Options of the command before them, and names of the packages."""
    texts = {
        name: (Path(__file__).parents[1] / package / "flags.txt").read_text(encoding="utf-8")
        for name, package in (("generate", "spec_data"), ("fit", "spec_train"))
    }
    (rows,) = (rows for header, *rows in tables("moving.md") if header[0] == peer)
    assert len(rows) > 20
    for row in rows:
        command = ""
        for name in re.findall(r"`([^`]+)`", row[-1]):
            for module in (spec_data, spec_train):
                if name.startswith(f"{module.__name__}."):
                    assert hasattr(module, name.split(".")[1]), name
            command = next((word for word in name.split() if word in texts), command)
            for flag in re.findall(r"--[a-z-]+", name):
                if command:
                    assert flag in texts[command], (command, flag)


def test_every_word_of_metrics_is_in_the_glossary(workspace: Path) -> None:
    lines = (workspace / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    words = {re.sub(r"/\d+$", "/d", word) for line in lines for word in json.loads(line)}
    assert {"loss", "accept_rate/d", "serving_like_length"} <= words
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    assert not {word for word in words if f"`{word}`" not in page}


def test_every_line_of_the_log_of_fit_is_in_the_glossary(
    workspace: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="spec_train")
    options = {**api_workspace.FIT, "steps": 1, "eval_every": 1, "draft_vocab_size": 64}
    options.pop("ttt_steps", None)
    flat.fit("dspark", workspace / "data", tmp_path / "run", **options)
    lines = [re.match(r"([a-z]+(?: [a-z]+)?)(?: {2,}| at | on | \d)", m) for m in caplog.messages]
    words = {line[1] for line in lines if line}
    assert {"dataset", "layers", "vocabulary", "mask token", "validation"} <= words
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    assert not {word for word in words if f"- `{word}`" not in page} - {"page"}
