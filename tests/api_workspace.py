"""A working directory for the examples: a tiny target, chats, prompts, a dataset and a run."""

import json
from pathlib import Path

import pytest

import spec_data
from tests.spec_data.runs import save_target, write_corpus
from tests.spec_train import flat

FIT = {
    "steps": 4,
    "eval_every": 2,
    "ttt_steps": 2,
    "draft_vocab_size": 64,
    "batch_size": 1,
    "seq_len": 128,
    "validation": 0.4,
    "device": "cpu",
}


def make_workspace(folder: Path, fitted: bool = True) -> Path:
    """Fill `folder` with target/, chats.jsonl, prompts.jsonl, data/ and run/; return it.

    Without `fitted`, data/ and run/ are left out.
    """
    save_target(folder / "target")
    write_corpus(folder / "chats.jsonl", 12)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for i in range(2):
            row = {"messages": [{"role": "user", "content": f"question {i}"}]}
            file.write(json.dumps(row) + "\n")
    if not fitted:
        return folder
    options = spec_data.CaptureOptions(layers=[0, 2, 4], device="cpu")
    spec_data.generate(folder / "target", folder / "chats.jsonl", folder / "data", options)
    flat.fit("eagle3", folder / "data", folder / "run", **FIT)
    return folder


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return make_workspace(tmp_path_factory.mktemp("api"))


@pytest.fixture
def here(workspace, monkeypatch):
    """The workspace, as the working directory."""
    monkeypatch.chdir(workspace)
    return workspace
