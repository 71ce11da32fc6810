"""The conformance vectors of XPress."""

from spec_train.drafts.block.vectors import DEEP, block_recipe, block_vectors, window_mistakes
from spec_train.drafts.xpress.reference import Refiner

VECTORS = block_vectors(
    block_recipe(
        *("xpress", "xpress", "XPress of two layers, as many passes as drafts", "vllm"),
        DEEP | {"xpress_rank": 16, "xpress_num_passes": 4},
    ),
    slots=window_mistakes,
    added={"xpress_head.mix.L": Refiner},
)
