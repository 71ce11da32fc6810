"""verify --target names each fact in which the given target is not the captured one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from tests.spec_data.runs import ON_CPU, options, run, save_target, setup_of, write_corpus
from tests.spec_train import fitted
from tests.spec_train.fitted import edit, round_to_3_bits, switch_yarn_on

target = fitted.target


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    save_target(folder / "target", template="qwen3")
    lines = write_corpus(folder / "c.jsonl", 6).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows[:4]:
        row["chat_template_kwargs"] = {"enable_thinking": False}
    (folder / "c.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(folder / "target", folder / "c.jsonl", folder / "data")
    return folder


def verified(place: Path, target: Path):
    found = examine(data=str(place / "data"), target=str(target), samples=2, running=ON_CPU)
    (random,) = [w for w in found.warnings if "behaves like a random model" in w]  # and it is one
    found.warnings.remove(random)
    return found


def test_the_manifest_has_the_identity_and_the_kwargs_of_rows(place, target):
    identity = HiddenStatesDataset(place / "data").manifest.identity
    assert identity["rope.rope_type"] == "default"
    assert identity["tokenizer.pre_tokenizer"].startswith("Sequence ")
    assert identity["template_kwargs_used"] == {'{"enable_thinking": false}': 6, "{}": 2}
    found = verified(place, target)
    assert (found.failures, found.warnings) == ([], [])


def test_another_target_is_a_failure_that_names_the_fact(place, target):
    switch_yarn_on(target)
    round_to_3_bits(target)
    text = "\n".join(verified(place, target).failures)
    assert (
        "rope_type: the dataset was captured with 'default', this target has 'yarn'" in text
        and "factor: the dataset was captured with none, this target has 4.0" in text
        and "weights_hash: the dataset was captured with sha256:" in text
        and "config_hash" not in text
    )


def test_another_tokenizer_or_template_is_a_warning_that_names_the_fact(place, target):
    edit(target / "tokenizer.json", pre_tokenizer={"type": "WhitespaceSplit"})
    template = target / "chat_template.jinja"
    template.write_text("Once upon a time " + template.read_text())
    found = verified(place, target)
    assert found.failures == []
    template_line, tokenizer_line = found.warnings
    assert "chat_template_hash: the dataset was captured with" in template_line
    assert "tokenizer.pre_tokenizer: the dataset was captured with 'Sequence " in tokenizer_line
    assert "\nwarn" in str(found) and found.facts()["warnings"] == found.warnings


def test_other_code_that_comes_with_the_target_is_another_target(tmp_path, monkeypatch):
    """Its weights and its config.json are the same: a model is often mended in its code alone."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    path, data = save_target(tmp_path / "target"), tmp_path / "data"
    corpus = write_corpus(tmp_path / "c.jsonl", 6)
    code = path / "modeling_own.py"
    code.write_text(
        "from transformers import LlamaForCausalLM\n\nclass Own(LlamaForCausalLM):\n    pass\n"
    )
    edit(path / "config.json", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    run(path, corpus, data, trust_remote_code=True)
    running = replace(ON_CPU, trust_remote_code=True)
    assert not examine(data=str(data), target=str(path), samples=2, running=running).failures
    code.write_text(code.read_text().replace("pass", "scale = 2"))
    found = examine(data=str(data), target=str(path), samples=2, running=running)
    assert ["code_hash: the dataset was captured with" in line for line in found.failures] == [True]
    assert "the Python files that come with the model differ" in found.failures[0]
    with pytest.raises(ConfigError, match=r"target\.code_hash"):
        run(path, corpus, data, trust_remote_code=True)
    assert "code_hash" not in setup_of(**options(path, corpus, data)).identity  # it is not run
