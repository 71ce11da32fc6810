"""Random command lines and --config files: every one ends in words, with an exit code of the list.

Words are options of the commands, values of other kinds, and texts that break things. What reads
as a real command fails at its inputs, which are not there.
"""

import collections
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spec_data.cli import PROGRAM as DATA
from spec_train.cli import PROGRAM as TRAIN
from tests.faults.tools import report, survived, trials
from tests.forked import Forked

ODD = (
    *("", " ", "-", "--", "-1", "0", "1e999", "nan", "inf", "true", "none", "[]", "{}", "{", "a,b"),
    *("\u00e9\u4e2d", "\U0001f600", "\udc80", "x" * 300, "../..", "/dev/null", "/proc/self/mem"),
    *("s3://b/k", "file:///x", "http://[", "%s%n", "$(x)", "`x`", "a=b", "=", "--out", "@", "~"),
    *(
        "9" * 40,
        "0x10",
        "1_000",
        "\u0661",
        "1.5",
        "-0",
        "null",
        "a\tb",
        "a\nb",
        "*",
        "?",
        "no/such",
    ),
)
COMMON = ("--json", "--json=", "--config", "--quiet", "-v", "--debug", "--verbose", "--help-all")
CODES = (0, 1, 2)
PROGRAMS = (DATA, TRAIN)


def flags_of(entry: Any) -> list[str]:
    return [name for argument in entry.arguments for name in argument.names if name[:1] == "-"]


def value(rng: np.random.Generator, place: Path) -> str:
    names = [path.name for path in sorted(place.iterdir())]
    return str(rng.choice([*ODD, *names, str(int(rng.integers(100)))]))


def line(rng: np.random.Generator, program: Any, place: Path) -> list[str]:
    """Draw a command line: a command, some of its options, and values that may not fit."""
    chains = list(program.entries)
    chain = chains[int(rng.integers(len(chains)))]
    flags = flags_of(program.entries[chain])
    words = list(chain) if rng.random() < 0.95 else [value(rng, place)]
    for _ in range(int(rng.integers(8))):
        flag = str(rng.choice([*flags, *COMMON] if flags else COMMON))
        drawn = value(rng, place)
        kind = rng.random()
        words += [f"{flag}={drawn}"] if kind < 0.3 else [flag, drawn] if kind < 0.8 else [flag]
        if rng.random() < 0.1:
            words.append(value(rng, place))
    return [word.replace("\0", "") for word in words]


def settings(rng: np.random.Generator, program: Any, place: Path) -> list[str]:
    """Draw a --config file of a command, as YAML, JSON or TOML, in part damaged."""
    chains = list(program.entries)
    chain = chains[int(rng.integers(len(chains)))]
    flags = [flag.lstrip("-") for flag in flags_of(program.entries[chain])] or ["out"]
    odd: list[Any] = [*ODD, None, True, -1, 2**70, 1e308, [], [1, "a"], {}, {"a": [1]}, [[]]]
    table = {
        str(rng.choice([*flags, "no-such", "", "out"])): odd[int(rng.integers(len(odd)))]
        for _ in range(int(rng.integers(6)))
    }
    suffix = str(rng.choice(["yaml", "json", "toml", "txt", "yml"]))
    text = json.dumps(table)
    if suffix == "toml":
        text = "\n".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in table.items())
    data = bytearray(text.encode("utf-8", "surrogatepass"))
    for _ in range(int(rng.integers(3))):
        if data:
            data[int(rng.integers(len(data)))] = int(rng.integers(256))
    file = place / f"settings.{suffix}"
    file.write_bytes(bytes(data[: int(rng.integers(len(data) + 1)) or None]))
    return [*chain, "--config", str(file)]


def outcome(words: list[str], program: Any, place: Path) -> str:
    """Run a command line in a fork, in a folder of its own; return its exit code."""

    def work() -> int:
        os.chdir(place)
        return int(program.main(words))

    ended = Forked(work)
    output, error = ended.communicate()
    where = f"{program.name} {words!r}\n{output[-500:]}{error[-2000:]}"
    assert ended.returncode in CODES, where
    if "--debug" not in " ".join(words):
        assert "Traceback" not in output + error, where
        assert "run again with --debug" not in error, where
    if ended.returncode:
        assert error.strip(), f"no word: {where}"
    return f"exit code {ended.returncode}"


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "--json", "x" * 300],
        ["--json", "x" * 5000, "--repo"],
        ["inspect", "x" * 300, "--json", "y/" * 3000],
    ],
)
def test_names_that_no_file_system_takes(tmp_path: Path, words: list[str]) -> None:
    for program in PROGRAMS:
        assert outcome(words, program, tmp_path) in ("exit code 1", "exit code 2")


LONG = [pytest.param(draw, 300, marks=pytest.mark.long) for draw in (line, settings)]


@pytest.mark.parametrize(("draw", "number"), [(line, 30), (settings, 20), *LONG])
def test_no_command_line_ends_in_a_traceback(tmp_path: Path, draw: Any, number: int) -> None:
    outcomes: collections.Counter[str] = collections.Counter()
    name = f"{draw.__name__}s, {number}"
    drawn = list(trials(name, number))

    def one(trial: int) -> str:
        rng = drawn[trial][1]
        place = tmp_path / f"{trial}"
        place.mkdir()
        (place / "rows.jsonl").write_text('{"text": "a"}\n')
        (place / "folder").mkdir()
        program = PROGRAMS[int(rng.integers(2))]
        return outcome(draw(rng, program, place), program, place)

    for result in survived(one, len(drawn)):
        assert result.startswith("exit code"), result
        outcomes[result] += 1
    report(name, outcomes)
