"""DFlash 2 as z-lab publishes it, with keys in `dflash_config`, of speculators and AutoModel."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spec_data.shards.errors import DraftError
from tests.spec_train.drafts.dflash2.reference import Block
from tests.spec_train.formats.published import (
    blocks,
    test_automodel_blocks,
    test_speculators_blocks,
    tiny,
)
from tests.spec_train.formats.published.blocks import IDS, LAYERS, MASK, SIZE
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG
from tests.spec_train.formats.published.tiny import H, V, noise

TAPS, GROUP, RANK, TOP = 3, 2, 4, 5
KEYS = {
    "conv_kernel_size": TAPS,
    "conv_group_size": GROUP,
    "selector_rank": RANK,
    "selector_top_k": TOP,
}
TABLE = {"mask_token_id": MASK, "target_layer_ids": IDS, "block_size": SIZE, **KEYS}


def tensors() -> dict[str, Tensor]:
    made = blocks.block_tensors() | {
        "candidate_selector.predecessor_codebook": noise(V, RANK) * 3,
        "candidate_selector.successor_codebook": noise(V, RANK) * 3,
        "candidate_selector.hidden_projection.weight": noise(RANK, H),
    }
    for name in (f"layers.{i}.{part}_conv" for i in range(LAYERS) for part in ("attention", "mlp")):
        made[f"{name}.base_kernel"] = noise(2 * TAPS, H).view(2, TAPS, H) * 3
        made[f"{name}.kernel_projection.weight"] = noise(2 * TAPS * (H // GROUP), H)
    return made


def zlab(folder: Path, saved: dict[str, Tensor], **table: Any) -> Path:
    raw = {name: value for name, value in CONFIG.items() if name != "block_size"}
    raw |= {"architectures": ["DFlash2DraftModel"], "dflash_config": TABLE | table}
    return tiny.write(folder, raw, saved)


def speculators(folder: Path, saved: dict[str, Tensor], **keys: Any) -> Path:
    raw = test_speculators_blocks.block_config("dflash2", sample_from_anchor=False, **KEYS)
    raw |= {"architectures": ["DFlash2DraftModel"], **keys}
    return tiny.write(folder, raw, saved)


def automodel(folder: Path, saved: dict[str, Tensor]) -> Path:
    raw = test_automodel_blocks.DFLASH | {"architectures": ["Qwen3DFlash2DraftModel"]}
    raw["dflash_config"] = raw["dflash_config"] | KEYS
    return tiny.write(folder, raw, saved)


@pytest.mark.parametrize("write", [zlab, speculators, automodel])
def test_it_drafts_as_defined(tmp_path, write):
    facts, saved = tiny.target(), tensors()
    folder = write(tmp_path, saved)
    draft = blocks.chooses_as_defined(folder, saved, facts, Block, top_k=TOP)
    assert draft.name == "dflash2" and draft.config.layers == tuple(IDS)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"selector_rank": None}, "selector_rank is missing"),
        ({"conv_group_size": 5}, "conv_group_size = 5 does not divide"),
        ({"conv_kernel_size": SIZE + 1}, "is more than block_size"),
        ({"selector_top_k": V + 1}, "more than the vocabulary has tokens"),
        ({"sample_from_anchor": True}, "drafts from its mask slots"),
        ({"markov_rank": 3}, "has no Markov or confidence head"),
        ({"output_multiplier": 0.2}, "output_multiplier = 0.2"),
    ],
    ids=str,
)
def test_what_is_no_draft_of_this_kind_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(DraftError, match=message):
        blocks.read_block(zlab(tmp_path, tensors(), **keys), tiny.target())


def test_a_dflash_with_keys_of_dflash2_is_refused(tmp_path):
    """Its name says that it has no selector."""
    raw = CONFIG | {"dflash_config": TABLE}
    with pytest.raises(DraftError, match="conv_kernel_size = 3"):
        blocks.read_block(tiny.write(tmp_path, raw, tensors()), tiny.target())
