"""Draft classes of other projects whose arithmetic this project does not have, and what it is."""

_GEMMA = "Gemma 4's layers: four norms each, keys that are also values, scaled embeddings"
_LATENT = "multi-head latent attention"
_DFLASH2 = "DFlash 2's convolutions inside the layers and its candidate selector"
_DOMINO = "Domino's recurrent head"

OTHER_CLASSES = {
    "Gemma4DSparkModel": _GEMMA,
    "Gemma4Eagle3DraftModel": _GEMMA,
    "DeepseekV4DSparkModel": _LATENT,
    "DeepSeekV4DSparkModel": _LATENT,
    "Glm5_2DSparkModel": _LATENT,
    "KimiK3DSparkModel": _LATENT,
    "K3DSparkModel": _LATENT,
    "KimiK3DFlashDraftModel": _LATENT,
    "MiniMaxM3DSparkModel": "MiniMax M3's layers",
    "LingDSparkModel": "Ling's layers",
    "Lfm2DSparkDraftModel": "LFM2's layers, some of them convolutions",
    "Qwen3OmniDSparkModel": "Qwen3-Omni's layers with positions in three dimensions",
    "DFlash2DraftModel": _DFLASH2,
    "Qwen3DFlash2DraftModel": _DFLASH2,
    "DominoDraftModel": _DOMINO,
    "DFlareDraftModel": "states of other layers in each layer",
    "JetSpecDraftModel": "JetSpec's causal head",
}
"""architecture -> what its drafts have."""
