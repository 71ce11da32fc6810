"""LiLiCorr under the names of NVIDIA's ModelOpt and under those that SGLang loads."""

import re
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from spec_data.shards.errors import DraftError
from tests.spec_train.drafts.lilicorr.reference import Block
from tests.spec_train.formats.published import blocks, tiny
from tests.spec_train.formats.published.blocks import IDS, MASK, SIZE
from tests.spec_train.formats.published.test_zlab_blocks import CONFIG
from tests.spec_train.formats.published.tiny import H, V, gain, noise

TOP, WIDTH, FACTORS, HEADS = 4, 6, 5, 2
TABLE: dict[str, Any] = {
    **{"mask_token_id": MASK, "target_layer_ids": IDS, "projector_type": "lilicorr"},
    **{"lilicorr_enabled": True, "lilicorr_candidate_topk": TOP, "lilicorr_hidden_size": WIDTH},
    **{"lilicorr_num_layers": 1, "lilicorr_num_heads": HEADS, "lilicorr_mlp_ratio": 2.0},
    **{"lilicorr_factor_dim": FACTORS, "lilicorr_vector_eps": 1e-4, "lilicorr_logit_scale": 8.0},
}
LINEARS = {
    **{"token_proj": (WIDTH, H), "pass_hidden_proj": (WIDTH, H), "context_proj": (WIDTH, H)},
    **{"feature_mlp.up_proj": (WIDTH, 5), "feature_mlp.down_proj": (WIDTH, WIDTH)},
    "layers.0.attn.out_proj": (WIDTH, WIDTH),
    "layers.0.mlp.up_proj": (2 * WIDTH, WIDTH),
    "layers.0.mlp.down_proj": (WIDTH, 2 * WIDTH),
    "factor_input_proj": (WIDTH, 3 * WIDTH),
    **dict.fromkeys(("out_head", "in_head", "anchor_out_head"), (FACTORS, WIDTH)),
}
MODELOPT = {  # its Sequentials
    r"feature_norm\.": "feature_mlp.0.",
    r"feature_mlp\.up_proj": "feature_mlp.1",
    r"feature_mlp\.down_proj": "feature_mlp.3",
    r"mlp\.up_proj": "mlp.0",
    r"mlp\.down_proj": "mlp.2",
}


def tensors() -> dict[str, Tensor]:
    head = {f"{n}.weight": noise(*shape) * 3 for n, shape in LINEARS.items()}
    head |= {f"{n}.bias": noise(shape[0]) for n, shape in LINEARS.items()}
    norms = ("output_norm", "anchor_norm", "layers.0.attn_norm", "layers.0.mlp_norm")
    head |= {f"{name}.weight": gain(WIDTH) for name in norms}
    head |= {"feature_norm.weight": gain(5), "feature_norm.bias": noise(5)}
    head |= {"layers.0.attn.in_proj_weight": noise(3 * WIDTH, WIDTH) * 3}
    head |= {"layers.0.attn.in_proj_bias": noise(3 * WIDTH)}
    head |= {"slot_embedding": noise(SIZE - 1, WIDTH).view(1, 1, SIZE - 1, 1, WIDTH)}
    head |= {"rank_embedding": noise(TOP, WIDTH).view(1, 1, 1, TOP, WIDTH)}
    head |= {"relative_slot_bias": noise(HEADS, 2 * SIZE - 1), "same_slot_bias": noise(HEADS)}
    return blocks.block_tensors() | {f"lilicorr.{name}": value for name, value in head.items()}


def sglang(folder: Path, saved: dict[str, Tensor], **table: Any) -> Path:
    raw = CONFIG | {"architectures": ["LiLiCorrDraftModel"], "dflash_config": TABLE | table}
    return tiny.write(folder, raw, saved)


def modelopt(folder: Path, saved: dict[str, Tensor]) -> Path:
    named = dict(saved)
    for name in [name for name in saved if name.startswith("lilicorr.")]:
        for ours, theirs in MODELOPT.items():
            if re.search(ours, name):
                named[re.sub(ours, theirs, name)] = named.pop(name)
                break
    return sglang(folder, named)


@pytest.mark.parametrize("write", [sglang, modelopt])
def test_it_drafts_as_defined(tmp_path, write):
    facts, saved = tiny.target(), tensors()
    how = {"top_k": TOP, "vector_eps": 1e-4, "logit_scale": 8.0}
    draft = blocks.chooses_as_defined(write(tmp_path, saved), saved, facts, Block, **how)
    assert draft.name == "lilicorr" and draft.config.layers == tuple(IDS)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale is missing"),
        ({"lilicorr_num_heads": 4}, "lilicorr_num_heads = 4 does not divide"),
        ({"lilicorr_candidate_topk": V + 1}, "at most the tokens of the vocabulary"),
        ({"conv_kernel_size": 2}, "both are 0, or none is"),
        ({"sample_from_anchor": True}, "drafts from its mask slots"),
    ],
    ids=str,
)
def test_what_is_no_draft_of_this_kind_is_refused_by_name(tmp_path, keys, message):
    with pytest.raises(DraftError, match=message):
        blocks.read_block(sglang(tmp_path, tensors(), **keys), tiny.target())
