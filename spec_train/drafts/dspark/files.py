"""The files of a DSpark draft, in the flat form that DeepSpec writes and engines read."""

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    DSPARK,
    BlockFiles,
    block_keys,
    of_plain_speculators,
    read_block,
    stated_block,
)

_MLA = "multi-head latent attention"

FILES = BlockFiles(
    title="DSpark",
    what="a DSpark or DFlash draft",
    classes=(DSPARK, "DSparkDraftModel", "DSparkSpeculator"),
    written=DSPARK,
    own_keys=block_keys,
    stated=stated_block("dspark"),
    read=read_block,
    speculators=of_plain_speculators,
    absent={
        "sample_from_anchor": True,
        "block_size": 8,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
    forms=BLOCK_FORMS,
    aliases={
        "use_confidence_head": "enable_confidence_head",  # ModelOpt
        "dspark_block_size": "block_size",
        "dspark_target_layer_ids": "target_layer_ids",
    },
    others={
        "Gemma4DSparkModel": "Gemma 4's layers: four norms each, keys that are also values, scaled "
        "embeddings",
        **dict.fromkeys(("DeepseekV4DSparkModel", "DeepSeekV4DSparkModel"), _MLA),
        **dict.fromkeys(("DSparkV41DraftModel", "DeepseekV4ForCausalLMDSpark"), _MLA),
        **dict.fromkeys(("Glm5_2DSparkModel", "KimiK3DSparkModel", "K3DSparkModel"), _MLA),
        **dict.fromkeys(("MiniMaxM3DSparkModel", "DSparkMiniMaxDraftModel"), "MiniMax M3's layers"),
        "MuseSparkDSparkModel": "Muse Spark's layers, with four norms each",
        "LingDSparkModel": "Ling's layers",
        "Lfm2DSparkDraftModel": "LFM2's layers, some of them convolutions",
        "Qwen3OmniDSparkModel": "Qwen3-Omni's layers with positions in three dimensions",
    },
)
