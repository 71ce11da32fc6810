"""The conformance vectors of DFlash."""

from spec_train.drafts.block.vectors import DEEP, block_recipe, block_vectors

_FORMS = "vllm speculators transformers"
_WINDOW = {
    **{"sliding_window": 6, "layer_types": "sliding_attention,full_attention"},
    "sliding_window_non_causal": True,
}
VECTORS = block_vectors(
    block_recipe("dflash", "dflash", "DFlash of one layer", _FORMS, {"block_size": 5}),
    block_recipe("dflash-deep", "dflash", "DFlash of two layers", _FORMS, DEEP),
    block_recipe(
        *("dflash-window", "dflash", "DFlash, one of two layers has a window, not causal in it"),
        *("vllm speculators", DEEP | _WINDOW),
    ),
)
