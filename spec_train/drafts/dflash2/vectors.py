"""The conformance vectors of DFlash 2."""

from spec_train.drafts.block.vectors import (
    DEEP,
    block_recipe,
    block_reference,
    block_vectors,
    by_stage,
)
from spec_train.drafts.dflash2.reference import Block

VECTORS = block_vectors(
    block_recipe(
        *("dflash2", "dflash2", "DFlash 2 of two layers", "vllm speculators"),
        DEEP | {"selector_rank": 8, "selector_top_k": 4},
    ),
    reference=lambda draft: block_reference(draft, top_k=draft.config.selector_top_k),
    drafted=lambda draft, config, document, anchor, known, ids: by_stage(
        Block, draft, config, document, anchor, known
    ),
    passes=4,
)
