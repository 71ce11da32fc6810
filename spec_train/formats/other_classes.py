"""Drafts of other projects whose arithmetic this project does not have, and what it is.

Known by the class, by the type in speculators' files, and by names of keys and tensors: some of
them have the class of a plain draft, and would be read as that draft without their own parts.
"""

from spec_train.formats.draft_files import DraftFiles

_GEMMA = "Gemma 4's layers: four norms each, keys that are also values, scaled embeddings"
_LATENT = "multi-head latent attention"
_DFLASH2 = "DFlash 2's convolutions inside the layers and its candidate selector"
_DOMINO = "Domino's recurrent head"
_LILICORR = "LiLiCorr's correlator of candidates"
_XPRESS = "XPress's refining head"
_MTP = "MTP, layers for several tokens that come with their target"

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
    "DFlash2BeamDraftModel": _DFLASH2,
    "LiLiCorrDraftModel": _LILICORR,
    "Qwen3XPressModel": _XPRESS,
    "XPressDraftModel": _XPRESS,
    "JetSpecDraftModel": "JetSpec's causal head",
}
"""architecture -> what its drafts have."""
_TYPES = {"dflash2": _DFLASH2, "xpress": _XPRESS, "mtp": _MTP}
"""speculators_model_type -> what its drafts have."""
_PARTS = {"lilicorr": _LILICORR, "xpress": _XPRESS}
"""Start of the names of keys and tensors -> the part that they belong to."""
_TABLE = "dflash_config"


def other_draft(files: DraftFiles) -> tuple[str, str] | None:
    """Return how files of another project are recognised and what they have; None if they are not.

    A key that is null, false or 0 switches nothing on.
    """
    raw = files.config
    for name in raw.get("architectures") or ():
        if name in OTHER_CLASSES:
            return f"a {name}", OTHER_CLASSES[name]
        if "MTP" in name:
            return f"a {name}", _MTP
    kind = raw.get("speculators_model_type")
    if kind in _TYPES:
        return f"speculators_model_type = {kind}", _TYPES[kind]
    nested = raw.get(_TABLE)
    pairs = nested.items() if isinstance(nested, dict) else ()
    named = [(name, f"{_TABLE}.{name}") for name, value in pairs if value]
    named += [(name, name) for name, value in raw.items() if value]
    named += [(name.removeprefix("model."), name) for name in files.tensors]
    if any(name.startswith("mtp.") for name in files.tensors):  # keys: also of copied targets
        return "tensors mtp.*", _MTP
    for name, shown in named:
        for part, what in _PARTS.items():
            if name.startswith((f"{part}_", f"{part}.")):
                return shown, what
    return None
