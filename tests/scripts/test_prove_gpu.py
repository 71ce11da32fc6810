"""`scripts/prove_gpu.py` itself works: on a CPU, with tiny sizes. What it proves needs a GPU."""

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PARTS = (
    *("machine", "codecs", "kernels", "drafts", "capture"),
    *("ring", "fit", "decoding"),
)
sys.path.append(str(ROOT / "scripts"))

import prove_gpu  # noqa: E402
from gpu.bench import Bench  # noqa: E402


def run(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "prove_gpu.py"), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)


def given(out: Path) -> argparse.Namespace:
    """Options of a run in this process."""
    return argparse.Namespace(out=out, device="cpu", tiny=True, budget_seconds=600)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], str]:
    """The rows of all parts but two: "resume" needs a minute of processes, "speed" needs a GPU."""
    out, shown = tmp_path_factory.mktemp("proof"), io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = prove_gpu.run(list(PARTS), given(out))
    assert code == 0, shown.getvalue()
    return json.loads((out / "rows.json").read_text())["rows"], shown.getvalue()


def test_every_row_holds_on_a_cpu(tiny: tuple[list[dict], str]) -> None:
    rows, shown = tiny
    assert {row["part"] for row in rows} == set(PARTS)
    assert not [row for row in rows if row["ok"] is False]
    drafts = [row["name"] for row in rows if row["part"] == "drafts"]
    assert {name.partition(",")[0] for name in drafts} == {
        "eagle", "eagle3", "peagle", "dspark", "dflash",
    }  # fmt: skip
    compared = [row for row in rows if row["part"] == "drafts" and "gradient_error" in row]
    assert len(compared) == 10 and all(0 < row["gradient_error"] < 0.1 for row in compared)
    assert len([row for row in rows if row["part"] == "codecs"]) == 1
    assert f"{len(rows)} rows, 0 failed" in shown


def test_failures_are_rows_and_a_spent_budget_leaves_the_others_out(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").mkdir()  # where the corpus is to be written
    assert prove_gpu.run(["ring"], given(tmp_path)) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [False]
    assert "IsADirectoryError" in rows[0]["error"] and "Traceback" in rows[0]["traceback"]
    bench = Bench("cpu", False, tmp_path, deadline=0.0)
    bench.attempt("codecs", "late", lambda: (True, {}))
    assert bench.rows[0]["ok"] is None and "budget" in bench.rows[0]["why"]


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "codecs,speeds")
    assert done.returncode == 2 and "--only speeds: choose from machine, codecs" in done.stderr
    if not torch.cuda.is_available():
        done = run(tmp_path, "--only", "machine")
        assert done.returncode == 2 and "PyTorch finds no GPU" in done.stderr
