"""The files of a LiLiCorr draft; its tensors have the names of SGLang."""

from collections.abc import Mapping
from typing import Any

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    BlockFiles,
    block_keys,
    foreign_stage,
    read_block,
    stage_of,
    stated_block,
)

CLASS = "LiLiCorrDraftModel"


def _defaults(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what files leave out: as wide as the draft, and no convolutions."""
    none = {name: 0 for name in ("conv_kernel_size", "conv_group_size") if name not in raw}
    width = raw.get("lilicorr_hidden_size") or raw["hidden_size"]
    return {**none, "lilicorr_hidden_size": width}


FILES = BlockFiles(
    title="LiLiCorr",
    what="a LiLiCorr draft",
    classes=(CLASS,),
    written=CLASS,
    claims_config=lambda raw: stage_of(raw) == "lilicorr",
    own_keys=block_keys,
    stated=stated_block("lilicorr"),
    read=read_block,
    forms={form: BLOCK_FORMS[form] for form in ("hf", "vllm", "sglang")},
    keys=(
        *("conv_kernel_size", "conv_group_size", "lilicorr_candidate_topk"),
        *("lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads"),
        *("lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps"),
        "lilicorr_logit_scale",
    ),
    neutral={"lilicorr_enabled": (True, False)},
    tensors={  # ModelOpt's
        r"lilicorr\.feature_mlp\.0\.": "lilicorr.feature_norm.",
        r"(lilicorr\.feature_mlp)\.1\.": r"\1.up_proj.",
        r"(lilicorr\.feature_mlp)\.3\.": r"\1.down_proj.",
        r"(lilicorr\.layers\.\d+\.mlp)\.0\.": r"\1.up_proj.",
        r"(lilicorr\.layers\.\d+\.mlp)\.2\.": r"\1.down_proj.",
    },
    defaults=_defaults,
    foreign=foreign_stage("lilicorr", "LiLiCorr's correlator of candidates"),
)
