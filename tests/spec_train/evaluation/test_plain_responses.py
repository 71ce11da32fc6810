"""Responses of the target alone are decoded once, and never come from another target or setting."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from spec_data.shards.files import cache_directory
from spec_train.evaluation import on_target
from spec_train.evaluation.plain_responses import KIND, PlainResponses
from tests.spec_train.evaluation import tools
from tests.spec_train.evaluation.tools import VOCAB, config_of, run_eval

target, prompts, trained, workplace = tools.target, tools.prompts, tools.trained, tools.workplace


@pytest.fixture(autouse=True)
def cache(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("SPEC_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(on_target, "TIMED_PAIRS", 1)


def kept_file() -> Path:
    (file,) = cache_directory(KIND).iterdir()
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


def test_kept_responses_that_are_not_the_targets_are_decoded_again(workplace):
    first = run_eval(config_of(workplace, limit=4))
    whole = json.loads(kept_file().read_text())
    wrong = {key: [(token + 1) % VOCAB for token in whole[key]] for key in whole}
    kept_file().write_text(json.dumps(wrong))
    second = run_eval(config_of(workplace, limit=4))
    assert second["different"] == [] and second["identical"] == first["identical"]
    assert json.loads(kept_file().read_text()) == whole


def test_sampling_keeps_and_uses_nothing(workplace):
    report = run_eval(config_of(workplace, limit=3, temperature=1.0))
    assert (report["timed_pairs"], report["plain_responses_kept"]) == (1, 0)
    assert report["responses"] == 3 and not cache_directory(KIND).exists()


@pytest.mark.parametrize("damage", [b"{", b"3", b'{"a": 3}', b'{"a": ["x"]}'])
def test_damaged_files_are_ignored_and_written_again(tmp_path, damage):
    (tmp_path / "a.json").write_bytes(damage)
    known = PlainResponses(tmp_path / "a.json")
    assert known.find([1], 8) is None
    known.keep([1], 8, [3])
    known.save()
    again = PlainResponses(tmp_path / "a.json")
    assert again.find([1], 8) == [3] and again.find([1], 7) is None and again.used == 1


def test_other_settings_have_other_files(target):
    def file(**changes: Any) -> Path | None:
        arguments = {"identity": {"weights_hash": "a"}, "stop": {2}} | changes
        return PlainResponses.of(target, **arguments).file

    others = [file(identity={"weights_hash": "b"}), file(stop={2, 3})]
    rounded = copy.deepcopy(target).to(torch.bfloat16)  # all tests share the target
    others.append(PlainResponses.of(rounded, identity={"weights_hash": "a"}, stop={2}).file)
    assert len({file(), file(), *others}) == 4
    assert file(identity={"weights_hash": None}) is None  # nothing is known of its weights


def test_a_device_that_does_not_repeat_itself_loses_what_was_kept(tmp_path):
    first = PlainResponses(tmp_path / "a.json")
    first.keep([1, 2], 8, [3])
    first.keep([1, 4], 8, [5])
    first.save()
    known = PlainResponses(tmp_path / "a.json")
    known.keep([1, 2], 8, [4])
    assert known.find([1, 4], 8) is None and known.find([1, 2], 8) == [4]
