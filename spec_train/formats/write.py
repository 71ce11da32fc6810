"""Our checkpoints in the forms of engines and trainers.

Our checkpoints of EAGLE drafts are the flat form that vLLM and llama.cpp read, with both keys for
the layer ids; P-EAGLE has a name of EAGLE-3, because for `method: eagle3` vLLM puts "Eagle3" in
front of any other name, and then finds no such class. Engines share the target's embedding and head
with a block draft over the full vocabulary, so the forms for engines contain neither; llama.cpp
would tie the head to an embedding without a head. The slot that drafts first (`sample_from_anchor`)
is always written, because the defaults of readers differ. What a form cannot hold is in the table
of engines (`spec_data/models/engines.toml`).
"""

import re
from typing import Any

import torch

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import BLOCK_INPUT_KEY, INPUT_KEY
from spec_train.formats.names import MUSE, written_names, written_tensors
from spec_train.formats.target_facts import TargetFacts

EAGLE, EAGLE_SGLANG = "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
EAGLE_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
"""Keys of AutoModel's EAGLE-1/2, and ours."""
EAGLE3, PEAGLE = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
WITH_QK_NORM = "Eagle3Qwen3ForCausalLM"
"""The one class of vLLM for EAGLE-3 and P-EAGLE drafts whose queries and keys are normed."""
DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
VERSION = "0.9.0"
"""The release of the speculators library whose form is written."""
TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
_SPECULATORS_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dspark": "DSparkSpeculator",
    "dflash": "DFlashSpeculator",
}
_EAGLE3_KINDS = ("eagle3", "peagle")
_MIDLAYER, _LAYER0 = "midlayer.", "layers.0."
_LATER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm\.")


def named_class(config: dict[str, Any], plain: str) -> dict[str, Any]:
    """Return the keys that name the class of a draft with this config; `plain`: without q/k norm.

    Norms of queries and keys exist only in Qwen3's classes, so `model_type` is theirs too.
    """
    if config.get("qk_norm"):
        return {"architectures": [WITH_QK_NORM], "model_type": "qwen3"}
    return {"architectures": [plain], "model_type": "llama"}


def unchanged(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for readers of our checkpoint as it is."""
    return own


def eagle_to_sglang(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-1/2: `fc` always has a bias there, with random values if the file has none."""
    weight = own.tensors["fc.weight"]
    bias = own.tensors.get("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
    config = own.config | {"architectures": [EAGLE_SGLANG], "bias": True}
    return DraftFiles(config, own.tensors | {"fc.bias": bias}, own.where)


def eagle3_to_sglang(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3: the input norm of the layers after the first is `hidden_norm` there."""
    if own.config["num_hidden_layers"] == 1:
        return own
    tensors = {_LATER_NORM.sub(r"\1hidden_norm.", name): v for name, v in own.tensors.items()}
    return DraftFiles(own.config, tensors, own.where)


def eagle3_to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3 for DeepSpec, whose class always norms queries and keys."""
    raw = own.config
    options = raw[SECTION]["options"]
    left_out = ("eagle_config", INPUT_KEY, "mlp_bias", "norm_before_residual", "norm_before_fc")
    config = {name: value for name, value in raw.items() if name not in left_out}
    config |= {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"],
        "target_layer_ids": raw[SECTION]["layers"],
        "draft_num_hidden_layers": 1,
        "ttt_length": options["ttt_steps"],
        "step_loss_decay": options["step_decay"],
    }
    if target.num_layers is not None:
        config["num_target_layers"] = target.num_layers
    if target.name is not None:
        config["target_model_name_or_path"] = target.name
    return DraftFiles(config, _without_midlayer(own), own.where)


def blocks_to_flat(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for engines: without the target's embedding; a trained one stays."""
    if own.config.get("train_embeddings"):
        return own
    tensors = {name: value for name, value in own.tensors.items() if name != EMBEDDING}
    return DraftFiles(own.config, tensors, own.where)


def blocks_to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for DeepSpec: with copies of the target's embedding and head.

    Raises:
        DraftError: no target is given.
    """
    if target.head is None:
        raise DraftError(
            f"{own.where}: DeepSpec's checkpoints hold a copy of the target's LM head; pass "
            "--target with the target's directory"
        )
    head = target.head.detach().to("cpu", own.tensors["fc.weight"].dtype, copy=True)
    config = own.config | {"architectures": [DSPARK]}
    return DraftFiles(config, own.tensors | {HEAD: head}, own.where)


def dflash_to_transformers(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write DFlash for transformers' one class of it, which uses the target's embedding and head.

    A key that is null counts: its defaults are of Muse Glimmer.
    """
    raw = own.config
    config = {name: raw.get(name) for name in written_names("transformers")} | {
        "architectures": [MUSE],
        "model_type": "muse_glimmer_assistant",
    }
    if raw.get("sliding_window"):  # its positions see those at this distance: one more than ours
        config["sliding_window"] = raw["sliding_window"] - 1
    tensors = written_tensors("transformers", blocks_to_flat(own, target).tensors)
    return DraftFiles(config | {SECTION: raw[SECTION]}, tensors, own.where)


# -- speculators -----------------------------------------------------------------------------------


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library: a layer config inside an algorithm config.

    vLLM reads it too, and uses `verifier.name_or_path` as the target.

    Raises:
        ConfigError: the target has no name.
    """
    if target.name is None:
        raise ConfigError(
            "the speculators form contains the name of its target: pass --target (a directory, or "
            "the name under which the target will be served)"
        )
    raw, kind = own.config, own.config[SECTION]["draft"]
    if kind in _EAGLE3_KINDS:
        fields, depth = _eagle_fields(raw, kind)
        tensors = _without_midlayer(own)
    else:
        kind = "dflash" if DFLASH in raw["architectures"] else "dspark"
        fields, depth = _block_fields(raw, kind)
        tensors = blocks_to_flat(own, target).tensors
    layer = {name: raw[name] for name in written_names("speculators_layer") if name in raw}
    if kind in _EAGLE3_KINDS:  # vLLM reads both only here: else 3 states, and no norms
        layer["num_aux_hidden_states"] = len(raw[SECTION]["layers"])
    if kind == "peagle":
        layer["fc_norm"] = raw["fc_norm"]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        TYPE: kind,
        "speculators_version": VERSION,
        "architectures": [_SPECULATORS_CLASSES[kind]],
        "dtype": raw["dtype"],
        "tie_word_embeddings": False,
        "draft_vocab_size": raw["draft_vocab_size"],
        **fields,
        LAYER: layer,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.architectures),
            },
        },
        SECTION: raw[SECTION],
    }
    return DraftFiles(config, tensors, own.where)


def _eagle_fields(raw: dict[str, Any], kind: str) -> tuple[dict[str, Any], int]:
    """Return the fields of EAGLE-3 or P-EAGLE, and the tokens per verification step."""
    options, peagle = raw[SECTION]["options"], kind == "peagle"
    fields = {
        "embed_requires_grad": raw.get("train_embeddings", False),
        "norm_before_residual": raw["norm_before_residual"],
        "norm_before_fc": raw["norm_before_fc"],
        "fc_norm": raw["fc_norm"],
        "norm_output": False if peagle else raw["norm_output"],
        **({"mask_token_id": raw["mask_token_id"]} if peagle else {}),
        "target_hidden_size": raw["target_hidden_size"],
        INPUT_KEY: raw[INPUT_KEY],
    }
    return fields, options["depths" if peagle else "ttt_steps"]


def _block_fields(raw: dict[str, Any], kind: str) -> tuple[dict[str, Any], int]:
    """Return the fields of DSpark or DFlash, and the tokens per verification step."""
    fields: dict[str, Any] = {
        BLOCK_INPUT_KEY: as_block_inputs(raw[SECTION]["layers"]),
        "block_size": raw["block_size"],
        "mask_token_id": raw["mask_token_id"],
        "sample_from_anchor": raw["sample_from_anchor"],
        # without sliding layers: vLLM would make the full layers of DFlash causal by a false
        "sliding_window_non_causal": raw.get(
            "sliding_window_non_causal", not raw.get("sliding_window")
        ),
        "target_hidden_size": raw["target_hidden_size"],
        "num_target_layers": raw["num_target_layers"],
    }
    heads = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov"
    if kind == "dspark":
        fields |= {name: raw[name] for name in heads.split()}
    return fields, raw["block_size"] - (0 if raw["sample_from_anchor"] else 1)


def from_wrapped(files: DraftFiles) -> tuple[str, DraftFiles, int | None]:
    """Return the kind, the flat form and the tokens per step of files in the speculators form.

    Raises:
        DraftError: the layer config is missing.
    """
    raw = dict(files.config)
    kind = raw.pop(TYPE)
    layer = raw.pop(LAYER, None)
    if not isinstance(layer, dict):
        raise DraftError(f"{files.config_path}: {LAYER} is missing, which speculators files need")
    methods = (raw.pop("speculators_config", None) or {}).get("proposal_methods") or [{}]
    flat = {**layer, **{name: value for name, value in raw.items() if value is not None}}
    return kind, DraftFiles(flat, files.tensors, files.where), methods[0].get("speculative_tokens")


def _without_midlayer(own: DraftFiles) -> dict[str, torch.Tensor]:
    return {name.replace(_MIDLAYER, _LAYER0): value for name, value in own.tensors.items()}
