"""A run directory holds complete checkpoints and one best draft, after any crash."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from spec_data.shards.errors import ConfigError, MissingError, RunError
from spec_train.training import run_directory
from spec_train.training.run_directory import (
    RunDirectory,
    checkpoint_name,
    chosen_draft_dir,
    held_out_file,
    resolve_draft_dir,
)
from tests.spec_data.shards.integrity_tools import flip


def save_draft_of(value: float):
    def save(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        run_directory.save_file({"w": torch.full((64,), value)}, folder / "model.safetensors")

    return save


def save(run: RunDirectory, step: int) -> Path:
    tensors = {"master.w": torch.full((64,), float(step)), "rng.cpu": torch.get_rng_state()}
    return run.save(step, save_draft_of(step), tensors, {"tokens": 10 * step, "best": None})


@pytest.fixture
def run(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    directory.record({"lr": 0.1}, lambda: 12)
    yield directory
    directory.close()


def reopen(run: RunDirectory) -> RunDirectory:
    """Open the run as the next process would (the fixture closes the same object)."""
    run.close()
    run.__init__(run.path, run.keep)
    return run


class Killed(BaseException):
    pass


def boom(*args, **kwargs):
    raise Killed


@pytest.mark.parametrize("where", ["save_file", "sha256_file", "fsync", "replace", "_link"])
def test_a_kill_while_saving_leaves_the_previous_state(run, where, monkeypatch):
    save(run, 1)
    run.save_best(1, save_draft_of(1), {"acceptance_length": 2.0}, {})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        owners = {"fsync": os, "replace": Path, "_link": RunDirectory}
        patch.setattr(owners.get(where, run_directory), where, boom)
        save(run, 2)
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDirectory, "_link", boom)
        run.save_best(2, save_draft_of(2), {"acceptance_length": 3.0}, {})
    draft = resolve_draft_dir(run.path)
    assert json.loads((draft / "validation.json").read_text())["step"] == 1
    again = reopen(run)
    # once the directory has its final name it counts, even if `last` was not moved yet
    assert again.load_newest().step == (2 if where == "_link" else 1)
    assert not list(run.path.glob(".*.tmp"))
    save(again, 2)
    assert again.load_newest().step == 2


def test_what_a_kill_after_the_rename_left_undone_is_done_when_it_resumes(run, monkeypatch):
    for step in (1, 2):
        save(run, step)
        run.save_best(step, save_draft_of(step), {"acceptance_length": 2.0}, {})
    for killed in (save, lambda run, step: run.save_best(step, save_draft_of(step), {}, {})):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(RunDirectory, "_link", boom)
            killed(run, 3)
    assert (run.path / "last").resolve().name == "checkpoint-00000002"
    assert len(list(run.path.glob("best-*"))) == 2
    assert reopen(run).load_newest().step == 3
    assert (run.path / "last").resolve().name == "checkpoint-00000003"
    assert len(list(run.path.glob("checkpoint-*"))) == run.keep
    assert [p.name for p in run.path.glob("best-*")] == ["best-00000002"]


def test_an_export_beside_the_best_draft_is_not_deleted(run):
    (run.path / "best-vllm").mkdir()
    for step in (1, 2):
        save(run, step)
        run.save_best(step, save_draft_of(step), {"acceptance_length": 2.0}, {})
    run.begin()
    assert [p.name for p in run.path.glob("best*")] == ["best-vllm"]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


DAMAGE = {
    "a digit": lambda c: edit(c / "training_state.json", '"tokens": 20', '"tokens": 26'),
    "state of another step": lambda c: shutil.copy(
        c.with_name("checkpoint-00000001") / "training_state.json", c
    ),
    "config of another step": lambda c: (c / "config.json").write_text('{"step": 1}'),
    "flipped tensor": lambda c: flip(c / "training_state.safetensors", -1),
    "flipped draft": lambda c: flip(c / "model.safetensors", -1),
    "truncated": lambda c: os.truncate(c / "training_state.safetensors", 100),
    "no state": lambda c: (c / "training_state.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_taken(run, damage, caplog):
    save(run, 1)
    DAMAGE[damage](save(run, 2))
    assert run.load_newest().step == 1
    assert "warning[damaged-checkpoint]" in caplog.text and "checkpoint-00000002" in caplog.text
    assert (run.path / "damaged-checkpoint-00000002").is_dir()
    save(run, 2)
    assert run.load_newest().step == 2
    assert (run.path / "last").resolve().name == "checkpoint-00000002"


def test_a_checkpoint_under_the_name_of_another_is_damaged(run, caplog):
    save(run, 1)
    save(run, 2)
    one, two = (run.path / f"checkpoint-0000000{i}" for i in (1, 2))
    one.rename(run.path / "aside")  # exchanged, as by a person who restores a backup
    two.rename(one)
    (run.path / "aside").rename(two)
    with pytest.raises(RunError, match="all checkpoints are damaged"):
        run.load_newest()
    assert "holds step 1, but its directory is called checkpoint-00000002" in caplog.text


def test_a_damaged_run_json_is_said_in_words(run):
    save(run, 1)
    edit(run.path / "run.json", '"lr": 0.1', '"lr": 0.3')
    with pytest.raises(RunError, match=r"run\.json: damaged or missing; restore it"):
        reopen(run).record({"lr": 0.1}, lambda: 12)


def test_no_whole_checkpoint_is_an_error_not_a_fresh_start(run):
    """Repeated attempts also keep the metrics and checkpoints."""
    run.append_metrics({"step": 1})
    run.save_best(1, save_draft_of(1), {"acceptance_length": 2.0}, {})
    DAMAGE["truncated"](save(run, 1))
    for _ in range(3):
        with pytest.raises(RunError, match=r"all checkpoints are damaged.*checkpoint-00000001"):
            run.load_newest()
        run = reopen(run)
    run.path.joinpath("damaged-checkpoint-00000001").rename(run.path / "checkpoint-00000001")
    with pytest.raises(RunError, match=r"all checkpoints are damaged.*checksum differs"):
        run.load_newest()
    save(run, 2)
    assert run.load_newest().step == 2


def full_disk(*args, **kwargs):
    raise run_directory.SafetensorError("I/O error: No space left on device (os error 28)")


def test_a_full_disk_is_said_in_words_and_leaves_nothing_behind(run, monkeypatch):
    save(run, 1)
    names = sorted(p.name for p in run.path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "save_file", full_disk)
        for attempt in (lambda: save(run, 2), lambda: run.save_best(2, save_draft_of(2), {}, {})):
            with pytest.raises(RunError, match=r"(checkpoint|best)-00000002: the disk is full"):
                attempt()
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "write_record", lambda *_: os.open("/proc/no/x", os.O_WRONLY))
        with pytest.raises(RunError, match=r"checkpoint-00000002: cannot be written"):
            save(run, 2)
    assert sorted(p.name for p in run.path.iterdir()) == names
    assert run.load_newest().step == 1


def test_files_of_a_checkpoint_have_the_mode_of_the_umask(run):
    """safetensors writes its files with mode 0600."""
    before = os.umask(0o027)
    try:
        folder = save(run, 1)
    finally:
        os.umask(before)
    assert {file.stat().st_mode & 0o777 for file in folder.iterdir()} == {0o640}


def test_best_can_be_replaced_again_and_again_even_by_the_same_step(run):
    for step in (10, 20, 20, 20, 10):
        run.save_best(step, save_draft_of(step), {"acceptance_length": 1.5}, {})
        assert len(list(run.path.glob("best-*"))) == 1
        assert json.loads((run.path / "best" / "validation.json").read_text())["step"] == step


def test_resolve_draft_dir(run):
    with pytest.raises(MissingError, match="neither a draft"):
        resolve_draft_dir(run.path)
    with pytest.raises(MissingError, match="nowhere: no such draft"):
        resolve_draft_dir(run.path / "nowhere")
    first, second = save(run, 1), save(run, 2)
    assert resolve_draft_dir(run.path).resolve() == second.resolve()
    run.save_best(1, save_draft_of(1), {}, {})
    assert resolve_draft_dir(run.path) == run.path / "best"
    assert resolve_draft_dir(first) == first
    assert resolve_draft_dir(run.path / "last") == run.path / "last"
    shutil.copytree(run.path, run.path.parent / "moved", symlinks=True)
    assert resolve_draft_dir(run.path.parent / "moved").name == "best"


def best_of(step: int) -> dict:
    return {"step": step, "loss": 1.0}


def test_a_best_draft_that_is_lost_or_of_another_run_is_named(run, tmp_path, caplog):
    """Before, `last` was taken without a word for a lost one, and a foreign one was taken."""
    run.save_best(1, save_draft_of(1), {"loss": 1.0}, {"samples": []})
    run.save(2, save_draft_of(2), {}, {"tokens": 1, "best": best_of(1)})
    assert chosen_draft_dir(run.path) == run.path / "best"
    aside = run.path / "aside"
    (run.path / "best").rename(aside)
    with pytest.raises(MissingError, match=r"missing, though the best draft .* was that of step 1"):
        chosen_draft_dir(run.path)
    assert chosen_draft_dir(run.path / "last") == run.path / "last"
    assert reopen(run).load_newest().state["best"] is None
    assert "warning[best]" in caplog.text and "it is missing" in caplog.text
    aside.rename(run.path / "best")

    other = RunDirectory(tmp_path / "other")
    other.record({"lr": 0.2}, lambda: 12)
    other.save_best(1, save_draft_of(5), {"loss": 0.5}, {})
    other.close()
    own = (run.path / "best").readlink()
    (run.path / "best").unlink()
    (run.path / "best").symlink_to(other.path / "best-00000001")
    with pytest.raises(MissingError, match=r"this is the draft of another run"):
        chosen_draft_dir(run.path)  # it lies in the other one, which knows it
    (run.path / "best").unlink()
    (run.path / "best").symlink_to(own)
    shutil.rmtree(run.path / "best-00000001")
    shutil.copytree(other.path / "best-00000001", run.path / "best-00000001")
    with pytest.raises(MissingError, match=r"this is the draft of another run"):
        chosen_draft_dir(run.path)
    caplog.clear()
    assert chosen_draft_dir(run.path / "best") == run.path / "best"
    assert "warning[best]" in caplog.text
    assert reopen(run).load_newest().state["best"] is None


def test_an_older_best_than_the_checkpoint_says_is_named_and_not_believed(run, caplog):
    """What an earlier release left where a write of `best` failed."""
    run.save_best(1, save_draft_of(1), {"loss": 2.0}, {})
    run.save(2, save_draft_of(2), {}, {"tokens": 1, "best": best_of(2)})
    assert chosen_draft_dir(run.path) == run.path / "best"
    assert "warning[best]" in caplog.text and "holds step 1" in caplog.text
    best = reopen(run).load_newest().state["best"]
    assert (best["step"], best["loss"]) == (1, 2.0)


@pytest.mark.parametrize("way", ["a checkpoint of the run", "without its figures"])
def test_a_best_draft_that_does_not_say_so_is_named(run, caplog, way):
    """Before, both were taken without a word."""
    run.save_best(1, save_draft_of(1), {"loss": 1.0}, {})
    run.save(2, save_draft_of(2), {}, {"tokens": 1, "best": best_of(1)})
    assert chosen_draft_dir(run.path) == run.path / "best" and not caplog.records
    if way == "without its figures":
        (run.path / "best" / "validation.json").unlink()
    else:
        (run.path / "best").unlink()
        (run.path / "best").symlink_to(checkpoint_name(2))
    assert chosen_draft_dir(run.path) == run.path / "best"
    (said,) = [r.getMessage() for r in caplog.records if "warning[best]" in r.getMessage()]
    assert "has no validation.json" in said and "step 1" in said


def test_held_out_figures_belong_to_the_best_draft(run, monkeypatch):
    """A kill before the link turns leaves the old draft with its own."""
    run.save_best(1, save_draft_of(1), {}, {"samples": [1]})
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(RunDirectory, "_link", boom)
        run.save_best(2, save_draft_of(2), {}, {"samples": [2]})
    assert json.loads(held_out_file(run.path).read_text())["samples"] == [1]
    run.save_best(3, save_draft_of(3), {}, {})
    assert held_out_file(run.path) is None and not list(run.path.glob("held-out*"))
    for step, known in ((2, False), (3, True)):  # of an earlier release
        (run.path / "held-out.json").write_text(json.dumps({"step": step}))
        assert (held_out_file(run.path) is not None) == known


def test_a_last_draft_of_another_run_is_not_that_of_this_one(run, tmp_path):
    """Nothing in a checkpoint says of which run it is; where it lies does."""
    run.save(1, save_draft_of(1), {}, {"tokens": 1, "best": None})
    (tmp_path / "same").symlink_to(run.path)
    assert resolve_draft_dir(tmp_path / "same") == tmp_path / "same" / "last"
    other = RunDirectory(tmp_path / "other")
    other.record({"lr": 0.2}, lambda: 12)
    elsewhere = other.save(1, save_draft_of(5), {}, {"tokens": 1, "best": None})
    other.close()
    (run.path / "last").unlink()
    (run.path / "last").symlink_to(elsewhere)
    with pytest.raises(MissingError, match="points out of this run"):
        resolve_draft_dir(run.path)


def test_held_out_figures_of_another_run_are_left_out(run, tmp_path, caplog):
    """Before, a report showed them as those of the draft of the same step."""
    run.save_best(1, save_draft_of(1), {}, {"samples": [1]})
    other = RunDirectory(tmp_path / "other")
    other.record({"lr": 0.2}, lambda: 12)
    other.save_best(1, save_draft_of(5), {}, {"samples": [5]})
    other.close()
    own = held_out_file(run.path)
    assert own is not None and not caplog.records
    shutil.copy(held_out_file(other.path), own)
    assert held_out_file(run.path) is None
    assert "warning[best]" in caplog.text and own.name in caplog.text


def test_a_run_without_links_stands_for_its_drafts_by_small_files(run, monkeypatch):
    def refused(*given, **options):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refused)
    for step in (1, 2, 3):
        run.save_best(step, save_draft_of(step), {}, {"samples": [step]})
        save(run, step)
    assert (run.path / "best").read_text() == "best-00000003\n"
    assert chosen_draft_dir(run.path).name == "best-00000003"
    assert chosen_draft_dir(run.path / "last").name == "checkpoint-00000003"
    assert json.loads(held_out_file(run.path).read_text())["samples"] == [3]
    assert reopen(run).load_newest().step == 3
    assert sorted(p.name for p in run.path.glob("best-*")) == ["best-00000003"]
    monkeypatch.undo()
    run.save_best(4, save_draft_of(4), {}, {})
    assert (run.path / "best").is_symlink() and chosen_draft_dir(run.path).name == "best"


def test_settings_may_change_until_something_was_learned(run):
    """For example after a first attempt with a mistyped option."""
    run.append_metrics({"step": 0})
    run.save_best(0, save_draft_of(0), {}, {})
    again = reopen(run)
    assert again.record({"lr": 0.2}, lambda: 9) == 9
    again.begin()
    left = {p.name for p in run.path.iterdir()}
    assert left == {"run.json", ".lock"}


def test_a_directory_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match="not empty and not a run"):
        RunDirectory(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(ConfigError, match="this is a file"):
        RunDirectory(tmp_path / "thesis.tex")


def test_two_processes_cannot_share_a_run(run):
    with pytest.raises(RunError, match="another spec-train fit"):
        RunDirectory(run.path)


def test_metrics_are_cut_back_to_a_step(run):
    for step in range(5):
        run.append_metrics({"step": step, "loss": float("nan") if step == 1 else 0.5})
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # killed in the middle of a line
    run.truncate_metrics(2)
    lines = [json.loads(x) for x in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [line["loss"] for line in lines] == [0.5, None, 0.5]
    with (run.path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 1, "loss\xff": 1}\n')  # not UTF-8
    run.truncate_metrics(-1)
    assert (run.path / "metrics.jsonl").read_text() == ""


def test_a_kill_before_the_first_file_was_whole_leaves_a_usable_directory(tmp_path):
    (tmp_path / ".run.json.0123456789ab.tmp").write_text("{")
    (tmp_path / ".checkpoint-00000001.0123456789ab.tmp").mkdir()
    RunDirectory(tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    (tmp_path / "notes.tmp").write_text("mine")
    with pytest.raises(ConfigError, match="not a run"):
        RunDirectory(tmp_path)


def test_the_best_step_is_said_on_a_disk_that_refuses_to_read(tmp_path):
    directory = RunDirectory(tmp_path / "run")
    best = directory.path / "best-00000012-again"
    best.mkdir()
    (best / "validation.json").mkdir()  # an OSError for every reader, root too
    (directory.path / "best").symlink_to(best.name)
    assert directory.on_disk().endswith("no checkpoint yet, `best` is of step 12")
