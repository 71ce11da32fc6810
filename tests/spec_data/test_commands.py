"""Commands as a user runs them: results, errors, signals, and the command to run next."""

import inspect
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest

import spec_data
from spec_data import cli
from spec_data.terminal.command import words_of
from spec_data.terminal.console import STOP_SIGNALS, run_cli
from tests.factory import tiny_dataset
from tests.spec_data.runs import arguments, options, run, start_cli
from tests.spec_data.shards.integrity_tools import flip
from tests.terminal_tools import environment, next_command


@pytest.fixture(scope="module")
def data(tmp_path_factory, target, corpus):
    out = tmp_path_factory.mktemp("data") / "set"
    run(target, corpus, out)
    return out


def words(target: Path, corpus: Path, out: Path, **changes) -> list[str]:
    given = arguments(options(target, corpus, out, **changes))
    return words_of(inspect.unwrap(spec_data.generate), given)


# -- errors and signals -----------------------------------------------------------------------

PLAIN = {"quiet": False, "verbose": False, "debug": False}


def test_no_traceback_without_debug(capsys, tmp_path):
    def broken():
        raise KeyError("x")

    root = logging.getLogger()
    before = (root.level, list(root.handlers))
    assert run_cli(broken, Namespace(**PLAIN)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: KeyError: 'x' (run again with --debug") and "File" not in error
    assert (root.level, list(root.handlers)) == before
    for line in (["--debug", "inspect", str(tmp_path)], ["inspect", str(tmp_path), "--debug"]):
        with pytest.raises(FileNotFoundError):
            cli.main(line)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_ctrl_c_is_130_and_stop_signals_are_theirs(capsys, number):
    def stopped():
        os.kill(os.getpid(), number)
        time.sleep(5)

    before = signal.getsignal(number)
    assert run_cli(stopped, Namespace(**PLAIN), lambda: "stopped: two units kept") == 128 + number
    assert "stopped: two units kept" in capsys.readouterr().err
    assert run_cli(stopped, Namespace(**PLAIN)) == 128 + number  # every command clears up
    assert signal.getsignal(number) is before

    def interrupted():
        raise KeyboardInterrupt

    assert run_cli(interrupted, Namespace(**PLAIN)) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("--json",), (), ("--help-all",)])
def test_an_ascii_terminal_gets_replacements(tmp_path, words):
    """Names and texts, help, results as JSON, errors: none ends in an error of Python."""
    folder = tmp_path / "données"
    tiny_dataset(folder, n_docs=4)
    command = [sys.executable, "-m", "spec_data", "inspect", str(folder), *words]
    ascii_only = environment(PYTHONIOENCODING="ascii", LANG="C")
    done = subprocess.run(command, env=ascii_only, capture_output=True, check=True)
    assert b"Unicode" not in done.stderr and done.stdout.isascii()
    if words == ("--json",):
        assert json.loads(done.stdout)["path"].endswith("données")
    missing = [sys.executable, "-m", "spec_data", "inspect", str(folder / "où"), *words]
    done = subprocess.run(missing, env=ascii_only, capture_output=True)
    assert done.returncode == (0 if words == ("--help-all",) else 2)
    assert b"Unicode" not in done.stderr


def test_a_closed_pipe_is_silent(data):
    command = f"{sys.executable} -m spec_data inspect {data} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command], env=environment(PYTHONUNBUFFERED="1"), capture_output=True,
        text=True,
    )  # fmt: skip
    assert "BrokenPipe" not in done.stderr and "Traceback" not in done.stderr
    assert done.stdout.splitlines()[-1] in ("0", "141")


def test_a_stopped_generate_says_what_it_keeps_and_resumes(tmp_path, target, corpus, data, capsys):
    out, number = tmp_path / "set", signal.SIGTERM
    given = options(target, corpus, out, batch_tokens=16, max_shard_size="20KB")
    process = start_cli(given, held=3)
    while process.poll() is None and not list(out.glob(".generate/unit-*.json")):
        time.sleep(0.01)
    process.send_signal(number)
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error and "\r" not in error
    kept = re.search(
        r"^stopped: (\d+) of (\d+) units are done and kept \(([\d,]+) tokens", error, re.M
    )
    assert kept and 1 <= int(kept[1]) < int(kept[2]), error
    assert int(kept[1]) == len(list(out.glob(".generate/unit-*.json")))
    program, *resume = next_command(error, "resume")
    assert program == "spec-data" and cli.main(resume) == 0
    assert next_command(capsys.readouterr().err)[:2] == ["spec-data", "verify"]


# -- results ----------------------------------------------------------------------------------


def test_estimate_names_generate_or_says_what_is_missing(
    tmp_path, target, corpus, capsys, monkeypatch
):
    given = words(target, corpus, tmp_path / "set")
    assert cli.main(["estimate", *given, "--json", str(tmp_path / "e.json")]) == 0
    shown = capsys.readouterr()
    assert next_command(shown.err) == ["spec-data", "generate", *given]
    facts = json.loads((tmp_path / "e.json").read_text())
    assert facts["fits"] and f"{facts['tokens']:,}" in shown.out
    assert facts["bytes"] < facts["bytes_needed"] < facts["bytes_free"]
    needed = facts["bytes_needed"]
    usage = Namespace(total=needed, used=0, free=needed - 25_000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    assert cli.main(["estimate", *given, "--json", str(tmp_path / "e.json")]) == 1
    shown = capsys.readouterr()
    assert "25.00 kB too little" in " ".join(shown.out.split())
    assert "next:" not in shown.err
    assert json.loads((tmp_path / "e.json").read_text())["fits"] is False


WITHOUT_MODELS = """
import sys
from spec_data.cli import main
assert main(sys.argv[1:]) == 0
heavy = {"transformers.modeling_utils", "spec_data.capture.model"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""


@pytest.mark.long
def test_estimate_imports_nothing_that_runs_a_target(tmp_path, target, corpus):
    given = words(target, corpus, tmp_path / "set")
    program = [sys.executable, "-c", WITHOUT_MODELS, "estimate", *given]
    done = subprocess.run(program, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_inspect_as_json_and_its_next_command(data, capsys):
    assert cli.main(["inspect", str(data)]) == 0
    shown = capsys.readouterr()
    command = next_command(shown.err)
    assert command == ["spec-data", "inspect", str(data), "--doc", "0"]
    assert cli.main([*command[1:]]) == 0
    document = capsys.readouterr()
    assert "«" in document.out and "\033[" not in document.out
    assert next_command(document.err)[:3] == ["spec-train", "fit", "eagle3"]
    for line in (["--json", str(data)], [str(data), "--json"]):
        assert cli.main(["inspect", *line]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["documents"] == 30 and facts["layers"] == [0, 2, 4]
    assert cli.main(["inspect", str(data), "--doc", "3", "--json"]) == 0
    one = json.loads(capsys.readouterr().out)
    assert one["document"] == 3 and any(piece["supervised"] for piece in one["pieces"])


def test_a_failed_verify_is_json_too_and_names_no_next_command(data, tmp_path, capsys):
    broken = tmp_path / "set"
    shutil.copytree(data, broken)
    flip(next((broken / "shards").iterdir()))
    assert cli.main(["verify", str(broken), "--device", "cpu", "--json"]) == 1
    shown = capsys.readouterr()
    facts = json.loads(shown.out)
    assert not facts["verified"] and facts["failures"] and "next:" not in shown.err


def test_a_device_that_is_not_there_is_named_before_the_work(target, corpus, tmp_path, capsys):
    assert cli.main(["generate", *words(target, corpus, tmp_path / "set", device="cuda:99")]) == 2
    error = capsys.readouterr().err
    assert "--device cuda:99: not usable on this machine" in error and "render" not in error
    assert not (tmp_path / "set").exists()
