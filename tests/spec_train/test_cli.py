"""The command line: instant help, clear refusals, exit codes."""

import json
import re
import signal
import time
from pathlib import Path

import pytest

from spec_train.cli import PROGRAM, main
from spec_train.options.kinds import DRAFT_OPTIONS
from spec_train.training.settings import default_lr
from tests.factory import tiny_dataset
from tests.forked import Forked
from tests.terminal_tools import flags_of, next_command


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=30)


def flags(data: Path, out: Path, *more: str) -> list[str]:
    small = {"--data": str(data), "--out": str(out), "--seq-len": "48", "--ttt-steps": "2"}
    small |= {"--steps": "2", "--validation": "0.1"}
    own = [word for name, v in small.items() if name not in more for word in (name, v)]
    return ["fit", "eagle3", *own, *more]


@pytest.mark.parametrize("draft", DRAFT_OPTIONS)
def test_help_is_one_screen_and_names_every_flag_on_request(capsys, draft):
    assert main(["fit", draft, "-h"]) == 0
    first = capsys.readouterr().out
    assert len(first.splitlines()) <= 45 and "examples:" in first and "presets" in first
    assert main(["fit", draft, "--help-all"]) == 0
    whole = capsys.readouterr().out
    shown = set(re.findall(r"^  (--[a-z0-9-]+)", whole, re.MULTILINE))
    shown |= set(re.findall(r"^  --[a-z0-9-]+, (--[a-z0-9-]+)", whole, re.MULTILINE))
    known = set(flags_of(PROGRAM.entries["fit", draft]))
    assert known == shown
    assert max(map(len, whole.splitlines()[1:])) <= 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--epochs", "2"], "one or the other"),
        (["--lr", "0"], "--lr 0"),
        (["--batch-size", "0"], "--batch-size 0"),
        (["--layers", "77"], "77"),
        (["--device", "warp:9"], "--device warp:9"),
        (["--data", "/nowhere"], "/nowhere"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(data, tmp_path, capsys, more, message):
    assert main(flags(data, tmp_path / "run", *more)) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_config_file_and_flags_make_one_config(data, tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("lr = 0.002\nfc-norm = true\nseq-len = 999\n")
    assert main(flags(data, tmp_path / "run", "--config", str(file))) == 0
    resolved = json.loads((tmp_path / "run" / "fit.json").read_text())
    assert (resolved["lr"], resolved["fc_norm"], resolved["seq_len"]) == (0.002, True, 48)
    assert (resolved["dtype"], resolved["epochs"]) == ("float32", None)


def test_lr_default_follows_the_width_and_the_steps(data, tmp_path, capsys):
    assert main(flags(data, tmp_path / "run")) == 0  # of two steps: four times the usual rate
    assert json.loads((tmp_path / "run" / "fit.json").read_text())["lr"] == 4 * 5e-3
    assert "about 2 steps from random weights: --lr 0.02" in capsys.readouterr().err
    widths = (32, 256, 1024, 4096, 8192)
    assert [default_lr(w, "adamw") for w in widths] == [4e-3, 1.6e-3, 4e-4, 1e-4, 5e-5]
    assert [default_lr(w, "muon") for w in widths] == [5e-3, 4e-3, 2e-3, 1e-3, 7.1e-4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_saves_and_exits_with_its_code(data, tmp_path, number):
    out = tmp_path / "run"
    arguments = flags(data, out, "--steps", "100000", "--save-every", "100000", "--log-every", "1")
    process = Forked(lambda: main(arguments))
    while process.poll() is None and '"train"' not in (
        (out / "metrics.jsonl").read_text() if (out / "metrics.jsonl").exists() else ""
    ):
        time.sleep(0.02)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert "stopped and saved at step" in error and "\r" not in error
    assert len(list(out.glob("checkpoint-*"))) == 1
    resume = next_command(error, "resume")
    assert resume == ["spec-train", *arguments]


def test_every_command_names_the_next_one_and_it_runs(data, tmp_path, capsys):
    run, out = tmp_path / "run", tmp_path / "run-hf"
    assert main(flags(data, run)) == 0
    command = next_command(capsys.readouterr().err)
    assert command == ["spec-train", "eval", "--draft", str(run), "--data", str(data)]
    assert main(command[1:]) == 0
    command = next_command(capsys.readouterr().err)
    assert command == ["spec-train", "export", "--draft", str(run)]
    assert main(command[1:]) == 0
    command = next_command(capsys.readouterr().err)
    assert command[:5] == ["spec-train", "export", "--draft", str(run), "--format"]
    assert main(["export", "--draft", str(run), "--format", "hf", "--out", str(out)]) == 0
    command = next_command(capsys.readouterr().err)
    assert command == ["spec-train", "export", "--draft", str(out)]
    assert main(command[1:]) == 0
