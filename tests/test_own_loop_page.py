"""Every block of docs/own-loop.md runs, in order."""

import re
from pathlib import Path

from tests import api_workspace

PAGE = Path(__file__).parent.parent / "docs" / "own-loop.md"
workspace = api_workspace.workspace


def test_the_examples_of_the_page_run_in_order(workspace, tmp_path, monkeypatch):
    for name in ("target", "chats.jsonl", "data"):
        (tmp_path / name).symlink_to(workspace / name)
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    names: dict = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"docs/own-loop.md, block {number}", "exec"), names)
