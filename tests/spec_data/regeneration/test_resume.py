"""Killed, resumed, damaged, full: nothing is lost, nothing is answered twice."""

import errno
import os
import resource
import shutil
import signal
import time
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
from filelock import FileLock

from spec_data.cli import main
from spec_data.regeneration import local
from spec_data.regeneration.conversations import Answer
from spec_data.regeneration.journal import Journal, journal_path
from spec_data.shards.errors import ConfigError, CorpusError, DatasetError, FileError, RunError
from spec_data.shards.files import atomic_write
from spec_data.terminal.progress import progress
from tests.forked import Forked
from tests.spec_data.regeneration.tools import answered, rows, words
from tests.spec_data.runs import write_corpus

SAMPLED = {"temperature": 1.0, "seed": 3}
FIRST = Answer(message={"content": "a"}, finish="stop", tokens=2, prompt_tokens=5)
NAME = "00" * 16


@pytest.fixture(scope="module")
def source(target, tmp_path_factory):
    return target, write_corpus(tmp_path_factory.mktemp("source") / "chats.jsonl", 24)


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


JOURNAL = partial(Journal, settings={}, bar=progress(desc="test", disable=True))


def stop_after(monkeypatch, batches: int) -> list[str]:
    """Interrupt after this many batches, while the next is answered; return the answered turns."""
    answered: list[str] = []
    seen, add, answer = [], Journal.add, local.LocalBackend._answer

    def counted(self, answers):
        answers = list(answers)
        add(self, answers)
        seen.append(0)
        answered.extend(f"{name}:{turn}" for name, turn, _ in answers)

    def killed(self, *given):
        if len(seen) == batches:
            raise Killed
        return answer(self, *given)

    monkeypatch.setattr(Journal, "add", counted)
    monkeypatch.setattr(local.LocalBackend, "_answer", killed)
    return answered


def test_an_interrupted_run_ends_in_the_same_bytes(source, whole, tmp_path, monkeypatch):
    out = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch:
        first = stop_after(patch, 5)
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
    line = words(source[1], out, target=str(source[0]), **SAMPLED)
    log, kills = out.with_name("a.jsonl.journal-wal"), 0
    for pages in (6, 1, 1, 1 << 40):
        before = log.stat().st_size if log.exists() else 0
        process = Forked(lambda: main(line))
        while process.poll() is None and not (
            log.exists() and log.stat().st_size > before + pages * 4096
        ):
            time.sleep(0.001)
        if process.poll() is None:
            process.kill()
            kills += 1
        process.wait()
    assert process.returncode == 0, process.communicate()
    assert kills == 3 and both(out) == both(whole)


@pytest.mark.parametrize(
    ("place", "error", "refused", "left"),
    [
        ("regeneration.run.write_atomically", Killed(), Killed, {"a.jsonl", "a.jsonl.journal"}),
        ("shards.files.os.fsync", OSError(errno.ENOSPC, ""), RunError, {"a.jsonl.journal"}),
    ],
    ids=["a kill between the files", "a full disk"],
)
def test_a_stop_at_the_end_leaves_no_half_output(
    source, whole, tmp_path, monkeypatch, place, error, refused, left
):
    out = tmp_path / "a.jsonl"
    with monkeypatch.context() as patch, pytest.raises(refused, match=r"^$|the disk is full"):
        patch.setattr(f"spec_data.{place}", Mock(side_effect=error))
        answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert {p.name for p in tmp_path.iterdir()} - {".a.jsonl.lock"} == left
    answered(source[1], out, target=str(source[0]), **SAMPLED)
    assert both(out) == both(whole) and not journal_path(out).exists()


def test_a_complete_output_is_not_made_again(source, whole, tmp_path, monkeypatch, caplog):
    before = both(whole)
    monkeypatch.setattr("spec_data.regeneration.local.load_model", None)
    with caplog.at_level("INFO"):
        record = answered(source[1], whole, target=str(source[0]), **SAMPLED)
    assert "is complete already" in caplog.text and both(whole) == before
    assert record["counts"]["written"] == 24
    cut = Path(shutil.copy(whole, tmp_path))
    shutil.copy(f"{whole}.sampling", tmp_path)
    cut.write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[:-1]))
    with pytest.raises(ConfigError, match="has changed since it was written"):
        answered(source[1], cut, target=str(source[0]), **SAMPLED)


def test_other_settings_are_refused_by_name(source, whole, tmp_path):
    with JOURNAL(journal_path(tmp_path / "a.jsonl"), settings={"temperature": 1.0}):
        pass
    for changes, field in (
        ({"temperature": 0.5}, r"temperature: 1\.0 -> 0\.5"),
        ({"turns": "last", "seed": 4}, r"seed: 3 -> 4(.|\n)*turns: 'all' -> 'last'"),
        ({"chat_template_kwargs": {"add_generation_prompt_x": 1}}, "does not read"),
        ({"dtype": "float32"}, "dtype: 'auto' -> 'float32'"),
    ):
        with pytest.raises(ConfigError, match=field):
            answered(source[1], whole, target=str(source[0]), **SAMPLED | changes)
        with pytest.raises(ConfigError):
            answered(source[1], tmp_path / "a.jsonl", target=str(source[0]), **SAMPLED | changes)


@pytest.mark.usefixtures("as_text")
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
        first = stop_after(patch, 3)
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

    def grow(path):
        write_corpus(corpus, 6)
        return atomic_write(path)

    with monkeypatch.context() as patch:
        patch.setattr("spec_data.regeneration.run.atomic_write", grow)
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


@pytest.mark.parametrize(
    ("damage", "at"),
    [
        (b"not a journal\n", 0),
        (b"\xff", 3 * 4096),  # of a page
        (b"\xff", b"finish"),  # of an answer
        (b"8", NAME.encode()),  # an answer is another conversation's
        (b"[", b"{}"),  # the settings
        (None, 9 * 4096),  # cut here
    ],
)
def test_a_damaged_journal_is_refused(tmp_path, damage, at):
    file = tmp_path / "j"
    with JOURNAL(file) as journal:
        journal.add((NAME, turn, FIRST) for turn in range(200))
    data = bytearray(file.read_bytes())
    at = data.index(at) if isinstance(at, bytes) else at
    data[at : len(data) if damage is None else at + len(damage)] = damage or b""
    file.write_bytes(data)
    with pytest.raises(DatasetError, match="j: damaged"), JOURNAL(file) as journal:
        journal.add((NAME, turn, FIRST) for turn in range(len(journal.read(NAME)), 200))


def test_a_full_disk_keeps_the_answers_before_it(tmp_path):
    file = tmp_path / "j"

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with JOURNAL(file) as journal:
            journal.add([(NAME, 0, FIRST)])
            resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
            try:
                journal.add((NAME, turn, FIRST) for turn in range(1, 2000))
            except FileError as error:
                os._exit(7 if "cannot be written" in str(error) else 8)
        os._exit(9)

    assert Forked(work).wait() == 7
    with JOURNAL(file) as again:
        assert again.read(NAME) == [FIRST]
