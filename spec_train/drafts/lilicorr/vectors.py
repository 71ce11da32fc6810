"""The conformance vectors of LiLiCorr."""

from spec_train.drafts.block import reference as slow
from spec_train.drafts.block.vectors import (
    DEEP,
    block_recipe,
    block_reference,
    block_vectors,
    by_stage,
    window_mistakes,
)
from spec_train.drafts.kind_vectors import SlowDraft
from spec_train.drafts.lilicorr.reference import Block

_LATTICE = {
    **{"lilicorr_candidate_topk": 2, "lilicorr_hidden_size": 16, "lilicorr_num_heads": 2},
    **{"lilicorr_num_layers": 1, "lilicorr_factor_dim": 8, "lilicorr_logit_scale": 8.0},
}


def _reference(draft: SlowDraft) -> slow.Config:
    given = draft.config
    return block_reference(
        draft,
        top_k=given.lilicorr_candidate_topk,
        vector_eps=given.lilicorr_vector_eps,
        logit_scale=given.lilicorr_logit_scale,
    )


VECTORS = block_vectors(
    block_recipe("lilicorr", "lilicorr", "LiLiCorr of two layers", "sglang", DEEP | _LATTICE),
    reference=_reference,
    drafted=lambda draft, config, document, anchor, known, ids: by_stage(
        Block, draft, config, document, anchor, known
    ),
    slots=window_mistakes,
)
