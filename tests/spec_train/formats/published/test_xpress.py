"""XPress as vLLM loads it."""

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spec_data.shards.errors import DraftError
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, SIZE
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG
from tests.spec_train.formats.published.tiny import H, V, noise

RANK, INSIDE = 4, 6
SIZES = {"xpress_rank": RANK, "xpress_mlp_hidden": INSIDE}


def tensors(rank: int = RANK, inside: int = INSIDE) -> dict[str, Tensor]:
    head = {
        **{f"{name}.weight": noise(V, rank) * 3 for name in ("w1", "w2")},
        **{f"{name}.weight": noise(rank, H) * 3 for name in ("down_h", "down_g")},
        **{f"mlp.{name}_proj.weight": noise(inside, rank) * 3 for name in ("gate", "up")},
        "mlp.down_proj.weight": noise(rank, inside) * 3,
        "in_proj.weight": noise(rank, 3 * rank) * 3,
        "mix.L": noise(rank, SIZE * SIZE).view(rank, SIZE, SIZE),
    }
    return blocks.block_tensors() | {f"xpress_head.{name}": value for name, value in head.items()}


def vllm(folder: Path, saved: dict[str, Tensor], **keys: Any) -> Path:
    raw = CONFIG | {"architectures": ["Qwen3XPressModel"], "xpress_block_size": SIZE}
    raw |= {"xpress_topc": 512}
    return tiny.write(folder, raw | SIZES | keys, saved)


def test_it_drafts_as_defined(tmp_path):
    facts, saved = tiny.target(), tensors()
    draft = blocks.drafts_as_defined(vllm(tmp_path, saved), saved, facts, sample_from_anchor=False)
    assert draft.name == "xpress" and draft.config.layers == tuple(IDS)
    assert draft.depth == SIZE - 1 and draft.config.xpress_num_passes == 6


def test_sizes_that_are_not_named_are_those_of_vllm(tmp_path, monkeypatch):
    saved = tensors(256, 512)
    monkeypatch.setattr(f"{__name__}.SIZES", {})
    folder = vllm(tmp_path, saved)
    blocks.drafts_as_defined(folder, saved, tiny.target(), sample_from_anchor=False)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"xpress_rank": RANK + 1}, "xpress_head"),
        ({"xpress_block_size": SIZE + 1}, "block_size = 4 and, .* 5"),
        ({"xpress_block_size": SIZE + 1, "block_size": SIZE + 1}, r"mix\.L"),
        ({"sample_from_anchor": True}, "drafts from its mask slots"),
        ({"markov_rank": 3}, "has no Markov or confidence head"),
        ({"selector_rank": 3}, "selector_rank = 3"),
    ],
    ids=str,
)
def test_what_is_no_draft_of_this_kind_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(DraftError, match=message):
        blocks.read_block(vllm(tmp_path, tensors(), **keys), tiny.target())


def test_a_dflash_with_the_weights_of_an_xpress_is_refused(tmp_path):
    with pytest.raises(DraftError, match=r"xpress_head.*XPress"):
        blocks.read_block(tiny.write(tmp_path, CONFIG, tensors()), tiny.target())
