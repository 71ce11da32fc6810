"""The files of a DFlash 2 draft."""

from collections.abc import Mapping
from typing import Any

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    BlockFiles,
    block_facts,
    block_keys,
    of_speculators,
    read_block,
    stage_of,
    stated_block,
)

CLASS = "DFlash2DraftModel"


def _facts(config: Mapping[str, Any]) -> dict[str, Any]:
    count = config.get("selector_top_k", 0)
    return block_facts(config) | {"lattice": count * (count + 1)}


FILES = BlockFiles(
    title="DFlash 2",
    what="a DFlash 2 draft",
    classes=(
        *(CLASS, "Qwen3DFlash2DraftModel", "DFlash2BeamDraftModel"),
        "MiniMaxDFlash2DraftModel",
    ),
    written=CLASS,
    claims_config=lambda raw: stage_of(raw) == "dflash2",
    own_keys=block_keys,
    stated=stated_block("dflash2"),
    read=read_block,
    speculators=of_speculators("dflash2"),
    absent={
        **{"sample_from_anchor": False, "sliding_window_non_causal": True, "block_size": 8},
        **{"conv_kernel_size": 2, "conv_group_size": 16},
        **{"selector_rank": 256, "selector_top_k": 16},
    },
    forms={form: write for form, write in BLOCK_FORMS.items() if form != "deepspec"},
    keys=("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    token_rows=("candidate_selector.successor_codebook",),
    facts=_facts,
)
