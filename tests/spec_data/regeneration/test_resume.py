"""Killed, resumed, damaged, full: nothing is lost, nothing is answered twice."""

import errno
import multiprocessing as mp
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from filelock import FileLock

from spec_data.cli import main
from spec_data.regeneration import padded_batches
from spec_data.regeneration.conversations import Answer
from spec_data.regeneration.journal import Journal, journal_path
from spec_data.shards.errors import ConfigError, CorpusError, DatasetError, RunError
from spec_data.terminal.config import as_flags
from tests.spec_data.regeneration.tools import answered, config, rows
from tests.spec_data.runs import save_target, write_corpus

SAMPLED = {"temperature": 1.0, "seed": 3}
FIRST = Answer(message={"content": "a"}, finish="stop", tokens=2, prompt_tokens=5)
NAME = "00" * 16


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source")
    return save_target(folder / "target"), write_corpus(folder / "chats.jsonl", 24)


@pytest.fixture(scope="module")
def whole(source, tmp_path_factory):
    """The output and the record of a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("whole") / "a.jsonl"
    answered(source[1], out, target=str(source[0]), **SAMPLED)
    return out


def both(out: Path) -> tuple[bytes, bytes]:
    return out.read_bytes(), out.with_name(f"{out.name}.sampling").read_bytes()


class Killed(BaseException):
    """As sudden as a kill, at a moment that the test chooses."""


def stop_after(monkeypatch, answers: int) -> list[str]:
    """Interrupt after this many answers, in the middle of a batch; return the names of all."""
    seen: list[str] = []
    keep = padded_batches.keep_answer

    def counted(target, question, *rest):
        if len(seen) == answers:
            raise Killed
        seen.append(f"{question.conversation.id}:{question.turn}")
        keep(target, question, *rest)

    monkeypatch.setattr(padded_batches, "keep_answer", counted)
    return seen


@pytest.mark.parametrize("answers", [7, 31])
def test_an_interrupted_run_ends_in_the_same_bytes(source, whole, tmp_path, monkeypatch, answers):
    out = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        first = stop_after(patch, answers)
        with pytest.raises(Killed):
            answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert not out.exists() and journal_path(out).exists()
    second = stop_after(monkeypatch, 1000)
    answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert both(out) == both(whole) and not journal_path(out).exists()
    assert not set(first) & set(second) and len(first) + len(second) == 32


def test_kills_at_any_moment_end_in_the_same_bytes(source, whole, tmp_path):
    """SIGKILL in a process of its own, as soon as the journal has grown a little further."""
    out = tmp_path / "a.jsonl"
    given = config(source[1], out, target=str(source[0]), **SAMPLED)
    kills = 0
    for kept in (2_000, 4_000, 6_000, 1 << 40):
        process = start(as_flags(given), tmp_path / "log")
        while process.exitcode is None and not (
            journal_path(out).exists() and journal_path(out).stat().st_size > kept
        ):
            time.sleep(0.001)
        if process.exitcode is None:
            process.kill()
            kills += 1
        process.join()
    assert process.exitcode == 0, (tmp_path / "log").read_text()
    assert kills == 3 and both(out) == both(whole)


def start(words: list[str], log: Path) -> mp.Process:
    """Start the command in a forked process: without imports, kills hit the work itself."""

    def work() -> None:
        torch.set_num_threads(1)
        out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os._exit(main(["regenerate", *words]))

    process = mp.get_context("fork").Process(target=work)
    process.start()
    return process


def test_a_kill_between_the_files_at_the_end(source, whole, tmp_path, monkeypatch):
    out = tmp_path / "a.jsonl"

    def killed(*_):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("spec_data.regeneration.assembly.write_atomically", killed)
        with pytest.raises(Killed):
            answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert out.exists() and journal_path(out).exists()
    answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert both(out) == both(whole) and not journal_path(out).exists()


def test_a_complete_output_is_not_made_again(source, whole, tmp_path, monkeypatch, caplog):
    before = both(whole)
    monkeypatch.setattr("spec_data.regeneration.local_answers.load_model", None)
    with caplog.at_level("INFO"):
        record = answered(source[1], whole, target=str(source[0]), **SAMPLED)
    assert "is complete already" in caplog.text and both(whole) == before
    assert record["counts"]["written"] == 24


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"temperature": 0.5}, r"temperature: 1\.0 -> 0\.5"),
        ({"turns": "last"}, r"turns: 'all' -> 'last'"),
        ({"max_new_tokens": 7}, "max_new_tokens: 6 -> 7"),
        ({"chat_template_kwargs": '{"add_generation_prompt_x": 1}'}, "does not read"),
        ({"seed": 4}, "seed: 3 -> 4"),
        ({"dtype": "float32"}, "dtype: 'auto' -> 'float32'"),
    ],
)
def test_other_settings_are_refused_by_name(source, whole, tmp_path, changes, field):
    with pytest.raises(ConfigError, match=field):
        answered(source[1], whole, target=str(source[0]), **SAMPLED | changes)
    out = tmp_path / "a.jsonl"
    with Journal(journal_path(out), {"temperature": 1.0}), pytest.raises(ConfigError):
        answered(source[1], out, target=str(source[0]), **SAMPLED | changes)


def test_a_changed_corpus_is_refused_when_complete_and_continued_before(
    source, whole, tmp_path, monkeypatch
):
    corpus = write_corpus(tmp_path / "chats.jsonl", 12)
    out = tmp_path / "a.jsonl"
    answered(corpus, out, target=str(source[0]))
    write_corpus(corpus, 13)
    with pytest.raises(ConfigError, match="answers to another corpus"):
        answered(corpus, out, target=str(source[0]))
    out.unlink()
    with monkeypatch.context() as patch:
        first = stop_after(patch, 9)
        with pytest.raises(Killed):
            answered(corpus, out, target=str(source[0]))
    corpus.write_text("".join(reversed(corpus.read_text().splitlines(keepends=True))))
    second = stop_after(monkeypatch, 1000)
    record = answered(corpus, out, target=str(source[0]))
    assert not set(first) & set(second) and record["counts"]["written"] == 13
    assert [r["messages"][0]["content"] for r in rows(out)] == [
        f"question {i}" for i in reversed(range(13))
    ]


def test_a_corpus_that_changes_between_the_passes_loses_nothing(source, tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "chats.jsonl", 5)
    out = tmp_path / "a.jsonl"

    def grow(*_):
        write_corpus(corpus, 6)
        return {}

    with monkeypatch.context() as patch:
        patch.setattr("spec_data.regeneration.assembly.temporary_name", lambda p: grow() or p)
        with pytest.raises(CorpusError, match="The corpus changed meanwhile"):
            answered(corpus, out, target=str(source[0]))
    assert answered(corpus, out, target=str(source[0]))["counts"]["written"] == 6


def test_an_output_of_others_and_one_of_another_process_are_left_alone(source, tmp_path):
    out = tmp_path / "a.jsonl"
    out.write_text("mine\n")
    with pytest.raises(ConfigError, match="`regenerate` did not write it"):
        answered(source[1], out, target=str(source[0]))
    assert out.read_text() == "mine\n"
    with (
        FileLock(tmp_path / ".b.jsonl.lock"),
        pytest.raises(RunError, match="another process is writing"),
    ):
        answered(source[1], tmp_path / "b.jsonl", target=str(source[0]))


# --- the journal ---


def test_a_torn_last_line_is_cut_off(tmp_path):
    file = tmp_path / "j"
    with Journal(file, {"a": (1, 2)}) as journal:
        journal.add(NAME, 0, FIRST)
        journal.add(NAME, 1, FIRST)
    data = file.read_bytes()
    lines = data.splitlines(keepends=True)
    for length in range(len(lines[0]) + len(lines[1]), len(data)):
        file.write_bytes(data[:length])
        with Journal(file, {"a": (1, 2)}) as journal:
            assert journal.read(NAME) == [FIRST]
            journal.add(NAME, 1, FIRST)
        assert file.read_bytes() == data
    file.write_bytes(lines[0][:9])  # killed while the header was written
    with Journal(file, {"a": (1, 2)}) as journal:
        assert journal.count(NAME) == 0


@pytest.mark.parametrize("line", ["{", "[]", '{"id": "zz"}', '{"id": 3, "turn": 0}'])
def test_a_damaged_line_is_named(tmp_path, line):
    file = tmp_path / "j"
    with Journal(file, {}) as journal:
        journal.add(NAME, 0, FIRST)
    lines = file.read_text().splitlines()
    file.write_text("\n".join([lines[0], line, lines[1], ""]))
    with pytest.raises(DatasetError, match=r"j:2: damaged"):
        Journal(file, {})


def test_turns_are_answered_in_order(tmp_path):
    with Journal(tmp_path / "j", {}) as journal:
        with pytest.raises(ValueError, match="turn 1 after 0 answers"):
            journal.add(NAME, 1, FIRST)
        journal.add(NAME, 0, FIRST)
        with pytest.raises(ValueError, match="turn 0 after 1 answers"):
            journal.add(NAME, 0, FIRST)


def test_a_full_disk_keeps_the_answers_before_it(tmp_path, monkeypatch):
    file = tmp_path / "j"

    class Full:
        """A file that takes a few bytes of the next write and then has no room."""

        def __init__(self, real):
            self.real, self.left = real, 10

        def write(self, data):
            if self.left:
                taken, self.left = self.left, 0
                return self.real.write(data[:taken])
            raise OSError(errno.ENOSPC, "no space")

        def __getattr__(self, name):
            return getattr(self.real, name)

    journal = Journal(file, {})
    journal.add(NAME, 0, FIRST)
    journal.flush()
    journal._file = Full(journal._file)
    journal.add(NAME, 1, FIRST)
    with pytest.raises(RunError, match="the disk is full"):
        journal.flush()
    journal.__exit__(None, None, None)
    with Journal(file, {}) as again:
        assert again.read(NAME) == [FIRST]


def test_a_full_disk_at_the_end_leaves_no_half_output(source, whole, tmp_path, monkeypatch):
    out = tmp_path / "a.jsonl"

    def full(*_):
        raise OSError(errno.ENOSPC, "no space")

    with monkeypatch.context() as patch:
        patch.setattr("spec_data.regeneration.assembly.os", SimpleNamespace(fsync=full))
        with pytest.raises(RunError, match="the disk is full"):
            answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".a.jsonl.lock", "a.jsonl.journal"]
    answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert both(out) == both(whole)
