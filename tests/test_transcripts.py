"""What the commands say changes only on purpose: scripts/transcripts.py writes it down."""

import difflib
import subprocess
import sys
from pathlib import Path

from tests.terminal_tools import environment

ROOT = Path(__file__).parents[1]
KEPT = ROOT / "tests" / "transcripts"


def texts(folder: Path) -> dict[str, str]:
    """The transcripts of a folder, by name."""
    return {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.txt"))}


def test_what_is_said_changes_only_on_purpose(tmp_path: Path) -> None:
    """In a process of its own: some things are said once per process."""
    script = ROOT / "scripts" / "transcripts.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path / "now")],
        env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    kept, now, changed = texts(KEPT), texts(tmp_path / "now"), []
    for name in sorted(kept.keys() | now.keys()):
        lines = [text.get(name, "").splitlines() for text in (kept, now)]
        changed += difflib.unified_diff(*lines, f"kept {name}", f"now {name}", lineterm="", n=1)
    assert not changed, "\n".join([
        "the commands say something else. Wanted? Then run: python scripts/transcripts.py, and "
        "look in the diff for what is no longer said",
        *changed,
    ])  # fmt: skip
