"""What torch's own compiler and ptxas make of the code for a GPU, on a machine without one.

In processes of their own: torch believes in a GPU from its import on.
"""

import importlib.util
import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.marks import long_but

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
CARDS = ("a100", "l40s", "h200", "b200")

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is not None, reason="needs a CPU build of torch"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the pretended device"),
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed"
    ),
]


def table(out: Path, *options: str) -> list[dict[str, Any]]:
    """Run the script; return its rows, all of which hold."""
    command = [sys.executable, str(SCRIPTS / "gpu" / "compiled.py"), "--json", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"]
    return rows


def test_a_chain_is_a_kernel_each_way_and_a_loss_never_computes_in_float64(tmp_path: Path) -> None:
    only = "chain rms_norm 1", "rows lk-alpha bf16"
    rows = table(tmp_path / "rows.json", "--drafts", "eagle3", "--only", *only)
    chains = [row for row in rows if row["case"].startswith("chain")]
    assert [row["way"] for row in chains] == ["forward", "backward"]
    assert all(row["kernels"] == 1 and not row["calls"] for row in chains)
    (loss,) = (row for row in rows if row["case"].startswith("rows"))
    assert loss["kernels"] == 3 and loss["doubles"] == loss["stack"] == 0


@pytest.mark.parametrize("card", long_but((), CARDS))
def test_every_kernel_is_lowered_built_and_fits(tmp_path: Path, card: str) -> None:
    """Of every draft; no kernel but its own is called, except where the best of rows are sought."""
    rows = table(tmp_path / "rows.json", "--card", card)
    assert {row["case"].split()[0] for row in rows} == {"flex", "chain", "rows"}
    assert {name for row in rows for name in row["calls"]} <= {"topk"}
    assert all(row["kernels"] for row in rows)
    spills = {row["case"]: row["stack"] for row in rows if not row["case"].startswith("flex")}
    assert max(spills.values()) <= 256, spills  # bytes of a thread: flex spills more
    again = {row["case"] for row in rows if ", try " in row["case"]}
    assert bool(again) == (card in ("a100", "l40s")), again


def test_what_is_planted_is_found() -> None:
    """A chain in float64, one that no graph holds, and one that asks for too much memory."""
    program = """
        import sys; sys.path.insert(0, {folder!r}); sys.argv = ["compiled"]
        import compiled
        from dataclasses import replace
        import torch
        from gpu import pretended

        card = pretended.CARDS["h200"]
        pretended.pretend(card)
        compiled.fused._works = lambda device: True

        def wide(x): return (x.double() * 1.5).exp().to(x.dtype)
        def torn(x): torch._dynamo.graph_break(); return x * 2
        def turned(x): return x.softmax(-1)

        def rows(function):
            x = compiled.Described((64, 4096), (4096, 1), torch.bfloat16, True)
            made = compiled.Case("planted", lambda: compiled._chain(function, (x,)))
            return compiled.rows_of(made, card)

        wrong = [compiled.problem_of(row, card) for row in rows(wide)]
        assert any("float64" in (text or "") for text in wrong), wrong
        try:
            print("not found", rows(torn))
        except RuntimeError as error:
            assert "was not compiled" in str(error)
        found = rows(turned)
        assert [row["way"] for row in found] == ["forward", "backward"]
        assert all(compiled.problem_of(row, card) is None for row in found), found
        small = replace(card, shared=1)
        assert any("shared memory" in (compiled.problem_of(row, small) or "") for row in found)
        print("all found")
    """
    text = textwrap.dedent(program).format(folder=str(SCRIPTS / "gpu"))
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1:] == ["all found"], done.stdout + done.stderr
