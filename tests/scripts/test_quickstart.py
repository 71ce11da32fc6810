"""Laws of scripts/quickstart.sh: its steps and what it says, with commands that only log."""

import json
import re
import shutil
import subprocess

import pytest

from tests.scripts.fake_machine import REPOSITORY

COMMAND = '#!/bin/sh\necho "$(basename "$0") $*" >>"$LOG"\n'
# Stands for make_target.py as well: writes what the next steps look for.
PYTHON = COMMAND + 'if [ "$2" = --out ]; then mkdir -p "$3" && echo {} >"$3/prompts.jsonl"; fi\n'


@pytest.fixture
def quickstart(tmp_path):
    """Returns a function that runs the script in a prepared environment."""
    root, log = tmp_path / "repository", tmp_path / "calls.log"
    (root / "scripts").mkdir(parents=True)
    for name in ("_env.sh", "quickstart.sh"):
        shutil.copy(REPOSITORY / "scripts" / name, root / "scripts")
    shutil.copy(REPOSITORY / "pyproject.toml", root)
    binaries = root / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, text in (("python", PYTHON), ("spec-data", COMMAND), ("spec-train", COMMAND)):
        (binaries / name).write_text(text)
        (binaries / name).chmod(0o755)
    stamp = 'source scripts/_env.sh; stamp_of "" >"$VENV/.spec-data-installed"'
    subprocess.run(["bash", "-c", stamp], cwd=root, check=True, env={"PATH": "/usr/bin:/bin"})

    def run(*options):
        log.write_text("")
        done = subprocess.run(
            ["bash", "scripts/quickstart.sh", *options],
            cwd=root,
            env={"PATH": "/usr/bin:/bin", "LOG": str(log)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done, log.read_text().splitlines()

    run.root = root
    return run


def headers(done):
    """The (number, of how many, words) of the steps."""
    found = re.findall(r"^\[(\d)/(\d)\] \[#*-*\] (.*)$", done.stderr, re.MULTILINE)
    return [(int(number), int(count), words) for number, count, words in found]


def test_steps_are_numbered_and_say_what_is_left(quickstart):
    done, calls = quickstart()
    assert done.returncode == 0, done.stderr
    assert [header[:2] for header in headers(done)] == [(n, 5) for n in range(1, 6)]
    lefts = [words.split(", ")[-1] for _, _, words in headers(done)]
    assert lefts[0] == "about 3 min left"
    assert lefts[-1] == "less than a minute left"
    bars = [line.count("#") for line in done.stderr.splitlines() if re.match(r"\[\d/5\]", line)]
    assert bars == sorted(bars) and bars[0] == 0 and 10 < bars[-1] < 20
    commands = ["spec-data regenerate", "spec-data generate", "spec-train fit", "spec-train eval"]
    assert [" ".join(call.split()[:2]) for call in calls[1:-1]] == commands
    assert "--on-policy" in calls[2] and f"--corpus {quickstart.root}" not in calls[2]
    done, calls = quickstart("--steps", "089")  # the target is not trained again
    assert [header[:2] for header in headers(done)] == [(n, 4) for n in range(1, 5)]
    assert not any("make_target.py" in call for call in calls)
    assert any("--steps 89 " in call for call in calls), "leading zeros are decimal"


def test_a_target_of_ones_own_is_not_given_a_time_and_keeps_rows_for_decoding(quickstart, tmp_path):
    corpus = tmp_path / "chats.jsonl"
    corpus.write_text("".join(json.dumps({"row": n}) + "\n" for n in range(1, 101)))
    done, calls = quickstart("--target", "some/model", "--corpus", str(corpus), "--decode", "3")

    assert done.returncode == 0, done.stderr
    assert [header[:2] for header in headers(done)] == [(n, 4) for n in range(1, 5)]
    assert "left" not in "".join(words for _, _, words in headers(done))
    out = quickstart.root / "quickstart"
    held = [json.loads(line)["row"] for line in (out / "prompts.jsonl").read_text().splitlines()]
    kept = [json.loads(line)["row"] for line in (out / "corpus.jsonl").read_text().splitlines()]
    assert held == [20, 40, 60]
    assert sorted(held + kept) == list(range(1, 101))
    assert not any("--draft-vocab-size" in call for call in calls)
    # a file of prompts that an earlier run kept stands for nothing
    done, calls = quickstart("--target", "some/model", "--corpus", str(corpus), "--decode", "0")
    assert done.returncode == 2 and "--decode 0 decodes no rows" in done.stderr and not calls
    corpus.write_text("{}\n")
    done, calls = quickstart("--target", "some/model", "--corpus", str(corpus))
    assert f"{corpus} has fewer than 20 rows" in done.stderr and not calls


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "many"], "--steps many: not a whole number"),
        (["--decode"], "--decode needs a value"),
        (["--stepz", "5"], "unknown option --stepz"),
        (["--target", "m"], "needs --corpus FILE"),
        (["--corpus", "/nowhere.jsonl"], "--corpus /nowhere.jsonl: no such file"),
    ],
)
def test_a_wrong_option_is_refused_in_words(quickstart, options, words):
    done, calls = quickstart(*options)
    assert done.returncode == 2
    assert words in done.stderr
    assert calls == []
