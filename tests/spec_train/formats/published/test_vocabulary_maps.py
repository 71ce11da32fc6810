"""Vocabulary maps in any order and meaning, in drafts of every kind; what means nothing is refused.

A draft is read with its map in another order, and must give every target token the same logit.
"""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.drafts import load_draft
from spec_train.formats.names import plain_names
from spec_train.formats.vocabulary_maps import own_vocabulary, read_vocabulary
from tests.spec_train.formats.published import tiny
from tests.spec_train.formats.published.tiny import VD, H, V

CONFIG = tiny.SIZES | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": VD,
    "eagle_aux_hidden_state_layer_ids": [2, 6, 9],
}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def reads_like_the_file(folder: Path, tensors: dict[str, Tensor], ids: Tensor) -> None:
    config = CONFIG | {"draft_vocab_size": len(ids)}
    draft = tiny.eagle3_as_defined(folder, config, tensors, tiny.target(), ids=ids)
    assert torch.equal(draft.draft_ids, ids.sort().values)


@pytest.mark.parametrize("order", ["ascending", "by frequency"])
@pytest.mark.parametrize("given", ["both", "d2t", "ids and t2d"])
def test_a_map_in_any_order_keeps_the_logit_of_every_token(tmp_path, order, given, caplog):
    ids = tiny.some_ids(order)
    tensors = tiny.eagle3_tensors() | tiny.maps(ids)
    if given == "d2t":
        del tensors["t2d"]
    if given == "ids and t2d":
        tensors["d2t"] = ids
    with caplog.at_level(logging.WARNING):
        reads_like_the_file(tmp_path, tensors, ids)
    assert ("token ids instead of offsets" in caplog.text) == (given == "ids and t2d")


def test_a_mask_alone_means_ascending_rows(tmp_path):
    ids = tiny.some_ids()
    reads_like_the_file(tmp_path, tiny.eagle3_tensors() | {"t2d": tiny.mask_of(ids)}, ids)


def test_ids_without_a_mask_are_known_by_what_they_would_mean_as_offsets(tmp_path, caplog):
    ids = torch.randperm(V - 1)[:VD]
    ids[3] = V - 1  # as an offset of row 3 it lies outside the vocabulary
    reads_like_the_file(tmp_path, tiny.eagle3_tensors() | {"d2t": ids}, ids)
    assert "warning[vocabulary-map]" in caplog.text
    assert "d2t holds token ids instead of offsets" in caplog.text


@pytest.mark.parametrize("ids", [torch.arange(V).flip(0), torch.arange(V)], ids=["other", "plain"])
def test_a_full_vocabulary_may_be_in_another_order_too(tmp_path, ids):
    """SpecForge always writes both maps."""
    reads_like_the_file(tmp_path, tiny.eagle3_tensors(size=V) | tiny.maps(ids), ids)


@pytest.mark.parametrize("stage", ["embed_proj.2.weight", "xpress_head.w2.weight"])
def test_a_second_stage_whose_rows_are_in_an_unknown_order_is_refused(stage):
    ids = torch.arange(V).flip(0)
    tensors = {"lm_head.weight": tiny.noise(V, tiny.H), stage: tiny.noise(V, 4)} | tiny.maps(ids)
    with pytest.raises(DraftError, match=f"not ascending, .* {stage} are is not known"):
        own_vocabulary(tensors, V, V, "here")


def test_a_tensor_that_is_there_under_two_names_is_refused(tmp_path):
    tensors = {name: tiny.noise(tiny.H) for name in ("norm.weight", "model.norm.weight")}
    with pytest.raises(DraftError, match=r"here: norm\.weight is there twice"):
        plain_names(tensors, "here")
    tensors = {"d2t": tiny.offsets(IDS), "model.d2t": IDS}
    save_file(tensors, tmp_path / "map.safetensors")
    with pytest.raises(DraftError, match=r"map\.safetensors: d2t is there twice"):
        read_vocabulary(tmp_path / "map.safetensors", V)


IDS = torch.arange(VD) * 2
BROKEN: list[tuple[dict[str, Tensor], str]] = [
    ({}, "neither d2t nor t2d"),
    ({"d2t": tiny.offsets(IDS.clamp(max=30))}, "offsets .* 4 tokens repeat; .* ids .* tokens rep"),
    ({"d2t": tiny.offsets(IDS) + 30}, "tokens lie outside 0..47"),
    ({"d2t": tiny.offsets(IDS), "t2d": tiny.mask_of(IDS + 1)}, "vocabulary than t2d"),
    ({"t2d": torch.zeros(V, dtype=torch.bool)}, "t2d names 0 tokens"),
    # the default mask of SpecForge
    ({"d2t": torch.zeros(VD).long(), "t2d": torch.ones(V, dtype=torch.bool)}, "than t2d"),
]


@pytest.mark.parametrize(("extra", "message"), BROKEN)
def test_a_map_that_does_not_name_the_tokens_is_refused_with_its_file(tmp_path, extra, message):
    folder = tiny.write(tmp_path / "draft", CONFIG, tiny.eagle3_tensors() | extra)
    with pytest.raises(DraftError, match=rf"model\.safetensors: .*{message}"):
        load_draft(folder, tiny.target())


def test_a_map_that_was_never_filled_is_named(tmp_path, caplog):
    tensors = tiny.eagle3_tensors() | {"d2t": torch.zeros(VD, dtype=torch.long)}
    with caplog.at_level(logging.WARNING):
        load_draft(tiny.write(tmp_path / "draft", CONFIG, tensors), tiny.target())
    assert "warning[vocabulary-map]" in caplog.text
    assert "d2t is all zero" in caplog.text and "model.safetensors" in caplog.text


def test_all_rows_of_a_draft_token_move_with_its_id():
    """The Markov head of DSpark has a row per draft token too."""
    ids = torch.tensor([7, 2, 5])
    tensors = {
        "lm_head.weight": torch.arange(3.0)[:, None],
        "markov_head.markov_w2.weight": torch.arange(3.0)[:, None] + 10,
        "markov_head.markov_w1.weight": torch.arange(9.0)[:, None],  # by target token
        "d2t": tiny.offsets(ids),
    }
    found = own_vocabulary(tensors, 9, 3, "here")
    assert found["lm_head.weight"].flatten().tolist() == [1, 2, 0]
    assert found["markov_head.markov_w2.weight"].flatten().tolist() == [11, 12, 10]
    assert torch.equal(
        found["markov_head.markov_w1.weight"], tensors["markov_head.markov_w1.weight"]
    )
    assert (found["d2t"] + torch.arange(3)).tolist() == [2, 5, 7]
    assert found["t2d"].nonzero().flatten().tolist() == [2, 5, 7]


def test_a_sorted_map_without_a_head_is_refused():
    with pytest.raises(DraftError, match=r"here: its vocabulary map is not ascending"):
        own_vocabulary({"fc.weight": torch.ones(H, H), "d2t": torch.tensor([3, 0])}, 9, 2, "here")
