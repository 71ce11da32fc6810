"""Which drafts can be fitted is known before a capture; what no draft can use is refused."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from spec_data.cli import main
from spec_data.generation.plan import Plan
from spec_data.models import families
from spec_data.shards.errors import TargetError
from spec_data.shards.layer_ids import RECIPES
from spec_data.shards.schema import data_problem
from spec_train.drafts import DRAFTS
from tests.spec_data.runs import estimate_with, flags, options, run, save_target, write_corpus

ALL = ", ".join(RECIPES)
OTHERS = ALL.removeprefix("eagle, ")


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A Llama, a Mamba and a corpus."""
    folder = tmp_path_factory.mktemp("fitting")
    save_target(folder / "llama")
    save_target(folder / "mamba", "mamba")
    write_corpus(folder / "chats.jsonl", 6)
    return folder


def estimated(place: Path, target: str = "llama", **changes: Any) -> Any:
    """An estimate of a dataset of a target."""
    given = options(place / target, place / "chats.jsonl", place / "never", **changes)
    return estimate_with(**given)


def test_the_drafts_of_both_programs_are_the_same() -> None:
    assert set(RECIPES) == set(DRAFTS) - {"mtp"}  # any capture serves, of a target that has one


def test_what_an_option_rules_out_is_named(place: Path, caplog) -> None:
    with caplog.at_level(logging.INFO):
        found = estimated(place, final="supervised")
    lines = found.text.splitlines()
    assert lines[1].startswith(f"  {OTHERS} (")
    assert lines[2].startswith("  not eagle: ")
    assert f"drafts: {OTHERS} (" in caplog.text
    assert estimated(place).facts()["fitting"] == dict.fromkeys(RECIPES)
    assert found.facts()["fitting"]["eagle"] == data_problem("eagle", "final-hidden", "supervised")


def test_the_summary_names_drafts_whose_own_layers_are_captured(place: Path) -> None:
    blocks = "dspark, dflash, dflash2, domino, lilicorr, xpress"
    deep = shutil.copytree(place / "llama", place / "deep")
    config = json.loads((deep / "config.json").read_text())
    (deep / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 8}))
    for drafts, own, others in (
        (None, "eagle, eagle3, peagle", blocks),
        ("dspark", f"eagle, {blocks}", "eagle3, peagle"),
        ("eagle3,dspark", ALL, ""),
    ):
        found = estimated(place, "deep", layers="auto", for_=drafts)
        text = " ".join(str(found).split())
        assert f"; for {own}" in text and found.own_layers == tuple(own.split(", "))
        assert (f"; possible, not their recipe: {others}" in text) == bool(others)
    found = estimated(place, "deep", layers="auto", final="supervised")
    assert found.own_layers == ("eagle3", "peagle")


@pytest.mark.parametrize("command", ["estimate", "generate"])
def test_what_no_draft_can_use_is_refused_before_the_corpus_is_read(
    place: Path, command: str, tmp_path: Path, capsys
) -> None:
    given = options(place / "mamba", place / "chats.jsonl", tmp_path / "out", layers="spread:3")
    arguments = [command, *flags(given)]
    assert main(arguments) != 0
    text = capsys.readouterr().err
    assert "no draft of spec-train can be fitted" in text and "--layers IDS" in text
    assert f"not {ALL}: the target's config.json has no num_attention_heads" in text
    assert "render" not in text and not (tmp_path / "out").exists()
    if command == "estimate":
        arguments[arguments.index("spread:3")] = "0,2,4"
        assert main([*arguments, "--verbose"]) == 0
        text = capsys.readouterr().err
        assert "warning[no-draft]: no draft of spec-train can be fitted" in text
        assert "\n  none (MambaForCausalLM is not registered" in text


def test_a_target_without_rope_that_cannot_be_packed_is_named(tmp_path: Path, caplog) -> None:
    """Its recurrent blocks see across documents, and its attention has no positions."""
    save_target(tmp_path / "jamba", "jamba")
    corpus = write_corpus(tmp_path / "c.jsonl", 4)
    manifest = run(tmp_path / "jamba", corpus, tmp_path / "data", layers="0,1")
    assert manifest.packing.form == "rows"
    assert "warning[packing]: one document per row" in caplog.text
    assert "warning[positions]: positions: not found in the target" in caplog.text
    caplog.clear()
    run(tmp_path / "jamba", corpus, tmp_path / "asked", layers="0,1", packing="rows")
    assert "warning[packing]" not in caplog.text


@pytest.mark.parametrize("documents", ["one", "long"])
def test_documents_that_can_share_no_row_are_no_warning(
    documents: str, tmp_path: Path, caplog, monkeypatch
) -> None:
    """There is nothing to keep apart, so nothing is slower and no proof is missing."""
    save_target(tmp_path / "llama", "llama")
    corpus = write_corpus(tmp_path / "c.jsonl", 1 if documents == "one" else 4)
    monkeypatch.setattr(Plan, "pack_length", property(lambda plan: int(min(plan.lengths))))
    with caplog.at_level("INFO"):
        manifest = run(tmp_path / "llama", corpus, tmp_path / "data", layers="0,1")
    assert manifest.packing.form == "rows"
    assert "warning[packing]" not in caplog.text
    assert "packing: rows; no two documents fit into one row" in caplog.text


def test_an_unregistered_family_is_named_and_derived(place: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.delitem(families.TARGETS, "LlamaForCausalLM")
    assert f"{ALL} (LlamaForCausalLM is not registered: its shape is" in estimated(place).text
    manifest = run(place / "llama", place / "chats.jsonl", tmp_path / "data")
    assert manifest.positions.proven


def test_an_unregistered_family_that_is_not_proven_is_refused_before_the_first_shard(
    place: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.delitem(families.TARGETS, "LlamaForCausalLM")
    forward = LlamaRotaryEmbedding.forward

    def faster(self: Any, x: Any, position_ids: Any) -> Any:
        return forward(self, x, position_ids * 2)

    monkeypatch.setattr(LlamaRotaryEmbedding, "forward", faster)
    where = (place / "llama", place / "chats.jsonl", tmp_path / "data")
    with pytest.raises(TargetError, match=r"LlamaForCausalLM is not registered, and .* not proven"):
        run(*where, layers="spread:3")
    assert not list((tmp_path / "data").glob("shards/*.arrow"))
    with pytest.raises(TargetError, match="not proven"):
        estimated(place, probe=True, layers="spread:3")
    manifest = run(*where)  # layers that are named
    found = manifest.positions
    assert not found.proven and "differ by" in found.reason and not found.tables
