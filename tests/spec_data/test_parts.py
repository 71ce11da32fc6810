"""What a long proof or trial is at is seen: on a terminal, and in a log."""

import re
import subprocess
import sys
import threading

import pytest

import spec_data
from spec_data.terminal import parts as module
from spec_data.terminal import progress
from spec_data.terminal.parts import one_part, part, parts
from tests.spec_data.runs import save_target, write_corpus
from tests.terminal_tools import COLUMNS, drawings, environment, on_terminal, screen

WORK = """
import sys, time
from argparse import Namespace
from spec_data.terminal import console, parts, progress
progress.LINE_SECONDS, parts._TICK = 0.3, 0.1

def work():
    with parts.parts("prove"):
        parts.part("packing", 3, 16)
        time.sleep(0.8)  # one part, and nothing else is called
        parts.part("a" * 200)
        time.sleep(0.3)
    print("the result")
    with parts.parts("measure"):
        raise OSError("no such disk")

sys.exit(console.run_cli(work, Namespace(quiet=False, verbose=False, debug=False)))
"""


def test_a_terminal_shows_the_part_while_it_runs_and_nothing_afterwards():
    code, raw = on_terminal("-c", WORK)
    drawn = [d for d in drawings(raw) if d.startswith("prove:")]
    assert code == 1 and any(re.fullmatch(r"prove: packing 3/16 \[00:00\] *", d) for d in drawn)
    assert sum("packing" in d for d in drawn) > 3  # redrawn by the clock
    assert any("aaaa" in d for d in drawn) and all(len(d) <= COLUMNS for d in drawn)
    lines = screen(raw)
    assert "the result" in lines and not any(line.startswith("prove") for line in lines)
    assert any(line.startswith("error: no such disk") for line in lines)


def test_a_log_names_a_part_that_is_long():
    done = subprocess.run(
        [sys.executable, "-c", WORK], env=environment(), capture_output=True, text=True
    )
    assert "\r" not in done.stderr and done.stdout == "the result\n"
    found = [line for line in done.stderr.splitlines() if line.startswith("prove: packing 3/16, ")]
    assert 1 <= len(found) <= 3 and all(line.endswith(" elapsed") for line in found)


def test_nothing_is_cut_on_a_terminal_that_does_not_say_its_width():
    """tqdm counts from its end."""
    whole = progress.Bar.format_meter(1, 2, 1.0, ncols=-1, prefix="x")
    assert whole.startswith("x:  50%") and whole.endswith("it/s]")
    shown = module._Parts.format_meter(0, None, 1.0, ncols=-1, prefix="x", postfix="head")
    assert shown == "x: head [00:01]"


def test_no_thread_is_left_and_a_part_outside_is_nothing():
    part("nothing is open")
    with pytest.raises(KeyError), parts("prove"):
        part("head")
        raise KeyError
    assert not any(thread.name == "prove bar" for thread in threading.enumerate())


def test_generate_names_every_part_of_its_proofs(tmp_path, monkeypatch, caplog):
    save_target(tmp_path / "target")
    write_corpus(tmp_path / "chats.jsonl", 6)
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    options = spec_data.CaptureOptions(layers=[0, 2, 4], device="cpu")
    with caplog.at_level("INFO"):
        spec_data.generate(tmp_path / "target", tmp_path / "chats.jsonl", tmp_path / "d", options)
    said = re.findall(r"prove: (.*?)(?: \d+/\d+)?, \d\d:", caplog.text)
    assert [name for name in dict.fromkeys(said) if name != "begins"] == [
        "load the target",
        "positions",
        "head",
        "packing (single)",
        *[name for name in dict.fromkeys(said) if name.startswith("packing (")][1:],
        "likelihood of a sample of the answers",
        "states of a sample for the codec",
        *(f"codec of hidden.{name}" for name in ("L0", "L2", "L4", "final")),
        "states to compare a resumed run with",
    ]


def test_a_part_alone_is_of_the_work_around_it(monkeypatch, caplog):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with caplog.at_level("INFO"):
        with one_part("load", "the target"):
            pass
        with parts("prove"), one_part("load", "the target"):
            pass
    lines = [record.getMessage().split(", ")[0] for record in caplog.records]
    assert "load: the target" in lines and "prove: load the target" in lines
    assert lines.index("prove: load the target") > max(
        n for n, line in enumerate(lines) if line == "load: the target"
    )
