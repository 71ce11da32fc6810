"""`scripts/prove_gpu.py` itself works: on a CPU, with tiny sizes. What it proves needs a GPU."""

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
LONG = ("resume", "throughput", "speed")
sys.path.append(str(ROOT / "scripts"))

import prove_gpu  # noqa: E402
from fit_problem import fresh_draft, random_batch  # noqa: E402
from gpu import commands, drafts  # noqa: E402
from gpu.bench import Bench  # noqa: E402
from gpu.target import target_of  # noqa: E402

from spec_train.attention import fused  # noqa: E402

PARTS = tuple(part for part in prove_gpu.PARTS if part not in LONG)


def given(out: Path) -> argparse.Namespace:
    """Options of a run in this process."""
    return argparse.Namespace(out=out, device="cpu", tiny=True, budget_seconds=600)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict], str]:
    """The rows of all parts but the long ones."""
    out, shown = tmp_path_factory.mktemp("proof"), io.StringIO()
    with contextlib.redirect_stdout(shown):
        code = prove_gpu.run(list(PARTS), given(out))
    assert code == 0, shown.getvalue()
    return json.loads((out / "rows.json").read_text())["rows"], shown.getvalue()


@pytest.mark.long
def test_every_row_holds_on_a_cpu(tiny: tuple[list[dict], str]) -> None:
    rows, shown = tiny
    assert {row["part"] for row in rows} == set(PARTS)
    assert not [row for row in rows if row["ok"] is False]
    drafts = [row["name"] for row in rows if row["part"] == "drafts"]
    assert {name.partition(",")[0] for name in drafts} == {
        "eagle", "eagle3", "peagle", "dspark", "dflash", "dflash2", "domino", "lilicorr", "mtp",
        "xpress",
    }  # fmt: skip
    compared = [row for row in rows if row["part"] == "drafts" and "gradient_error" in row]
    assert len(compared) == 20 and all(0 < row["gradient_error"] < 0.1 for row in compared)
    assert len([row for row in rows if row["part"] == "codecs"]) == 1
    assert f"{len(rows)} rows, 0 failed, 0 left out" in shown


@pytest.mark.long
def test_the_other_rows_hold_too(tmp_path: Path) -> None:
    """A run that is killed and resumed, and the speed of capture and of every draft."""
    with contextlib.redirect_stdout(io.StringIO()):
        assert prove_gpu.run(list(LONG), given(tmp_path)) == 0
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    captured = next(row for row in rows if row["part"] == "throughput")
    assert (
        0 < captured["capture_tokens_s"] / captured["bare_tokens_s"] == captured["capture_of_bare"]
    )
    speed = [row for row in rows if row["part"] == "speed"]
    assert all(row["tokens_s"] > 0 and row["optimizer_ms"] > 0 and row["kernels"] for row in speed)
    assert {row["name"].partition(",")[0] for row in speed} == set(drafts.DRAFTS)


def test_the_same_command_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Done parts stay as they are; failed ones and those that found no time run again."""
    calls: list[str] = []

    def part(name: str, ok: bool = True) -> None:
        def prove(bench: Bench) -> None:
            calls.append(name)
            bench.facts[name] = len(calls)
            bench.attempt(name, "row", lambda: (ok, {}))

        monkeypatch.setitem(prove_gpu.PARTS, name, (prove, 0))

    part("machine")
    part("codecs", ok=False)
    monkeypatch.setitem(prove_gpu.PARTS, "ring", (prove_gpu.PARTS["machine"][0], 10**6))
    names, options = ["machine", "codecs"], given(tmp_path)
    assert prove_gpu.run(names, options) == 1 and calls == names
    part("codecs")
    assert prove_gpu.run(names, options) == 0 and calls == [*names, "codecs"]
    assert Bench("cpu", True, tmp_path, deadline=0.0).facts == {"machine": 1, "codecs": 3}
    monkeypatch.setattr("gpu.bench._code", lambda: "changed")  # so what was done proves nothing
    assert prove_gpu.run(["machine"], options) == 0 and calls[-1] == "machine"
    options.tiny = False  # another kind of run: nothing of it is done
    assert prove_gpu.run(["ring"], options) == 3
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["left out"]


def test_rows_of_an_unfinished_part_are_not_made_again(tmp_path: Path) -> None:
    """Planted: the budget ends within a part; without its rows it would never come to its end."""

    def part(budget: float) -> Bench:
        bench = Bench("cpu", True, tmp_path, deadline=time.monotonic() + budget)
        for name, ok in (("a", True), ("b", False), ("c", True)):
            if not bench.has("drafts", name):
                bench.attempt("drafts", name, lambda ok=ok: (ok, {}))
                bench._deadline = budget
        bench.end("drafts")
        return bench

    assert [row["ok"] for row in part(9.0).rows] == [True, None, None]
    later = Bench("cpu", True, tmp_path, deadline=time.monotonic() + 9)
    assert [row["name"] for row in later.rows] == ["a"] and not later.done
    later.row("drafts", "a", False)
    assert [row["ok"] for row in later.rows] == [False]


def test_a_part_of_many_rows_begins_however_little_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a machine that ends each command after 10 minutes would never time a step."""
    monkeypatch.setitem(prove_gpu.PARTS, "speed", (lambda bench: None, 900))
    options = given(tmp_path)
    options.tiny = False
    assert prove_gpu.run(["speed"], options) == 0


def test_a_row_that_breaks_cuda_does_not_take_the_others_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: illegal accesses, after which each call of CUDA in the process raises."""
    runs: list[list[str]] = []
    broken: list[str] = []

    def unless_broken(*_: object) -> float:
        if broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return 0.0

    def begin_again(program: str, words: list[str]) -> None:
        assert program == words[0] == sys.executable and words[-2] == "--budget-seconds"
        raise SystemExit(words[-1])

    def kernels(bench: Bench) -> None:
        def row(name: str) -> tuple[bool, dict]:
            runs[-1].append(name)
            broken.extend(["here"] * (name == "wrong"))
            unless_broken()
            return True, {}

        for name in ("first", "wrong", "last"):
            bench.attempt("kernels", name, lambda name=name: row(name))

    def outside(bench: Bench) -> None:
        runs[-1].append("outside")
        broken.append("here")
        unless_broken()

    monkeypatch.setattr(Bench, "synchronised", unless_broken)
    monkeypatch.setattr("gpu.bench.os.execv", begin_again)
    for name, prove in {"kernels": kernels, "ring": outside, "codecs": lambda _: None}.items():
        monkeypatch.setitem(prove_gpu.PARTS, name, (prove, 0))
    codes = []
    for _ in range(3):
        runs.append([])
        broken.clear()
        try:
            codes.append(prove_gpu.run(["kernels", "ring", "codecs"], given(tmp_path)))
        except SystemExit as ended:
            assert 0 < float(str(ended.code)) <= 600
    assert runs == [["first", "wrong"], ["first", "last", "outside"], ["first", "last"]]
    assert codes == [1]
    state = json.loads((tmp_path / "rows.json").read_text())
    assert state["done"] == ["codecs"]
    assert {row["name"]: row["ok"] for row in state["rows"]} == {
        "first": True, "wrong": False, "last": True, prove_gpu.WHOLE: False,
    }  # fmt: skip


def test_rows_may_come_from_a_machine_whose_files_are_gone(tmp_path: Path) -> None:
    for _ in range(2):
        bench = Bench("cpu", True, tmp_path, deadline=time.monotonic() + 600)
        assert (target_of(bench) / "model.safetensors").is_file()
        bench.row("capture", "random Qwen3", None)
        shutil.rmtree(tmp_path / "target")


def test_a_missing_package_is_named(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise ModuleNotFoundError(\"No module named 'msgspec'\")")
    command = [sys.executable, str(ROOT / "scripts" / "prove_gpu.py"), "--device", "cpu", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert "No module named 'msgspec'" in ended.stderr and "pip wheel" in ended.stderr


def test_a_process_that_a_row_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the row fails while its second process trains, which would slow what follows."""
    bench = Bench("cpu", True, tmp_path, deadline=time.monotonic() + 600)
    with pytest.raises(RuntimeError), commands._started(bench, {"data": "none"}) as process:
        raise RuntimeError
    assert process.returncode is not None


def test_steps_are_timed_as_training_runs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: a draft in evaluation, which measures the target's whole head at every slot."""
    modes, loss_of = set(), drafts.loss_of

    def noted(draft: torch.nn.Module, *rest: object) -> torch.Tensor:
        modes.add(draft.training)
        return loss_of(draft, *rest)

    monkeypatch.setattr(drafts, "loss_of", noted)
    bench = Bench("cpu", True, tmp_path, deadline=time.monotonic() + 600)
    drafts._timed(bench, "eagle3", "merged", drafts.TINY)
    assert modes == {True}


def test_nothing_is_compiled_while_products_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Dynamo skips every frame while a counter listens: a chain would raise, and its trial, if this
    were the first use, would switch all chains off."""
    monkeypatch.setattr(fused, "FUSED_ON", ("cpu",))
    fused._works.cache_clear()
    head, batch = random_batch(drafts.TINY)
    draft = fresh_draft("eagle3", head, drafts.TINY).eval()
    given = draft, batch, head, "merged", torch.float32, []
    assert drafts._matmul_flops(drafts._step(*given)) > 0
    assert not caplog.text and fused._works.cache_info().currsize == 0


def test_a_row_with_too_many_graphs_fails(tmp_path: Path) -> None:
    """Dynamo would go on without compiling, and the row would name what it does not measure."""
    bench = Bench("cpu", True, tmp_path, deadline=time.monotonic() + 600)

    def row(shapes: int) -> tuple[bool, dict]:
        def times(x: torch.Tensor, n: int) -> torch.Tensor:
            return x * n if n % 2 else x + n

        compiled = torch.compile(times, backend="eager", dynamic=False)
        return all(bool(compiled(torch.ones(2), n).any()) for n in range(1, shapes)), {}

    for i, shapes in enumerate((3, 3, 30, 3)):
        bench.attempt("speed", str(i), lambda shapes=shapes: row(shapes))
    assert [row["ok"] for row in bench.rows] == [True, True, False, True]


def test_failures_are_rows_and_a_spent_budget_leaves_the_others_out(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").mkdir()  # where the corpus is to be written
    assert prove_gpu.run(["ring"], given(tmp_path)) == 1
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [False, False]
    assert "IsADirectoryError" in rows[0]["error"] and "Traceback" in rows[0]["traceback"]
    bench = Bench("cpu", False, tmp_path, deadline=0.0)
    bench.attempt("codecs", "late", lambda: (True, {}))
    assert bench.rows[0]["ok"] is None and "budget" in bench.rows[0]["why"]


def test_options_that_cannot_work_are_refused(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        prove_gpu.main(["--only", "codecs,speeds"])
    assert "--only speeds: choose from machine, codecs" in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            prove_gpu.main(["--only", "machine"])
        assert "PyTorch finds no GPU" in capsys.readouterr().err
