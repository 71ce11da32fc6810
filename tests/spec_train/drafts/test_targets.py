"""Targets: what a draft takes from their configs, and every family from generate to eval."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.layer_ids import capturable_layer_ids
from spec_train.drafts.config import target_shape
from spec_train.formats.target_facts import read_target
from tests.current_families import CURRENT, NESTED
from tests.families import FAMILIES, MORE_FAMILIES, tiny_model
from tests.spec_train.drafts import test_families
from tests.spec_train.drafts.any_draft import SHAPED
from tests.spec_train.drafts.cases import small_target
from tests.spec_train.drafts.test_families import ALL
from tests.spec_train.evaluation.tools import run_eval

NAMES = sorted(FAMILIES | MORE_FAMILIES)
places, train = test_families.places, test_families.train


@pytest.mark.parametrize("nested", [False, True])
def test_a_target_that_lists_its_blocks_has_their_number(nested: bool, tmp_path: Path) -> None:
    """Such as Nemotron-H: published drafts without layer ids need the number."""
    text = {"layers_block_type": ["mamba", "attention", "moe", "mamba"]}
    config = {"text_config": text} if nested else text
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_target(tmp_path).num_layers == 4


@pytest.mark.parametrize(
    ("embedding", "head"),
    [
        ("gpt_neox.embed_in.weight", "embed_out.weight"),
        ("backbone.embeddings.weight", "lm_head.weight"),  # Nemotron-H
        ("transformer.word_embeddings.weight", None),  # Falcon, tied by default
        ("model.embed_tokens.weight", None),  # Gemma
    ],
)
def test_embedding_and_head_have_many_names(embedding, head, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    tensors = {name: torch.randn(4, 2) for name in (embedding, head) if name}
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_target(tmp_path)
    assert torch.equal(found.embedding, tensors[embedding])
    assert torch.equal(found.head, tensors[head or embedding])
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": false}')
    assert (read_target(tmp_path).head is None) == (head is None)
    (tmp_path / "config.json").write_text("{}")
    tensors["qformer.embeddings.word_embeddings.weight"] = torch.zeros(4, 2)
    if head is None:
        tensors["lm_head.qweight"] = torch.zeros(4)
    save_file(tensors, tmp_path / "model.safetensors")
    found = read_target(tmp_path)  # a quantised head is not the embedding
    assert found.head is None or head is not None
    if "word" not in embedding:
        assert torch.equal(found.embedding, tensors[embedding])


@pytest.mark.long
@pytest.mark.parametrize("name", [*NAMES, *CURRENT, *NESTED])
def test_embedding_and_head_of_every_family_are_found(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for table in (raw, raw.get("text_config") or {}):
        if table.get("tie_word_embeddings"):  # those that tie by default may not say it
            del table["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    found = read_target(tmp_path)
    assert torch.equal(found.embedding, model.get_input_embeddings().weight)
    assert torch.equal(found.head, model.get_output_embeddings().weight)


@pytest.mark.parametrize(
    "names", [["T5ForConditionalGeneration"], ["Qwen2VLForConditionalGeneration"], ["MambaLM"], []]
)
def test_others_are_refused_with_what_is_supported(names: list[str]) -> None:
    with pytest.raises(DraftError, match=r"GptOssForCausalLM, .*encoder-decoders") as caught:
        target_shape("eagle3", {"architectures": names}, None)
    assert str(names) in str(caught.value)


@pytest.mark.parametrize(
    ("kinds", "size"),
    [
        (None, 6),
        (["full_attention"] * 3, 6),
        (["full_attention", "sliding_attention", "full_attention"], 8),
    ],
)
def test_a_head_size_of_single_layers_counts_if_all_full_layers_have_it(kinds, size) -> None:
    layers = {"0": {"head_dim": 8}, "2": {"head_dim": 8}}
    config = small_target(12, 4, 2) | {"per_layer_config": layers, "layer_types": kinds}
    assert target_shape("eagle3", config, None).head_dim == size


def test_layer_ids_are_spread_over_the_depth() -> None:
    for blocks in range(2, 80):
        for count in range(1, blocks):
            ids = capturable_layer_ids(blocks + 1, count)
            assert len(ids) == count and ids[-1] == blocks - 1
            assert count == 1 or ids[0] == 1
            gaps = [b - a for a, b in itertools.pairwise(ids)]
            assert min(gaps, default=1) >= 1
            assert max(gaps, default=0) - min(gaps, default=0) <= 1
    assert capturable_layer_ids(36, 5) == [1, 9, 18, 26, 34]


@pytest.mark.parametrize(("blocks", "count"), [(5, 0), (5, 4), (2, 1)])
def test_more_layers_than_blocks_are_refused(blocks: int, count: int) -> None:
    with pytest.raises(TargetError, match=rf"{count} layers cannot be spread"):
        capturable_layer_ids(blocks, count)


@pytest.mark.long
@pytest.mark.parametrize("family", NAMES)
def test_generate_fit_and_eval(family, places):
    """On data and with the target: every draft for a few families, for the others one in turn."""
    place = places(family)
    kinds = sorted(SHAPED)
    if not ALL and family not in ("llama", "gemma4", "gpt_oss"):
        kinds = [kinds[NAMES.index(family) % len(kinds)]]
    settings = {"data": str(place / "data"), "target": str(place / "target"), "max_new_tokens": 4}
    prompts = {"prompts": str(place / "chats.jsonl"), "limit": 2, "device": "cpu", "split": "all"}
    for draft in kinds:
        report = run_eval(dict(draft=str(train(draft, place)), **settings, **prompts))
        assert report["identical"] + report["ties"] == report["responses"] == 2
        assert report["acceptance_length"] >= 1
