"""What users do beyond the examples: ~, other folders, threads, lists, generators, sorting."""

import json
import os
import pickle
import shlex
import threading
from pathlib import Path

import pytest
import torch

import spec_data
import spec_train
from spec_data.shards.errors import BusyError, ConfigError
from spec_data.terminal.config import checked
from spec_train.cli import main
from spec_train.options.training import Training
from tests.factory import tiny_dataset
from tests.terminal_tools import next_command


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home directory with a dataset."""
    folder = tmp_path_factory.mktemp("home")
    tiny_dataset(folder / "data", n_docs=20)
    return folder


@pytest.fixture(autouse=True)
def at_home(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(tmp_path)


def smoke(out: str, **changes: object) -> Training:
    given = {"data": "~/data", "preset": "smoke", "seq_len": 64, "validation": 0.2, "steps": 3}
    return Training(**given | {"out": out} | changes)


def test_a_tilde_is_home_where_no_shell_expands_it(home, tmp_path) -> None:
    words = ["fit", "eagle3", "--data", "~/data", "--out=~/typed", "--seq-len", "64"]
    assert main([*words, "--preset", "smoke", "--validation", "0.2"]) == 0
    assert spec_train.fit(smoke("~/run")).finished
    draft = spec_train.load_draft("~/run")
    draft.save_pretrained("~/saved")
    assert spec_data.select("~/data", "~/view", where="length > 3").documents > 0
    assert {"typed", "typed.log", "run", "saved", "view"} <= {p.name for p in home.iterdir()}
    assert not list(tmp_path.iterdir())


def test_a_dry_run_that_a_file_asks_for_names_the_run_itself(tmp_path, capsys) -> None:
    lines = ["dry-run: true", "data: ~/data", "out: ~/dry", "preset: smoke", "seq-len: 64"]
    (tmp_path / "run.yaml").write_text("\n".join([*lines, "validation: 0.2"]))
    assert main(["fit", "eagle3", "--config", "run.yaml"]) == 0
    _, *following = next_command(capsys.readouterr().err)
    assert following[-1] == "--dry-run=false" and main(following) == 0
    assert Path("~/dry/best").expanduser().exists()


def test_fit_as_json_has_figures(capsys) -> None:
    words = "fit eagle3 --data ~/data --out ~/json --preset smoke --seq-len 64 --validation 0.2"
    assert main([*shlex.split(words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["finished"] and found["step"] == found["best"]["step"] == 10
    assert found["validation"]["loss"] == found["best"]["loss"] > 0


def test_a_second_run_in_a_process_is_refused_and_none_moves_the_callers_numbers() -> None:
    """Both would draw from torch's one generator."""
    errors: list[Exception] = []

    def fit(out: str) -> None:
        try:
            spec_train.fit(smoke(out, steps=20))
        except Exception as error:
            errors.append(error)

    before = torch.get_rng_state()
    threads = [threading.Thread(target=fit, args=(f"~/thread-{n}",)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in errors] == [BusyError]
    assert torch.equal(torch.get_rng_state(), before)


def test_paths_hold_in_another_folder(home, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(home)
    dataset = spec_data.open_dataset("data")
    result = spec_train.fit(smoke("there", data=Path("data")))
    lines = result.history
    monkeypatch.chdir(tmp_path)
    assert lines and result.history == lines
    assert len(pickle.loads(pickle.dumps(dataset))) == 20


def test_a_user_cannot_change_what_reading_relies_on() -> None:
    dataset = spec_data.open_dataset("~/data", columns=(name for name in ["input_ids"]))
    assert "input_ids" in dataset[0] and "loss_mask" not in dataset[0]
    for numbers in (dataset.lengths, dataset.supervised, dataset.first_supervised):
        with pytest.raises(ValueError, match="read-only"):
            numbers.sort()


def test_a_share_of_one_is_all_of_them() -> None:
    kept = {s: spec_data.select("~/data", f"~/sample-{s}", sample=s) for s in (0.1, 1.0, 5.0)}
    assert [view.documents for view in kept.values()] == [2, 20, 5]


def test_several_values_are_a_list_where_the_command_line_has_commas() -> None:
    assert (
        checked("prompts", [Path("a.jsonl"), "~/b"], str | None)
        == f"a.jsonl,{os.environ['HOME']}/b"
    )
    assert checked("draft_tokens", [1, 2], int | str) == "1,2"
    assert checked("layers", [1, 2], list[int] | str) == [1, 2]


def test_a_draft_that_is_no_run_and_the_data_it_learned(tmp_path, caplog) -> None:
    spec_train.fit(smoke("~/exported"))
    spec_train.load_draft("~/exported").save_pretrained("draft")
    spec_train.evaluate("draft", data="~/data")
    said = "warning[eval]: the draft was trained on this dataset, and only its run records"
    assert said in caplog.text
    caplog.clear()
    spec_train.evaluate("~/exported", data="~/data")
    assert "only its run records" not in caplog.text
    with pytest.raises(ConfigError, match=r"pass a draft in memory, load_draft\('draft'\)"):
        spec_train.simulate_acceptance("draft", "~/data")  # type: ignore[arg-type]
