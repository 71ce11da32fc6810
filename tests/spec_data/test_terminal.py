"""The terminal: bars, logs, errors, signals and the next command, as a user meets them."""

import gzip
import io
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from spec_data import cli
from spec_data.corpus.record_reader import CorpusReader
from spec_data.corpus.sources import expected_rows
from spec_data.shards.errors import ConfigError
from spec_data.terminal.console import console_logging, start_log_file
from spec_data.terminal.progress import Bar
from spec_train import cli as train_cli
from tests.terminal_tools import COLUMNS, drawings, environment, flags_of, on_terminal, screen

BARS = """
import logging, sys, time
from argparse import Namespace
from spec_data.terminal import NOTICE, console, progress
progress.LINE_SECONDS = 0.3

def work():
    with progress.progress(total=140, desc="fit", unit="steps", leave=True) as bar:
        for step in range(14):
            time.sleep(0.1)
            bar.update(10)
            bar.set_postfix_str("loss 3.122, acceptance 1.52, 8,200 tok/s, held out 3.1 and 1.5")
            if step == 6:
                logging.getLogger("spec_data.x").log(25, "a line in the middle")
        time.sleep(0.6)
        bar.refresh()
    print("the result")
    for _ in progress.progress(range(3), desc="broken", unit="rows"):
        time.sleep(0.35)
        raise OSError("no such disk")

sys.exit(console.run_cli(work, Namespace(quiet=QUIET, verbose=False, debug=False)))
"""


def bars(quiet: bool = False) -> str:
    return BARS.replace("QUIET", str(quiet))


# -- bars -------------------------------------------------------------------------------------


def test_bars_on_a_terminal_fit_it_and_let_lines_pass():
    code, raw = on_terminal("-c", bars())
    assert code == 1
    drawn = [d for d in drawings(raw) if d.startswith("fit:")]
    assert len(drawn) > 5
    assert all(len(line) <= COLUMNS for line in drawn)
    for line in drawn[1:]:  # whole at the end: no figure is cut off
        assert re.search(
            r"\d steps/s(, loss 3\.122(, acceptance 1\.52(, 8,200 tok/s)?)?)?\]$", line
        )
    assert any("loss 3.122, acceptance 1.52]" in line for line in drawn)
    lines = screen(raw)
    assert "a line in the middle" in lines  # alone on its line
    assert "the result" in lines
    assert any(line.startswith("error: no such disk") for line in lines)
    assert not any(line.startswith("fit: ") and " of " in line for line in lines)  # no log line


def test_a_log_has_readable_lines_and_no_carriage_return():
    done = subprocess.run(
        [sys.executable, "-c", bars()], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stdout == "the result\n"
    assert "\r" not in done.stderr
    found = [line for line in done.stderr.splitlines() if line.startswith("fit: ")]
    assert 3 <= len(found) <= 5  # 1.4 seconds, lines after 0.3, 0.66 and 1.1, and the last one
    line = r"fit: [\d,]+ of 140 steps \(\d+%\), [\d,]+ steps/s, 00:0\d elapsed"
    assert all(re.match(line, text) for text in found)
    assert re.search(r"00:0\d left, loss 3.122, acceptance 1.52", found[0])
    assert ["140 of 140" in text for text in found] == [False] * (len(found) - 1) + [True]
    assert done.stderr.count("broken: 0 of 3 rows") == 1


FORKS = """
import os, signal, threading
from spec_data.terminal.progress import Bar, progress

def bar():
    progress(total=1, desc="x").close()

def fork(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1]

def die_inside_a_bar():
    Bar.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)

bar()
assert fork(die_inside_a_bar) == signal.SIGKILL
bar()  # stood still for ever
inside, forked = threading.Event(), threading.Event()

def draw():
    with Bar.get_lock():
        inside.set()
        forked.wait(20)

thread = threading.Thread(target=draw)
thread.start()
inside.wait()
assert fork(bar) == 0
forked.set()
thread.join()
"""


def test_bars_of_one_process_never_wait_for_another():
    subprocess.run([sys.executable, "-c", FORKS], env=environment(), check=True, timeout=60)


@pytest.mark.parametrize("call", ["refresh", "clear", "update"])
def test_a_drawing_that_fails_leaves_the_lock_to_other_threads(call):
    """Planted: Ctrl-C within a drawing; the bar of another thread stood still for ever."""

    def stopped(*given, **options):
        raise KeyboardInterrupt

    class Full(io.StringIO):
        def write(self, text):
            return stopped() if armed else super().write(text)

    armed = []
    bar = Bar(total=9, mininterval=0, file=Full(), disable=False)
    armed.append(1)
    with pytest.raises(KeyboardInterrupt):
        getattr(bar, call)()
    armed.clear()
    drawn = threading.Event()

    def draw():
        with Bar(total=1, mininterval=0, file=io.StringIO()) as other:
            other.update()
        drawn.set()

    threading.Thread(target=draw, daemon=True).start()
    assert drawn.wait(20)
    bar.close()


def test_quiet_draws_and_logs_nothing_but_results_and_errors():
    code, raw = on_terminal("-c", bars(quiet=True))
    assert code == 1
    shown = [line for line in screen(raw) if line]
    assert shown[0] == "the result" and shown[1].startswith("error: no such disk")
    assert len(shown) == 2


# -- totals -----------------------------------------------------------------------------------


def test_the_corpus_has_a_total_before_it_is_read(tmp_path, monkeypatch):
    rows = [{"text": f"row {i} " + random.randbytes(300).hex()} for i in range(2000)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "a.jsonl").write_text(lines + "\n")
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet")
    (tmp_path / "e.json").write_text(json.dumps(rows))

    def expected(*names: str, limit: int | None = None) -> int | None:
        return expected_rows(CorpusReader([str(tmp_path / n) for n in names]).sources, limit)

    assert expected("a.jsonl", "b.jsonl.gz", "c.parquet") == 6000
    assert expected("a.jsonl", limit=64) == 64
    assert expected("a.jsonl", "e.json") is None  # a JSON list is not counted
    (tmp_path / "f.jsonl.gz").write_bytes(b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 64)
    assert expected("f.jsonl.gz") is None  # damaged: reading the rows says so
    monkeypatch.setattr("spec_data.corpus.sources._SAMPLE", 400_000)
    assert 1600 < (expected("b.jsonl.gz") or 0) <= 2000  # some of it is read ahead


# -- parsing ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "line", "expected", "usage"),
    [
        ("data", "generate --layrs 1", "Did you mean --layers?",
         "usage: spec-data generate --target MODEL"),
        ("data", "verfy x", "did you mean verify?", "usage: spec-data COMMAND"),
        ("data", "inspect x y", "Unused Tokens: ['y']", "usage: spec-data inspect DATA"),
        ("train", "fit eagel3", "did you mean eagle3?", "usage: spec-train fit DRAFT"),
        ("train", "fit eagle4", "did you mean eagle3?", "usage: spec-train fit DRAFT"),
        ("train", "fit", "DRAFT is missing (drafts: eagle, eagle3", "usage: spec-train fit DRAFT"),
        ("train", "fit --data d", "DRAFT is missing before --data (drafts: eagle, eagle3",
         "usage: spec-train fit DRAFT"),
        ("data", "", "COMMAND is missing (commands: estimate, generate", "usage: spec-data"),
        ("data", "estimate --target t --corpus c --out o --limit 0.5", "not a whole number",
         "usage: spec-data estimate"),
    ],
)  # fmt: skip
def test_unknown_words_are_answered_with_the_nearest(capsys, program, line, expected, usage):
    main = cli.main if program == "data" else train_cli.main
    assert main(line.split()) == 2
    error = capsys.readouterr().err
    assert expected in error and error.startswith(usage)
    assert re.search(r"^All options: spec-(data|train)( \w+)* --help-all$", error, re.MULTILINE)


@pytest.mark.parametrize("program", ["spec_data", "spec_train"])
def test_a_closed_output_ends_help_quietly_and_a_full_one_is_named(program):
    command = [sys.executable, "-m", program, "-h"]
    reader, writer = os.pipe()
    os.close(reader)
    for stdout, code, error in (
        (writer, 128 + signal.SIGPIPE, r""),
        (os.open("/dev/full", os.O_WRONLY), 1, r"error: the output: the disk is full.*\n"),
    ):
        done = subprocess.run(
            command, env=environment(), stdout=stdout, stderr=subprocess.PIPE, text=True
        )
        os.close(stdout)
        assert done.returncode == code and re.fullmatch(error, done.stderr), done.stderr
    closed = ["bash", "-c", '"$0" "$@" >&-', *command]
    done = subprocess.run(closed, env=environment(), stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, "")


INTERRUPTED = """
import os, signal, sys

def interrupt(event, arguments):
    if event == "import" and arguments[0] == "spec_data.terminal.console":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
"""


@pytest.mark.parametrize("program", ["spec-data", "spec-train"])
def test_ctrl_c_while_a_program_starts_is_no_traceback(program, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED)
    root = Path(cli.__file__).parent.parent
    scripts = tomllib.loads((root / "pyproject.toml").read_text())["project"]["scripts"]
    module, function = scripts[program].split(":")
    call = f"import sys; from {module} import {function}; sys.exit({function}())"
    variables = environment()
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path)
    module = ["-m", program.replace("-", "_"), "--version"]
    done = subprocess.run(
        [sys.executable, *module], env=environment(), capture_output=True, text=True
    )
    assert re.fullmatch(rf"{program} \d+\.\d+\.\d+\n", done.stdout), done.stderr
    for words in (["-c", call], module):
        done = subprocess.run(
            [sys.executable, *words], env=variables, capture_output=True, text=True
        )
        assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_completion_scripts_know_every_command(capsys, tmp_path):
    assert cli.main(["--print-completion", "fish"]) == 0
    assert {"verify", "codec"} <= set(re.findall(r"\w+", capsys.readouterr().out))
    assert train_cli.main(["--print-completion", "bash"]) == 0
    script = capsys.readouterr().out
    (tmp_path / "script").write_text(script)
    function = re.findall(r"^complete -F (\w+) ", script, re.MULTILINE)[0]
    asked = (
        f"source {tmp_path / 'script'}; COMP_WORDS=(spec-train fit eagle3 --ttt); COMP_CWORD=3; "
        f"{function}; echo ${{COMPREPLY[@]}}"
    )
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True)
    assert done.stdout.split() == ["--ttt-steps"], done.stderr


@pytest.mark.parametrize("program", ["spec_data", "spec_train"])
def test_flags_change_only_on_purpose(program):
    """After a wanted change: SPEC_WRITE_FLAGS=1 python -m pytest -k flags_change writes it."""
    file = Path(__file__).parent.parent / program / "flags.txt"
    entries = (cli if program == "spec_data" else train_cli).PROGRAM.entries
    flags = {" ".join(words): flags_of(entry) for words, entry in sorted(entries.items())}
    found = "".join(f"{name}:\n" + "".join(f"  {x}\n" for x in flags[name]) for name in flags)
    if os.environ.get("SPEC_WRITE_FLAGS"):
        file.write_text(found)
    assert found == file.read_text()


LISTS = {
    "spec-data": "codec columns corpus data decontaminate for layers not-in server",
    "spec-train": "columns corpus data devices draft-tokens layer-types layers only prompts runs "
    "space track",
}
"""Options that may be typed several times, or that take several values."""


@pytest.mark.parametrize("program", [cli.PROGRAM, train_cli.PROGRAM], ids=lambda p: p.name)
def test_every_option_is_shown_by_help_all_and_typed_once_unless_it_is_a_list(program):
    lists = set()
    for words, entry in program.entries.items():
        shown = program.help(words, True)
        usage = {name.lower().replace("_", "-") for name in re.findall(r"\b[A-Z_]+\b", shown)}
        for argument in entry.arguments:
            names = [name for name in argument.names if name.startswith("--")]
            assert names, argument
            for name in names:
                assert re.search(rf"^  .*{name}\b", shown, re.M) or name[2:] in usage, (words, name)
            for name in names:
                try:
                    entry.each_once([name, "1", names[0], "2"])
                    lists.add(name)
                except ConfigError as error:
                    assert f"give {names[0]} once" in str(error)
    assert sorted(name[2:] for name in lists) == LISTS[program.name].split()


# -- log lines --------------------------------------------------------------------------------


def test_every_code_of_a_warning_is_explained():
    root = Path(__file__).parents[2]
    code = re.compile(r"warning\[([a-z-]+)\]")
    files = [p for name in ("spec_data", "spec_train") for p in (root / name).rglob("*.py")]
    used = {found for path in files for found in code.findall(path.read_text())}
    page = (root / "docs" / "warnings.md").read_text()
    assert sorted(used) == re.findall(r"^- `([\w-]+)`: ", page, re.M)
    without = [p for p in files if re.search(r"\.warning\(\s*f?\"(?!warning\[)", p.read_text())]
    assert without == []


LINES = """
import logging, sys
from argparse import Namespace
from pathlib import Path
from spec_data.terminal import NOTICE, console
log = logging.getLogger("x")

def work():
    file = console.start_log_file(Path(sys.argv[1]))
    log.info("a detail")
    for shard in range(3):
        log.warning("warning[codec]: column %d is stored in bf16 instead of few bits", shard)
    log.warning("warning[codec]: %s", "something else " * 9)
    for message in (ValueError("an object"), "%d wrong"):  # of libraries
        log.warning(message, *["x"] * isinstance(message, str))
    assert not file.written
    Path(sys.argv[1]).mkdir()
    log.log(NOTICE, "next \\udcff")
    assert file.written
    raise MemoryError("of http://me:secret@host/v1")

sys.exit(console.run_cli(work, Namespace(quiet=False, verbose=len(sys.argv) > 2, debug=False)))
"""


@pytest.mark.parametrize("verbose", [False, True])
def test_repeated_warnings_are_shown_once_and_the_log_file_has_everything(tmp_path, verbose):
    out = tmp_path / "data"
    code, raw = on_terminal("-c", LINES, str(out), *(["-v"] if verbose else []))
    lines = screen(raw)
    assert code == 1 and max(map(len, lines)) < COLUMNS
    assert sum("stored in bf16" in line for line in lines) == (3 if verbose else 1)
    assert ("a detail" in lines) == verbose and "an object" in lines
    assert any("repeated warnings: 2" in line for line in lines) != verbose
    text = (tmp_path / "data.log").read_text()
    assert text.count("INFO a detail") == 1 and text.count("stored in bf16") == 3
    assert "an object" in text and "ERROR error: MemoryError: of http://host/v1" in text


@pytest.mark.parametrize("out", [".", "..", "../other"])
def test_the_log_file_is_beside_any_folder(tmp_path, monkeypatch, out):
    (tmp_path / "in").mkdir()
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    with console_logging(logging.WARNING, debug=False):
        file = start_log_file(out)
        logging.getLogger("x").warning("a line")
        assert file is not None and file.written
    assert file not in logging.getLogger().handlers
    assert file.path.resolve() == Path(f"{Path(out).resolve()}.log")
    file.path.unlink()
