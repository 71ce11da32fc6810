"""`generate --for`: the layers of several drafts in one dataset, and which of them `fit` reads."""

import json
import logging
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import spec_data
from spec_data.capture.model import Target
from spec_data.models.families import NOTES
from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.schema import Manifest
from spec_train.data.mixture import common_manifest
from tests.families import _COMMON
from tests.spec_data.corpus.templates import tokenizer
from tests.spec_data.runs import (
    estimate_with,
    generate_with,
    options,
    run,
    save_target,
    verify,
    write_corpus,
)
from tests.spec_train import flat
from tests.spec_train.drafts.mtp.targets import write_target
from tests.spec_train.fitted import edit

BLOCKS = 10
EAGLE3, BLOCK = (1, 4, 6), (1, 3, 4, 6, 8)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A target of ten blocks, and its data for three drafts, for eagle alone, and of --layers."""
    folder = tmp_path_factory.mktemp("for")
    tok = tokenizer("chatml")
    config = LlamaConfig(**_COMMON | {"num_hidden_layers": BLOCKS}, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_config(config)
    model.resize_token_embeddings(len(tok), mean_resizing=False)
    model.config.eos_token_id = tok.eos_token_id
    model.save_pretrained(folder / "target")
    tok.save_pretrained(folder / "target")
    write_corpus(folder / "c.jsonl", 12)
    made = {"both": {"for_": "eagle3,dspark,eagle"}, "eagle": {"for_": "eagle"}}
    for name, given in made.items():
        run(folder / "target", folder / "c.jsonl", folder / name, **given | {"layers": "auto"})
    run(folder / "target", folder / "c.jsonl", folder / "old", layers="1,3,4,6,8")
    return folder


def fitted(place, tmp_path, draft: str, data: str, caplog, **changes):
    """Fit one step; return the layers of the draft and the log."""
    given = {"ttt_steps": 2} if draft == "eagle3" else {}
    given |= {"num_layers": 1, "markov_rank": 4} if draft == "dspark" else {}
    with caplog.at_level(logging.INFO, "spec_train"):
        result = flat.fit(
            draft, place / data, tmp_path / draft, steps=1, seq_len=64, device="cpu",
            validation=0.2, **given, **changes,
        )  # fmt: skip
    config = json.loads((result.directory / "last" / "config.json").read_text())
    return config, "\n".join(record.getMessage() for record in caplog.records)


def test_the_union_is_captured_and_recorded(place):
    dataset = spec_data.open_dataset(place / "both")
    assert dataset.manifest.layers == (1, 3, 4, 6, 8)
    assert dataset.manifest.draft_layers == {"eagle3": EAGLE3, "dspark": BLOCK, "eagle": ()}
    assert verify(data=str(place / "both"), target=str(place / "target")) == 0
    old = spec_data.open_dataset(place / "old")
    assert not old.manifest.draft_layers
    for name in old.columns:  # --for changes which layers there are, not what is in them
        torch.testing.assert_close(
            old[0][name], dataset[0][name], rtol=0, atol=0, equal_nan=True, msg=name
        )


def test_an_mtp_block_is_trained_on_what_eagle_is():
    made = [
        spec_data.CaptureOptions(for_=names).drafts for names in ("mtp", "eagle3,mtp", "mtp,eagle")
    ]
    assert made == [("eagle",), ("eagle3", "eagle"), ("eagle",)]


def test_a_dataset_for_eagle_alone_has_no_layer(place, tmp_path, caplog):
    dataset = spec_data.open_dataset(place / "eagle")
    assert dataset.manifest.layers == ()
    assert [name for name in dataset.columns if name.startswith("hidden")] == ["hidden.final"]
    assert verify(data=str(place / "eagle"), target=str(place / "target")) == 0
    fitted(place, tmp_path, "eagle", "eagle", caplog)
    with pytest.raises(DraftError, match="no captured layer"):
        flat.fit("eagle3", place / "eagle", tmp_path / "run", steps=1, device="cpu")


@pytest.mark.parametrize(
    ("draft", "data", "layers"),
    [
        *(("eagle3", "both", EAGLE3), ("dspark", "both", BLOCK), ("eagle3", "old", BLOCK)),
        ("peagle", "both", (1, 3, 4, 6, 8)),
    ],
)
def test_fit_reads_the_layers_of_its_recipe(place, tmp_path, caplog, draft, data, layers):
    config, log = fitted(place, tmp_path, draft, data, caplog)
    found = (
        config.get("target_layer_ids") or config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    )
    assert tuple(found) == layers
    more = layers == (1, 3, 4, 6, 8) and draft != "dspark"
    said = f"warning[recipe-layers]: the recipe of {draft} reads layers 1,4,6 alone: --layers 1,4,6"
    assert (said in log) == more


def test_targets_that_engines_cannot_serve_are_named_before_the_run(tmp_path, caplog):
    """SGLang cannot serve OLMo-2, llama.cpp's graph of it has no layer inputs; vLLM can."""
    write_corpus(tmp_path / "c.jsonl", 12)
    save_target(tmp_path / "olmo2", "olmo2")
    with caplog.at_level(logging.INFO):
        run(tmp_path / "olmo2", tmp_path / "c.jsonl", tmp_path / "data", layers="0,1")
    warned = [line for line in caplog.messages if "Olmo2ForCausalLM" in line and "serve" in line]
    assert [line.split()[1] for line in warned] == ["SGLang", "llama.cpp"]
    assert all(line.startswith("warning[engines]: ") for line in warned)
    caplog.clear()
    fitted(tmp_path, tmp_path, "eagle3", "data", caplog)
    warned = [line for line in caplog.messages if "Olmo2ForCausalLM" in line and "serve" in line]
    assert [line.split()[1] for line in warned] == ["SGLang", "llama.cpp"]
    assert all(line.startswith("warning[engines]: ") for line in warned)


@pytest.mark.parametrize("codec", ["bf16", "default,L3=fine"])
def test_estimate_has_the_bytes_of_each_draft_alone(place, tmp_path, codec):
    """They are those of an estimate with --for that draft."""
    given = {"codec": codec, "teacher": "all"}
    names = ["eagle3", "dspark", "eagle"]

    def sizes(drafts):
        options = spec_data.CaptureOptions(**given, for_=drafts)
        return spec_data.estimate(place / "target", place / "c.jsonl", tmp_path / "out", options)

    both = sizes(names)
    assert both.draft_layers == {"eagle3": EAGLE3, "dspark": BLOCK, "eagle": ()}
    if codec == "bf16":
        plain = 4 + 1 + 4 + 4  # ids, mask, argmax, logsumexp
        for draft, layers in both.draft_layers.items():
            per_token = plain + 2 * 32 * (len(layers) + 1)
            assert both.bytes_by_draft[draft] == per_token * both.tokens
    assert both.bytes_by_draft["peagle"] == both.bytes_by_draft["eagle3"]
    given["codec"] = codec.partition(",")[0]  # L3 is of dspark alone
    for draft in names if codec == "bf16" else names[::2]:
        alone = sizes(draft)
        assert alone.bytes_by_draft[draft] == both.bytes_by_draft[draft]
        overhead = 0.05 * alone.bytes + 40_000  # of small shards
        assert abs(alone.bytes - both.bytes_by_draft[draft]) < overhead
    said = " ".join(str(both).split())
    assert re.search(r"for one draft of all shards, about: eagle3 \S+ \w+, dspark ", said)
    assert re.search(r"\neagle3, peagle +1, 4, 6 +[\d,]+ ", both.details())


def test_a_mixture_has_the_recipes_that_all_its_datasets_record(place):
    both, old = (Manifest.read(place / name / "manifest.json") for name in ("both", "old"))
    only = both.changed(draft_layers={"dspark": BLOCK}).with_fingerprint()
    assert common_manifest([both, only]).draft_layers == {"dspark": BLOCK}
    assert not common_manifest([both, old]).draft_layers


def test_the_target_online_captures_for_drafts(place):
    target = Target.from_pretrained(place / "target", for_drafts=("eagle3", "dspark"), device="cpu")
    assert target.layers == (1, 3, 4, 6, 8)
    assert target.draft_layers == {"eagle3": EAGLE3, "dspark": BLOCK}
    ids = torch.from_numpy(np.arange(8))[None] + 3
    batch = target.generate_batch(ids, torch.ones_like(ids), torch.ones_like(ids))
    for layers in target.draft_layers.values():
        assert batch.aux(layers).shape == (1, 8, len(layers) * 32)
    none = Target(target.model, for_drafts=("eagle",))
    assert set(none.generate_batch(ids, ids, ids).hidden) == {"hidden.final"}
    for given in ({"for_drafts": ("eagle",), "supervision": "logits"}, {"for_drafts": ("x",)}):
        with pytest.raises(TargetError):
            Target(target.model, **given)


def test_the_layers_of_a_search_have_a_price(place, tmp_path, caplog):
    """The bytes that are told before any capture are those of the columns."""
    given = options(place / "target", place / "c.jsonl", tmp_path / "data", layers="search")
    with caplog.at_level(logging.INFO):
        found = estimate_with(**given | {"codec": "bf16"})
    assert found.layers == tuple(range(1, 9))
    width = 2 * _COMMON["hidden_size"]
    said = next(r.getMessage() for r in caplog.records if "to search among" in r.getMessage())
    recipes = {*EAGLE3, *BLOCK}
    assert (
        said.split()[1:]
        == (
            f"8 to search among take {8 * width:,} bytes per token, usually at most, "
            f"{(8 - len(recipes)) * width:,} more than --for all, whose recipes read {len(recipes)}"
        ).split()
    )


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("", None, "num_nextn_predict_layers = 1, but the weight files hold no MTP block"),
        ("eh_proj", None, "hold no MTP block of a known layout"),
        ("enorm", None, "its MTP block lacks enorm.weight"),
        ("post_attention_layernorm", None, "lacks block.post_attention_layernorm.weight"),
        (
            "shared_experts.up_proj",
            lambda t: t[:3],
            "lacks block.mlp.shared_experts.up_proj.weight, or has it in another shape",
        ),
        ("eh_proj", lambda t: t.to(torch.int8), r"its MTP block is quantised \(I8\)"),
    ],
)
def test_a_target_without_a_usable_mtp_block_is_refused_before_a_capture(
    name, change, said, tmp_path
):
    target, file = tmp_path / "target", tmp_path / "target" / "model.safetensors"
    write_target(target, "glm")
    write_corpus(tmp_path / "c.jsonl", 4)
    given = {"target": str(target), "corpus": str(tmp_path / "c.jsonl"), "layers": "auto"}
    asked = given | {"for_": "mtp", "out": str(tmp_path / "data")}
    assert estimate_with(**asked).documents == 4
    edit(target / "config.json", num_nextn_predict_layers=1)
    kept = load_file(file)
    for part in [n for n in kept if n.startswith("model.layers.2.") and name in n]:
        old = kept.pop(part)
        if change is not None:
            kept[part] = change(old)
    save_file(kept, file, metadata={"format": "pt"})
    for command in (estimate_with, generate_with):
        with pytest.raises(TargetError, match=said):
            command(**asked)
        assert not (tmp_path / "data").exists()
    index = target / "model.safetensors.index.json"  # as on the Hub, whose weights are not here
    index.write_text(json.dumps({"weight_map": dict.fromkeys(kept, "parts.safetensors")}))
    file.unlink()
    if "hold no" in said:
        with pytest.raises(TargetError, match="hold no MTP block"):
            estimate_with(**asked)
    index.unlink()
    assert estimate_with(**asked).documents == 4, "nothing is known of its weights"


def test_how_a_draft_differs_from_its_target_is_said(tmp_path):
    save_target(tmp_path / "target", "gpt2")
    write_corpus(tmp_path / "c.jsonl", 4)
    given = {"target": str(tmp_path / "target"), "corpus": str(tmp_path / "c.jsonl")}
    sizes = estimate_with(**given, out=str(tmp_path / "data"), layers="0,2,4")
    assert (
        "of GPT2LMHeadModel: the draft has rotary positions instead of learned ones" in sizes.text
    )
    page = (Path(__file__).parents[3] / "docs" / "targets.md").read_text("utf-8")
    _, _, page = page.partition("## What is different")
    table = page.partition("\n\n")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == NOTES.keys() and len(NOTES) == 30
