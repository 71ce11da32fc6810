"""DSpark and DFlash: write our checkpoints in the forms of engines and trainers.

Engines share the target's embedding and head with a draft over the full vocabulary, so the forms
for engines contain neither; llama.cpp would tie the head to an embedding without a head. Layer ids
are outputs of decoder blocks in all flat forms, and inputs in the speculators form. The slot that
drafts first (`sample_from_anchor`) is always written, because the defaults of readers differ.
"""

from typing import Any

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_train.formats import speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.target_facts import TargetFacts

MUSE = "MuseGlimmerAssistantModel"
"""The DFlash draft of transformers, whose files have other names (see `block_names`)."""
DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
ARCHITECTURES = (DSPARK, "DSparkDraftModel", "DSparkSpeculator")
DFLASH_ARCHITECTURES = (DFLASH, "DFlashSpeculator", "Qwen3DFlashDraftModel", MUSE)
INPUT_KEY = "aux_hidden_state_layer_ids"
_MUSE_NAMES = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
_MUSE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "layer_types"),
    *("max_position_embeddings", "block_size", "mask_token_id", "target_layer_ids", "vocab_size"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "hidden_act", "dtype"),
)
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def to_flat(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for vLLM, SGLang and llama.cpp: our checkpoint without the target's embedding.

    An embedding that was trained stays.
    """
    if own.config.get("train_embeddings"):
        return own
    tensors = {name: value for name, value in own.tensors.items() if name != EMBEDDING}
    return DraftFiles(own.config, tensors, own.where)


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library, which vLLM reads too."""
    raw = own.config
    windows = bool(raw.get("sliding_window"))
    published = DFLASH in raw["architectures"]
    fields: dict[str, Any] = {
        INPUT_KEY: as_block_inputs(raw[SECTION]["layers"]),
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": raw["sample_from_anchor"],
        # without sliding layers: vLLM would make the full layers of DFlash causal by a false
        "sliding_window_non_causal": raw.get("sliding_window_non_causal", not windows),
        "target_hidden_size": raw["target_hidden_size"],
        "num_target_layers": raw["num_target_layers"],
    }
    if not published:
        fields |= {
            "markov_rank": raw["markov_rank"],
            "markov_head_type": raw["markov_head_type"],
            "enable_confidence_head": raw["enable_confidence_head"],
            "confidence_head_with_markov": raw["confidence_head_with_markov"],
        }
    config = speculators.wrap(
        raw,
        "dflash" if published else "dspark",
        "DFlashSpeculator" if published else "DSparkSpeculator",
        raw["block_size"] - (0 if raw["sample_from_anchor"] else 1),
        target,
        **fields,
    )
    return DraftFiles(config, to_flat(own, target).tensors, own.where)


def to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for DeepSpec's trainer, whose class holds copies of the target's embedding and head.

    Raises:
        DraftError: no target is given.
    """
    raw = own.config
    if target.head is None:
        raise DraftError(
            f"{own.where}: DeepSpec's checkpoints hold a copy of the target's LM head; pass "
            "--target with the target's directory"
        )
    head = target.head.detach().to("cpu", own.tensors["fc.weight"].dtype, copy=True)
    return DraftFiles(raw | {"architectures": [DSPARK]}, own.tensors | {HEAD: head}, own.where)


def to_transformers(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for transformers, whose one DFlash class is the assistant of Muse Glimmer.

    The class takes embedding and head from the target; the table of engines says what it
    cannot hold.
    """
    raw = own.config
    config = {key: raw.get(key) for key in _MUSE_KEYS} | {  # null: its defaults are of Muse
        "architectures": [MUSE],
        "model_type": "muse_glimmer_assistant",
    }
    if raw.get("sliding_window"):
        config["sliding_window"] = raw["sliding_window"]
    tensors = {}
    for name, value in to_flat(own, target).tensors.items():
        start = next((ours for ours in _MUSE_NAMES if name.startswith(ours)), "")
        tensors[_MUSE_NAMES.get(start, "") + name.removeprefix(start)] = value
    return DraftFiles(config | {SECTION: raw[SECTION]}, tensors, own.where)
