"""Domino as NVIDIA's ModelOpt exports it, and under SpecForge's class; SGLang reads both tables."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, MASK, SIZE
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG
from tests.spec_train.formats.published.tiny import H, V, noise

WIDTH, RANK = 3, 4
TABLE: dict[str, Any] = {
    **{"mask_token_id": MASK, "target_layer_ids": IDS, "projector_type": "domino"},
    **{"shift_label": True, "pure_draft_prefix_len": 1, "gru_hidden_dim": WIDTH, "emb_dim": RANK},
}


def tensors() -> dict[str, Tensor]:
    return blocks.block_tensors() | {
        "prefix_gru.weight_ih_l0": noise(3 * WIDTH, H) * 3,
        "prefix_gru.weight_hh_l0": noise(3 * WIDTH, WIDTH) * 3,
        "embed_proj.0.weight": noise(RANK, H + WIDTH) * 3,
        "embed_proj.2.weight": noise(V, RANK) * 3,
    }


def modelopt(folder: Path, saved: dict[str, Tensor], **table: Any) -> Path:
    raw = CONFIG | {"emb_dim": RANK, "dflash_config": TABLE | table}
    return tiny.write(folder, raw, saved)


def specforge(folder: Path, saved: dict[str, Tensor], **table: Any) -> Path:
    raw = CONFIG | {"architectures": ["DominoDraftModel"], "dflash_config": TABLE | table}
    return tiny.write(folder, raw, saved)


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("write", [modelopt, specforge])
def test_it_drafts_as_defined(tmp_path, write, shift):
    facts, saved = tiny.target(), tensors()
    first = 1 if shift else 2
    folder = write(tmp_path, saved, shift_label=shift, pure_draft_prefix_len=first)
    how = {"sample_from_anchor": shift, "prefix": first}
    draft = blocks.drafts_as_defined(folder, saved, facts, **how)
    assert draft.name == "domino" and draft.config.layers == tuple(IDS)
    assert draft.depth == SIZE - (0 if shift else 1)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"gru_hidden_dim": None}, "gru_hidden_dim is missing"),
        ({"emb_dim": RANK + 1}, "emb_dim = 4 and, in another place of the config, 5"),
        ({"pure_draft_prefix_len": SIZE}, "less than the 4 drafts"),
        ({"shift_label": None}, "no sample_from_anchor"),
        ({"markov_rank": 3}, "has no Markov or confidence head"),
        ({"selector_rank": 3}, "selector_rank = 3"),
    ],
    ids=str,
)
def test_what_is_no_draft_of_this_kind_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(DraftError, match=message):
        blocks.read_block(modelopt(tmp_path, tensors(), **keys), tiny.target())


def test_a_dflash_with_the_weights_of_a_domino_is_refused(tmp_path):
    """Its table does not say that it has a recurrent head."""
    with pytest.raises(DraftError, match="prefix_gru"):
        blocks.read_block(tiny.write(tmp_path, CONFIG, tensors()), tiny.target())
