"""Our checkpoints in the forms of engines and trainers.

Our checkpoints of EAGLE drafts are the flat form that vLLM and llama.cpp read, with both keys for
the layer ids; P-EAGLE has a name of EAGLE-3, because for `method: eagle3` vLLM puts "Eagle3" in
front of any other name, and then finds no such class. It is one that SGLang, which would feed the
draft its own states, does not use. Engines share the target's embedding and head
with a block draft over the full vocabulary, so the forms for engines contain neither; llama.cpp
would tie the head to an embedding without a head. The slot that drafts first (`sample_from_anchor`)
is always written, because the defaults of readers differ. What a form cannot hold is in the table
of engines (`spec_data/models/engines.toml`).
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from spec_data.shards.errors import ConfigError, DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE_SGLANG,
    EMBEDDING,
    FORM,
    HEAD,
    INPUT_KEY,
    LAYER,
    MUSE,
    STAGE_KEYS,
    TYPE,
    written_names,
    written_tensors,
)
from spec_train.formats.preflight import REFUSE, Subject, of_engine
from spec_train.formats.target_facts import TargetFacts

VERSION = "0.9.0"
"""The release of the speculators library whose form is written."""
_SPECULATORS_CLASSES = {
    "eagle3": "Eagle3DraftModel",
    "peagle": "PEagleDraftModel",
    "dspark": "DSparkSpeculator",
    "dflash": "DFlashSpeculator",
    "dflash2": DFLASH2,
}
_EAGLE3_KINDS = ("eagle3", "peagle")
_MIDLAYER, _LAYER0 = "midlayer.", "layers.0."
_LATER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm\.")


def _unchanged(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    return ours  # for readers of our checkpoint as it is


def _eagle_to_sglang(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-1/2: `fc` always has a bias there, with random values if the file has none.

    The key `bias` is false: there it would give the attention projections biases of random values.
    """
    weight = ours.tensors["fc.weight"]
    bias = ours.tensors.get("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
    config = ours.config | {"architectures": [EAGLE_SGLANG], "bias": False}
    return DraftFiles(config, ours.tensors | {"fc.bias": bias}, ours.where)


def _eagle3_to_sglang(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3: the input norm of the layers after the first is `hidden_norm` there."""
    if ours.config["num_hidden_layers"] == 1:
        return ours
    tensors = {_LATER_NORM.sub(r"\1hidden_norm.", name): v for name, v in ours.tensors.items()}
    return DraftFiles(ours.config, tensors, ours.where)


def _eagle3_to_deepspec(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3 for DeepSpec, whose class always norms queries and keys."""
    raw = ours.config
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
    return DraftFiles(config, _without_midlayer(ours), ours.where)


def _blocks_to_flat(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for engines: without the target's embedding; a trained one stays."""
    if ours.config.get("train_embeddings"):
        return ours
    tensors = {name: value for name, value in ours.tensors.items() if name != EMBEDDING}
    return DraftFiles(ours.config, tensors, ours.where)


def _blocks_to_deepspec(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for DeepSpec: with copies of the given target's embedding and head."""
    if target.head is None:
        raise DraftError(
            f"{ours.where}: DeepSpec's checkpoints hold a copy of the target's LM head; pass "
            "--target with the target's directory"
        )
    head = target.head.detach().to("cpu", ours.tensors["fc.weight"].dtype, copy=True)
    config = ours.config | {"architectures": [DSPARK]}
    return DraftFiles(config, ours.tensors | {HEAD: head}, ours.where)


def _dflash_to_transformers(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write DFlash for transformers' one class of it, which uses the target's embedding and head.

    A key that is null counts: its defaults are of Muse Glimmer.
    """
    raw = ours.config
    config = {name: raw.get(name) for name in written_names("transformers")} | {
        "architectures": [MUSE],
        "model_type": "muse_glimmer_assistant",
    }
    if raw.get("sliding_window"):  # its positions see those at this distance: one more than ours
        config["sliding_window"] = raw["sliding_window"] - 1
    tensors = written_tensors("transformers", _blocks_to_flat(ours, target).tensors)
    return DraftFiles(config | {SECTION: raw[SECTION]}, tensors, ours.where)


# -- speculators -----------------------------------------------------------------------------------


def _to_speculators(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library: a layer config inside an algorithm config.

    vLLM reads it too, and uses `verifier.name_or_path` as the target. One without a name is a
    ConfigError.
    """
    if target.name is None:
        raise ConfigError(
            "the speculators form contains the name of its target: pass --target (a directory, or "
            "the name under which the target will be served)"
        )
    raw, kind = ours.config, ours.config[SECTION]["draft"]
    if kind in _EAGLE3_KINDS:
        fields, depth = _eagle_fields(raw, kind)
        tensors = _without_midlayer(ours)
    else:
        kind = {DFLASH: "dflash", DFLASH2: "dflash2"}.get(raw["architectures"][0], "dspark")
        fields, depth = _block_fields(raw, kind)
        tensors = _blocks_to_flat(ours, target).tensors
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
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        SECTION: raw[SECTION],
    }
    return DraftFiles(config, tensors, ours.where)


def _eagle_fields(raw: dict[str, Any], kind: str) -> tuple[dict[str, Any], int]:
    """Return the fields of EAGLE-3 or P-EAGLE, and the tokens per verification step."""
    options, peagle = raw[SECTION]["options"], kind == "peagle"
    fields = {
        "embed_requires_grad": raw.get("train_embeddings", False),
        **{name: raw[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "norm_output": False if peagle else raw["norm_output"],
        **({"mask_token_id": raw["mask_token_id"]} if peagle else {}),
        **{name: raw[name] for name in ("target_hidden_size", INPUT_KEY)},
    }
    return fields, options["depths" if peagle else "ttt_steps"]


def _block_fields(raw: dict[str, Any], kind: str) -> tuple[dict[str, Any], int]:
    """Return the fields of a block draft, and the tokens per verification step."""
    fields: dict[str, Any] = {
        BLOCK_INPUT_KEY: as_block_inputs(raw[SECTION]["layers"]),
        **{name: raw[name] for name in ("block_size", "mask_token_id", "sample_from_anchor")},
        # without sliding layers: vLLM would make the full layers of DFlash causal by a false
        "sliding_window_non_causal": raw.get(
            "sliding_window_non_causal", not raw.get("sliding_window")
        ),
        **{name: raw[name] for name in ("target_hidden_size", "num_target_layers")},
    }
    heads = "markov_rank markov_head_type enable_confidence_head confidence_head_with_markov"
    if kind != "dflash":
        names = STAGE_KEYS.get(kind, heads.split())
        fields |= {name: raw[name] for name in names}
    return fields, raw["block_size"] - (0 if raw["sample_from_anchor"] else 1)


def _without_midlayer(ours: DraftFiles) -> dict[str, torch.Tensor]:
    return {name.replace(_MIDLAYER, _LAYER0): value for name, value in ours.tensors.items()}


# -- forms -----------------------------------------------------------------------------------------

TARGET = "target"
"""A copy of the target with the trained MTP block in it; `evaluation.exporting` writes it."""
Writer = Callable[[DraftFiles, TargetFacts], DraftFiles]
"""(our checkpoint, its target) -> files of another form."""
_BLOCKS: dict[str, Writer] = {
    "hf": _unchanged,
    "vllm": _blocks_to_flat,
    "sglang": _blocks_to_flat,
    "speculators": _to_speculators,
    "deepspec": _blocks_to_deepspec,
}
WRITERS: dict[str, dict[str, Writer]] = {
    "eagle": {"hf": _unchanged, "vllm": _unchanged, "sglang": _eagle_to_sglang},
    "eagle3": {
        "hf": _unchanged,
        "vllm": _unchanged,
        "sglang": _eagle3_to_sglang,
        "speculators": _to_speculators,
        "deepspec": _eagle3_to_deepspec,
    },
    "peagle": {"hf": _unchanged, "vllm": _unchanged, "speculators": _to_speculators},
    "dspark": _BLOCKS,
    "dflash": {**_BLOCKS, "transformers": _dflash_to_transformers},
    "dflash2": {name: writer for name, writer in _BLOCKS.items() if name != "deepspec"},
    "domino": {name: _BLOCKS[name] for name in ("hf", "sglang")},
    "lilicorr": {name: _BLOCKS[name] for name in ("hf", "vllm", "sglang")},
    "xpress": {name: _BLOCKS[name] for name in ("hf", "vllm")},
    "mtp": {"hf": _unchanged, TARGET: _unchanged},
}
"""By kind of draft and form."""
_OWN_CLASS = ("deepspec", "transformers")
"""Forms of one program each; what its class does not have, such files cannot hold."""


_OUTSIDE: dict[str, Writer] = {"hf": _unchanged}


def writers_of(section: Mapping[str, Any]) -> dict[str, Writer]:
    """Return the writers of a draft by form; one with code from outside has our own form alone.

    `section` is that of this project in its config.json.
    """
    return _OUTSIDE if section.get("code") else WRITERS.get(section["draft"], _OUTSIDE)


def write_form(ours: DraftFiles, form: str, target: TargetFacts) -> DraftFiles:
    """Convert our checkpoint to the form `form`.

    Raises:
        DraftError: this kind of draft has no such form, or the class of the form cannot hold it.
    """
    writers = writers_of(ours.config[SECTION])
    if form not in writers:
        raise DraftError(
            f"{ours.where}: there is no {form} form of {ours.config[SECTION]['draft']} drafts; use "
            f"one of {', '.join(writers)}"
        )
    if form in _OWN_CLASS:
        findings = of_engine(Subject(ours, target, form), form)
        if faults := [finding.text for finding in findings if finding.level == REFUSE]:
            raise DraftError(f"{ours.where}: the {form} form cannot hold it: {'; '.join(faults)}")
    files = writers[form](ours, target)
    if files is ours:
        return ours
    marked = {**files.config[SECTION], FORM: form}
    return DraftFiles({**files.config, SECTION: marked}, files.tensors, files.where)


def with_facts_in(files: DraftFiles, target: TargetFacts) -> TargetFacts:
    """Return a target's facts; its class and number of blocks, if unknown, as the files say."""
    raw = files.config
    verifier = (raw.get("speculators_config") or {}).get("verifier") or {}
    blocks = raw.get("target_num_hidden_layers") or raw.get("num_target_layers")
    return replace(
        target,
        architectures=target.architectures or tuple(verifier.get("architectures") or ()),
        num_layers=target.num_layers or blocks,
    )
