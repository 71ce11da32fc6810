"""Longrope targets: one set of factors for every document, and the switch that chooses it."""

import json
import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_data.verification.run import examine
from tests.spec_data.runs import run, save_target, write_corpus

LIMIT = 128  # positions of the short factors


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = save_target(tmp_path_factory.mktemp("longrope") / "target", "phi3-longrope")
    config = json.loads((path / "config.json").read_text())
    config["original_max_position_embeddings"] = LIMIT  # Phi-3 has it twice
    config["rope_parameters"]["original_max_position_embeddings"] = LIMIT
    (path / "config.json").write_text(json.dumps(config))
    return path


def states(target, ids, factors: str) -> torch.Tensor:
    """Layer 4 of a plain forward of a model whose two sets of factors are both `factors`."""
    config = AutoConfig.from_pretrained(target)
    wanted = config.rope_parameters[f"{factors}_factor"]
    config.rope_parameters |= {"short_factor": wanted, "long_factor": wanted}
    model = AutoModelForCausalLM.from_pretrained(target, config=config).eval()
    with torch.no_grad():
        return model(ids[None].long(), output_hidden_states=True).hidden_states[5][0]


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compare states of bfloat16, [T, H]."""
    return float((a.float() - b.float()).norm() / b.float().norm()) < 5e-3


@pytest.mark.parametrize("choice", ["auto", "long"])
def test_every_document_has_the_chosen_factors(choice, target, tmp_path, caplog):
    corpus = write_corpus(tmp_path / "c.jsonl", 6)
    with caplog.at_level(logging.INFO):
        manifest = run(target, corpus, tmp_path / "data", rope_factors=choice)
    used, other = ("long", "short") if choice == "long" else ("short", "long")
    assert manifest.target.rope_factors == used
    assert "Engines such as vLLM use the long ones for every prompt" in caplog.text
    assert ("warning[longrope]" in caplog.text) == (choice == "long")
    for row in HiddenStatesDataset(tmp_path / "data"):
        assert len(row["input_ids"]) < LIMIT
        assert close(row["hidden.L4"], states(target, row["input_ids"], used))
        assert not close(row["hidden.L4"], states(target, row["input_ids"], other))
    assert not examine(data=str(tmp_path / "data"), target=str(target)).failures


def test_a_long_document_decides_for_all_and_batches_decide_nothing(target, tmp_path, caplog):
    corpus = write_corpus(tmp_path / "c.jsonl", 5)
    long = {"role": "user", "content": "hello there " * 80}
    answer = {"role": "assistant", "content": "no"}
    with corpus.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"messages": [long, answer]}) + "\n")
    manifest = run(target, corpus, tmp_path / "data", packing="rows")
    assert "warning[packing]" not in caplog.text  # it was asked for
    assert manifest.target.rope_factors == "long"
    dataset = HiddenStatesDataset(tmp_path / "data")
    assert max(dataset.lengths) > LIMIT
    for row in dataset:
        assert close(row["hidden.L4"], states(target, row["input_ids"], "long"))


def test_the_choice_is_a_setting_and_needs_longrope(target, tmp_path):
    corpus = write_corpus(tmp_path / "c.jsonl", 4)
    run(target, corpus, tmp_path / "data", rope_factors="long")
    with pytest.raises(ConfigError, match="rope_factors"):
        run(target, corpus, tmp_path / "data", rope_factors="short")
    llama = save_target(tmp_path / "llama")
    with pytest.raises(ConfigError, match="no longrope; leave the option out"):
        run(llama, corpus, tmp_path / "other", rope_factors="long")
