"""`eval --target A B`: one draft over several targets in one table."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import spec_train
from spec_data.shards.errors import ConfigError, RunError
from spec_train.cli import main
from spec_train.evaluation import on_target
from spec_train.evaluation.several_targets import against
from spec_train.simulation.intervals import compare
from tests.spec_train.evaluation import tools as evaluate_tools
from tests.spec_train.evaluation.tools import config_of, run_eval

target, prompts = evaluate_tools.target, evaluate_tools.prompts
trained, workplace = evaluate_tools.trained, evaluate_tools.workplace


@pytest.fixture
def tuned(workplace, tmp_path) -> Path:
    """A copy of the target whose embedding and last block have other weights."""
    folder = tmp_path / "tuned"
    shutil.copytree(workplace / "target", folder)
    weights = load_file(folder / "model.safetensors")
    torch.manual_seed(0)
    last = max(name for name in weights if "layers." in name).split("layers.")[1].split(".")[0]
    for name, value in weights.items():
        if (f"layers.{last}." in name or "embed" in name) and value.ndim == 2:
            weights[name] = value + 0.5 * value.std() * torch.randn_like(value)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_one_table_has_every_target_and_its_difference_from_the_first(
    workplace, tuned, tmp_path, capsys, caplog, monkeypatch
):
    monkeypatch.setattr(on_target, "TIMED_PAIRS", 1)
    options = config_of(workplace, limit=10, max_new_tokens=12)
    first, copy = options["target"], str(tmp_path / "copy")
    shutil.copytree(first, copy)
    words = [f"--{name.replace('_', '-')}={v}" for name, v in options.items() if name != "target"]
    file = tmp_path / "all.json"
    main(["eval", *words, "--target", first, "--target", copy, str(tuned), "--json", str(file)])
    report, shown = json.loads(file.read_text()), capsys.readouterr().out

    alone = [run_eval(options | {"target": place}) for place in (first, str(tuned))]
    lines = report["targets"]
    assert [line["target"] for line in lines] == [first, copy, str(tuned)]
    for line, one in ((lines[0], alone[0]), (lines[1], alone[0]), (lines[2], alone[1])):
        for name in ("acceptance_length", "rounds", "accept_rate", "identical", "responses"):
            assert line[name] == one[name], name
    # the file is one of the first target, with the others beside it
    assert report["acceptance_length"] == alone[0]["acceptance_length"]
    assert [one["target"] for one in report["others"]] == [copy, str(tuned)]

    counts = [
        {line["prompt"]: (line["rounds"], line["emitted"]) for line in one["per_prompt"]}
        for one in alone
    ]
    both = [prompt for prompt in counts[0] if prompt in counts[1]]
    paired = compare(*(np.array([some[prompt] for prompt in both]) for some in counts))
    assert lines[2]["against_first"] == {
        "difference": paired.difference,
        "interval": list(paired.interval),
        "p_value": paired.p_value,
        "prompts": len(both),
    }
    assert lines[1]["against_first"]["difference"] == 0 and "against_first" not in lines[0]
    assert paired.difference < 0
    for place in (first, copy, str(tuned)):
        assert place in "".join(shown.split()), "the table names it"
    assert f"{paired.difference:+.2f}" in shown and "+0.00" in shown
    # which target a warning is about
    assert any(
        text.startswith(f"{tuned}: the draft's embedding differs") for text in report["warnings"]
    )
    assert f"warning[eval]: {tuned}: " in caplog.text


def test_python_has_a_result_for_each_target(workplace, tuned):
    options = config_of(workplace, limit=2, max_new_tokens=4)
    found = spec_train.evaluate(**options | {"target": [options["target"], tuned]})
    assert found.decoding.target == options["target"]
    (other,) = found.others
    assert other.decoding.target == str(tuned) and not other.others
    alone = spec_train.evaluate(**options)
    assert alone.others == () and "targets" not in alone.figures
    assert "accepted by depth" in found.details()


def test_a_wrong_token_of_any_target_fails_and_is_named(workplace, tuned, monkeypatch):
    original = on_target.PairedDecoding._decode

    def wrong(self, request):
        made = original(self, request)
        if "tuned" in self.decoding.target:
            made.tokens[0] = (made.tokens[0] + 1) % 7
        return made

    monkeypatch.setattr(on_target.PairedDecoding, "_decode", wrong)
    options = config_of(workplace, limit=2, max_new_tokens=4)
    with pytest.raises(RunError, match=f"^{tuned}: greedy decoding with the draft differs"):
        spec_train.evaluate(**options | {"target": [options["target"], str(tuned)]})


def test_prompts_of_another_template_are_not_compared():
    one = {"per_prompt": [{"prompt": f"a{k}", "rounds": 3, "emitted": 6} for k in range(9)]}
    other = {"per_prompt": [{"prompt": f"b{k}", "rounds": 3, "emitted": 4} for k in range(9)]}
    assert against(one, other) is None
    assert against(one, one)["difference"] == 0


def test_a_server_has_one_target(workplace, tuned):
    options = config_of(workplace, server="http://127.0.0.1:1/v1")
    with pytest.raises(ConfigError, match="--server has one target"):
        spec_train.evaluate(**options | {"target": [options["target"], str(tuned)]})
