"""The conformance vectors of Domino."""

from spec_train.drafts.block.vectors import DEEP, block_recipe, block_reference, block_vectors
from spec_train.drafts.domino.reference import Recurrent

VECTORS = block_vectors(
    block_recipe(
        *("domino", "domino", "Domino of two layers", "sglang"),
        DEEP | {"emb_dim": 8, "gru_hidden_dim": 8},
    ),
    reference=lambda draft: block_reference(draft, prefix=draft.config.pure_draft_prefix_len),
    added={"prefix_gru.weight_ih_l0": Recurrent},
)
