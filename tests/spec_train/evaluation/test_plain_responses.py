"""Responses of the target alone are decoded once, and never come from another target or setting."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.shards.errors import RunError
from spec_data.shards.files import cache_directory
from spec_train.evaluation import on_target
from spec_train.evaluation.on_target import PlainResponses
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, config_of, run_eval

target, prompts, trained, workplace = tools.target, tools.prompts, tools.trained, tools.workplace


@pytest.fixture(autouse=True)
def cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(on_target, "TIMED_PAIRS", 1)


def kept_file() -> Path:
    (file,) = cache_directory("plain-responses").iterdir()
    return file


def test_a_second_evaluation_decodes_only_the_timed_pairs(workplace, monkeypatch):
    first = run_eval(config_of(workplace, limit=4))
    calls = []
    honest = on_target.decode_plain
    monkeypatch.setattr(on_target, "decode_plain", lambda *a: calls.append(a) or honest(*a))
    second = run_eval(config_of(workplace, limit=4))
    assert (first["timed_pairs"], first["plain_responses_kept"]) == (4, 0)
    assert (second["timed_pairs"], second["plain_responses_kept"]) == (1, 3)
    assert len(calls) == 2  # the warm-up and one pair
    for name in ("accept_rate", "identical", "rounds", "tokens"):
        assert first[name] == second[name], name
    # the planted failure: a kept response that is not the target's fails the comparison
    timed, *others = kept = json.loads(kept_file().read_text())
    wrong = {key: [(t + 1) % VOCAB for t in kept[key]] for key in others}
    kept_file().write_text(json.dumps({timed: kept[timed], **wrong}))
    with pytest.raises(RunError, match="3 of 4 responses"):
        run_eval(config_of(workplace, limit=4))


def test_sampling_keeps_and_uses_nothing(workplace):
    report = run_eval(config_of(workplace, limit=3, temperature=1.0))
    assert (report["timed_pairs"], report["plain_responses_kept"]) == (1, 0)
    assert report["responses"] == 3 and not cache_directory("plain-responses").exists()


def test_damaged_files_are_ignored_and_written_again(workplace):
    run_eval(config_of(workplace, limit=2))
    whole = kept_file().read_bytes()
    for damage in (b"{", b"3"):
        kept_file().write_bytes(damage)
        assert run_eval(config_of(workplace, limit=2))["plain_responses_kept"] == 0
        assert kept_file().read_bytes() == whole


def test_other_settings_have_other_files(target):
    def file(**changes: Any) -> Path:
        arguments = {"identity": {"weights_hash": "a"}, "limit": 8, "stop": {2}} | changes
        return PlainResponses.of(target, **arguments).file

    others = [file(identity={"weights_hash": "b"}), file(limit=9), file(stop={2, 3})]
    target.to(torch.bfloat16)
    others.append(file())
    target.float()
    assert len({file(), file(), *others}) == 5


def test_a_device_that_does_not_repeat_itself_loses_what_was_kept(tmp_path):
    known = PlainResponses(tmp_path / "none.json")
    known.keep([1, 2], 8, [3])
    known.keep([1, 4], 8, [5])
    assert known.find([1, 2], 8) == [3] and known.find([1, 2], 7) is None
    known.keep([1, 2], 8, [4])
    assert known.find([1, 4], 8) is None and known.find([1, 2], 8) == [4]


def test_where_the_cache_is(monkeypatch, tmp_path):
    for name in ("SPEC_DATA_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_directory("remote") == tmp_path / ".cache/spec-data/remote"
    for name in ("XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
        assert cache_directory("remote") == tmp_path / name / "spec-data/remote"
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "own"))
    assert cache_directory("remote") == tmp_path / "own" / "remote"
