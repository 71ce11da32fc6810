"""Every block of docs/own-loop.md runs, in order: in this process, as a file, or as a command."""

import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import spec_train
from tests import api_workspace
from tests.tolerance import close, network

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "own-loop.md"
workspace = api_workspace.workspace


def test_the_examples_of_the_page_run_in_order(workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "data"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict = {}
    for number, (kind, block) in enumerate(blocks):
        file = re.match(r"# (\w+\.py)$", block, re.M)
        if file:
            Path(file[1]).write_text(block, encoding="utf-8")
        elif kind == "bash":
            program, *words = shlex.split(block)
            assert program == "torchrun"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *words]
            done = subprocess.run(
                command,
                env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr[-3000:]
        else:
            exec(compile(block, f"docs/own-loop.md, block {number}", "exec"), names)
    training = replace(names["same"], out="ten", steps=10)
    spec_train.fit(training, names["options"])
    alone, two = (spec_train.load_draft(name).state_dict() for name in ("ten/last", "two"))
    for name, weight in two.items():
        close(weight, alone[name], terms=network(4, True, 100), magnitude=1.0)
