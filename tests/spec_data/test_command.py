"""Commands as typed functions: what the command line and Python make of one function."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pytest
from cyclopts import Parameter

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.terminal.command import Program, Result, command, words_of
from spec_data.terminal.given import Options
from spec_data.terminal.types import (
    ON,
    Corpus,
    Count,
    Directory,
    JsonObject,
    Layers,
    Names,
    NewDataset,
    Positive,
    Several,
    Share,
    Target,
    Text,
    more,
)

RUNNING = more("where it runs")


@dataclasses.dataclass
class Given(Result):
    """The arguments that a command received."""

    arguments: dict

    def __str__(self):
        return json.dumps(self.arguments)

    @property
    def next_command(self):
        return ("spec-data", "next", "a b")


@command
def capture(
    target: Target,
    corpus: Corpus,
    out: NewDataset,
    *,
    layers: Layers = "auto",
    for_: Names = "",
    max_length: Positive = 2048,
    limit: Count = 0,
    share: Share = 0.5,
    bad_rows: Text = "auto",
    source: Several = (),
    mask: Annotated[Literal["assistant", "all"], RUNNING] = "assistant",
    template: JsonObject | None = None,
    greedy: bool = False,
    packing: Annotated[bool, ON] = True,
) -> Given:
    """Capture hidden states.

    A second paragraph.

    Examples:
        spec-data capture --target MODEL --corpus SRC --out DIR

    Args:
        target: the model.
        mask: supervised tokens.
    """
    return Given(arguments=dict(locals()))


@Parameter(name="*")
@dataclasses.dataclass(frozen=True, kw_only=True)
class Chain(Options):
    """A chain of drafted tokens."""

    steps: Positive = 7
    "Tokens of a chain."

    def validate(self):
        if self.steps == 13:
            raise DraftError("steps = 13: not on a Friday")


@command
def fit(data: Several, out: Directory, draft: Chain = Chain(), *, lr: float = 0.1) -> str:
    """Train a draft.

    Args:
        data: datasets.
        out: the run.
        draft: its kind and options.
        lr: learning rate.
    """
    return f"{draft} on {data} at {lr}"


@pytest.fixture
def program():
    program = Program("spec-data", "What it does.", "In the end.", "1.2")
    program.add(capture, stopped=lambda given: f"{given['out']} is kept")
    program.add(fit, name="fit chain", summary=Chain.__doc__)
    return program


REQUIRED = ["capture", "--target", "org/model", "--corpus", "a", "b", "--out", "data"]


def test_the_command_line_and_python_give_the_same_arguments(program, capsys):
    line = "--layers -1,3 --for eagle3 --max-length 7 --share 1 --bad-rows 5 --source x y --greedy"
    line += " --mask all --no-packing --template"
    assert program.main([*REQUIRED, *line.split(), '{"think": false}', "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)["arguments"]
    assert printed == capture(
        "org/model", ["a", "b"], Path("data"), layers=[-1, 3], for_="eagle3", max_length=7,
        share=1, bad_rows=5, source=["x", "y"], greedy=True, mask="all", packing=False,
        template={"think": False},
    ).arguments | {"layers": "-1,3", "bad_rows": "5"}  # fmt: skip
    assert capture("org/model", "a", "data", limit=np.int64(3)).arguments["limit"] == 3


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ([], "COMMAND is missing"),
        (["--limit", "3"], "COMMAND is missing before --limit"),
        ([*REQUIRED, "--max-length", "0"], "--max-length 0: expected int >= 1"),
        ([*REQUIRED, "--mask", "al"], '"all"'),
        ([*REQUIRED, "--template", "[1]"], "JSON object"),
        ([*REQUIRED, "--for", ""], "is a shell variable not set?"),
        ([*REQUIRED, "--for", "s3://x/y"], "s3://"),
        (REQUIRED[:-2], "--out is missing"),
        (
            ["fit", "chain", "--data", "x", "--out", "r", "--block-size", "3"],
            "Unknown option: --block-size",
        ),
        (["fit", "chain", "--data", "x", "--out", "r", "--steps", "13"], "not on a Friday"),
        (["fit", "chain", "--config", "nothing.yaml"], "no such file"),
        ([*REQUIRED, "--config", "other.yaml"], 'Unknown option: "max-new-tokens" from --config'),
        ([*REQUIRED, "--json", "no/such/folder/x.json"], "--json no/such/folder"),
        ([*REQUIRED, "--json="], "--json '': expected a value"),
        ([*REQUIRED, "--config="], "--config '': expected a value"),
    ],
)
def test_what_is_wrong_is_named_with_exit_code_2(
    program, words, fact, capsys, tmp_path, monkeypatch
):
    (tmp_path / "other.yaml").write_text("max-new-tokens: 5")
    monkeypatch.chdir(tmp_path)
    assert program.main(words) == 2
    printed = capsys.readouterr()
    assert fact in printed.err and "error: " in printed.err and not printed.out


@pytest.mark.parametrize(
    ("keywords", "fact"),
    [
        ({"max_length": "x"}, "--max-length 'x': expected int, got str"),
        ({"mask": "al"}, "did you mean all?"),
        ({"for_": "gs://b/c"}, "--for gs://b/c"),
    ],
)
def test_python_is_refused_in_the_same_words(keywords, fact):
    with pytest.raises(ConfigError) as refused:
        capture("org/model", "a", "data", **keywords)
    assert fact in str(refused.value)
    with pytest.raises(TypeError):
        capture("org/model", "a", "data", max_lenght=3)


def test_a_config_file_stands_between_defaults_and_words(program, capsys, tmp_path):
    file = tmp_path / "options.yaml"
    file.write_text(
        "max-length: 7\nlimit: 5\ncorpus: [c]\nfor: eagle3\nbad_rows: 5\nshare: 1e-1\n"
        "layers: [1, 3]\ntemplate: {a: 1}\n"
    )
    words = ["capture", "--target", "org/m", "--out", "d", "--limit", "6", "--config", str(file)]
    assert program.main([*words, "--json", "-"]) == 0
    given = json.loads(capsys.readouterr().out)["arguments"]
    assert (given["max_length"], given["limit"], given["corpus"]) == (7, 6, ["c"])
    assert (given["for_"], given["template"], given["bad_rows"]) == ("eagle3", {"a": 1}, "5")
    assert given["layers"] == "1,3" and given["share"] == 0.1
    file.write_text("limit: null\nshare: null\n")
    assert program.main([*words[:-4], "--corpus", "c", "--config", str(file), "--json", "-"]) == 0
    given = json.loads(capsys.readouterr().out)["arguments"]
    assert (given["limit"], given["share"]) == (0, 0.5)
    file.write_text("max-lengt: 7\n")
    assert program.main(words) == 2
    assert "max-lengt" in capsys.readouterr().err
    run = tmp_path / "fit.json"
    run.write_text(json.dumps({"steps": 3, "lr": 0.5, "data": ["x"], "out": "r"}))
    assert program.main(["fit", "chain", "--config", str(run)]) == 0
    assert capsys.readouterr().out == "Chain(steps=3) on ['x'] at 0.5\n"


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("--limit 1 --limit 2", "--limit 1 and --limit 2: give --limit once"),
        ("--limit=1 --max-length 4 --limit 1", "--limit=1 and --limit 1"),
        ("--out other", "--out data and --out other"),
        ("--packing --no-packing", "--packing and --no-packing: give --packing once"),
        ("--greedy --greedy", "--greedy and --greedy"),
        ("--template {} --template {}", "--template {} and --template {}"),
        ('--template {"a":1,"a":2}', "the key 'a' is there twice"),
        ("--json a --json b", "--json a and --json b: give --json once"),
        ("--config a --config=b", "--config a and --config b"),
        ("--quiet --quiet", "--quiet and --quiet"),
        ("--quiet --verbose", "--quiet and --verbose: choose one"),
    ],
)
def test_an_option_that_is_typed_twice_is_refused_with_both_values(typed, said, program, capsys):
    assert program.main([*REQUIRED, *typed.split()]) == 2
    assert said in capsys.readouterr().err


def test_lists_that_are_typed_in_parts_are_one_list(program, capsys):
    line = "--layers 4 --for eagle3 --layers=-1,3 --source x --for=dspark --source y z"
    assert program.main([*REQUIRED, "--corpus", "c", *line.split(), "--json"]) == 0
    given = json.loads(capsys.readouterr().out)["arguments"]
    assert (given["layers"], given["for_"]) == ("4,-1,3", "eagle3,dspark")
    assert (given["source"], given["corpus"]) == (["x", "y", "z"], ["a", "b", "c"])


def test_there_is_no_help_about_what_is_not_there(program, capsys):
    for words in (["nosuch", "--help"], ["captur", "--help-all"], ["fit", "chian", "-h"]):
        assert program.main(words) == 2
        refused = capsys.readouterr()
        assert re.search("unknown (command|draft)", refused.err) and not refused.out
    assert "did you mean chain?" in refused.err
    assert program.main(["capture", "model", "--limit", "--help"]) == 0


def test_results_are_printed_with_the_next_command_or_written_as_json(
    program, capsys, tmp_path, caplog
):
    caplog.set_level("INFO")
    assert program.main([*REQUIRED, "--json", str(tmp_path / "x.json")]) == 0
    written = json.loads((tmp_path / "x.json").read_text())["arguments"]
    assert json.loads(capsys.readouterr().out) == written
    assert "next:  spec-data next 'a b'" in caplog.text


def test_help_has_first_options_in_one_screen_and_all_on_request(program, capsys):
    assert program.main(["capture", "-h"]) == 0
    first = capsys.readouterr().out
    assert "--max-length N" in first and "[2048]" in first and "--mask" not in first
    assert "--target MODEL --corpus SRC [SRC ...] --out DIR" in first and "examples:" in first
    assert program.main(["capture", "--help-all"]) == 0
    everything = capsys.readouterr().out
    assert "where it runs:" in everything and "--mask" in everything and "--debug" in everything
    assert max(map(len, everything.splitlines()[1:])) <= 80
    assert program.main(["-h"]) == 0
    assert "capture" in capsys.readouterr().out
    assert program.main(["fit", "-h"]) == 0
    assert "A chain of drafted tokens." in capsys.readouterr().out


def test_an_interrupt_says_what_is_kept_and_how_to_resume(capsys, caplog):
    @command
    def slow(out: Directory) -> None:
        """Wait.

        Args:
            out: the directory.
        """
        signal.raise_signal(signal.SIGINT)

    program = Program("spec-data", "", "", "1")
    program.add(slow, stopped=lambda given: f"{given['out']} is kept")
    assert program.main(["slow", "a b"]) == 130
    assert "stopped: a b is kept\nresume:  spec-data slow 'a b'" in caplog.text


def test_arguments_become_words_again():
    values = {"corpus": ["a", "b"], "layers": "-1,3", "limit": None, "packing": False}
    assert words_of(capture, values) == ["--corpus", "a", "b", "--layers=-1,3", "--no-packing"]
    assert words_of(capture, {"max_length": 2048, "greedy": False}) == [
        *("--max-length", "2048", "--greedy=false")  # a default is given as well
    ]
    lists = {"layers": [-1, 3], "for_": ["eagle3", "eagle"]}  # as Python may give them
    assert words_of(capture, lists) == ["--layers=-1,3", "--for", "eagle3,eagle"]
    assert words_of(fit, {"draft": Chain(steps=7)}) == ["--steps", "7"]
    assert words_of(fit, {"draft": Chain()}) == []


ARRAYS = """
import resource
from spec_data.terminal.command import keep_freed_memory
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        [bytearray(1 << 23) for _ in range(4)]  # 32 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(pages() if keep_freed_memory() else -1, pages())
"""


def test_freed_memory_is_kept_unless_the_environment_sets_malloc():
    """A run reuses its pages; malloc's default may ask for new ones in each of the 20 rounds."""

    def faults(**malloc):
        clean = {n: text for n, text in os.environ.items() if not n.startswith("MALLOC_")}
        words = [sys.executable, "-c", ARRAYS]
        text = subprocess.run(words, env=clean | malloc, capture_output=True, text=True, check=True)
        return map(int, text.stdout.split())

    (refused, default), (kept, again) = faults(MALLOC_ARENA_MAX="2"), faults()
    assert refused == -1
    if kept == -1 or default < 1000:
        pytest.skip("no glibc, or pages are huge")
    assert again < default / 10
