"""The files of a DFlash draft, also in the form of transformers' one class of it."""

from collections.abc import Mapping
from typing import Any

from spec_train.drafts.block.files import (
    BLOCK_FORMS,
    DFLASH,
    MUSE,
    BlockFiles,
    block_keys,
    of_plain_speculators,
    read_block,
    stated_block,
    to_engines,
)
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.target_facts import TargetFacts

_TRANSFORMERS_KEYS = """
hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
rms_norm_eps rope_parameters layer_types max_position_embeddings block_size mask_token_id
target_layer_ids vocab_size bos_token_id eos_token_id pad_token_id hidden_act dtype"""
_TABLE = ("mask_token_id", "target_layer_ids", "block_size")
_TRANSFORMERS_TENSORS = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
"""Start of our name: start of theirs."""


def _to_transformers(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for transformers, which uses the target's embedding and head.

    A key that is null counts: its defaults are of Muse Glimmer. vLLM and SGLang know its class, and
    look for the ids of layers in the table `dflash_config`.
    """
    raw = ours.config
    config = {name: raw.get(name) for name in _TRANSFORMERS_KEYS.split()} | {
        "architectures": [MUSE],
        "model_type": "muse_glimmer_assistant",
        "dflash_config": {name: raw[name] for name in _TABLE} | {"causal": False},
    }
    if raw.get("sliding_window"):  # its positions see those at this distance: one more than ours
        config["sliding_window"] = raw["sliding_window"] - 1
    tensors = {}
    for name, value in to_engines(ours, target).tensors.items():
        start = next((one for one in _TRANSFORMERS_TENSORS if name.startswith(one)), "")
        tensors[_TRANSFORMERS_TENSORS.get(start, "") + name.removeprefix(start)] = value
    return DraftFiles(config | {SECTION: raw[SECTION]}, tensors, ours.where)


def _served_as(config: Mapping[str, Any]) -> str | None:
    """In the layout anchor, engines serve it as DSpark."""
    return "dspark" if config["sample_from_anchor"] else None


def _refined(raw: Mapping[str, Any]) -> str | None:
    """With a Markov or a confidence head, it is a DSpark draft of the mask layout."""
    heads = raw.get("markov_rank") or raw.get("enable_confidence_head")
    return "dspark" if heads else None


FILES = BlockFiles(
    title="DFlash",
    what="a DSpark or DFlash draft",
    classes=(DFLASH, "DFlashSpeculator", "Qwen3DFlashDraftModel", MUSE),
    written=DFLASH,
    refined=_refined,
    own_keys=block_keys,
    stated=stated_block("dflash"),
    read=read_block,
    speculators=of_plain_speculators,
    absent={"sample_from_anchor": False, "block_size": 8},
    forms={**BLOCK_FORMS, "transformers": _to_transformers},
    aliases={
        "causal": "is_causal",  # z-lab, ModelOpt, vLLM
        "causal_head": "is_causal",  # JetSpec
        "target_num_hidden_layers": "num_target_layers",  # TorchSpec's is another number
    },
    neutral={"projector_type": ("dflash", "dspark", "dflash2")},
    others={
        "KimiK3DFlashDraftModel": "multi-head latent attention",
        "DFlashLagunaForCausalLM": "Laguna's layers, with gates behind the attention",
        "DFlareDraftModel": "states of other layers in each layer",
        "JetSpecDraftModel": "JetSpec's causal head in an unreleased form",
    },
    served_as=_served_as,
)
