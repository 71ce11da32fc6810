"""EAGLE-3: convert our checkpoints to and from the forms of engines and trainers.

Our checkpoint is the flat form that vLLM, SGLang and llama.cpp read, with both keys for the layer
ids. DeepSpec's class norms queries and keys and has the full vocabulary, so it holds only such
drafts. Tensors decide what a published draft computes: configs are often copies of other configs.
"""

import logging
import re
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.terminal.config import to_dict
from spec_train.formats import speculators
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.eagle_parts import (
    eagle_tensors,
    flag,
    has_norms,
    has_own_embedding,
    layers_of,
    no_bias,
    tied_head,
    with_whole_biases,
)
from spec_train.formats.flat import (
    INPUT_KEY,
    aux_layers,
    section_of,
    shape_of,
    shape_options,
    switches_of,
    with_target_weights,
)
from spec_train.formats.known_keys import AUTOMODEL_EAGLE3, draft_keys, refuse_arithmetic
from spec_train.formats.known_keys import DEEPSPEC_EAGLE3 as DEEPSPEC
from spec_train.formats.layer_order import sort_states
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import windows_of
from spec_train.options.draft_options import Eagle3Options

OWN = "LlamaForCausalLMEagle3"
ARCHITECTURES = (
    *(OWN, "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
    *("Eagle3Qwen3ForCausalLM", DEEPSPEC, AUTOMODEL_EAGLE3),
    # vLLM has one class for these and the first two
    *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
)
WHAT = "an EAGLE-3 draft"
WITH_QK_NORM = "Eagle3Qwen3ForCausalLM"
"""The one class of vLLM for EAGLE-3 and P-EAGLE drafts whose queries and keys are normed."""
log = logging.getLogger(__name__)
_OURS, _THEIRS = "midlayer.", "layers.0."
_LATER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm\.")


def to_flat(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for vLLM and llama.cpp: they read our checkpoint unchanged."""
    return own


def to_sglang(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for SGLang, which names the input norm of the layers after the first `hidden_norm`."""
    if own.config["num_hidden_layers"] == 1:
        return own
    tensors = {_LATER_NORM.sub(r"\1hidden_norm.", name): v for name, v in own.tensors.items()}
    return DraftFiles(own.config, tensors, own.where)


def to_speculators(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for the speculators library, which vLLM reads too."""
    raw = own.config
    config = speculators.wrap(
        raw,
        "eagle3",
        "Eagle3DraftModel",
        raw["spec_train"]["options"]["ttt_steps"],
        target,
        embed_requires_grad=raw.get("train_embeddings", False),
        norm_before_residual=raw["norm_before_residual"],
        norm_before_fc=raw["norm_before_fc"],
        fc_norm=raw["fc_norm"],
        norm_output=raw["norm_output"],
        target_hidden_size=raw["target_hidden_size"],
        **{INPUT_KEY: raw[INPUT_KEY]},
    )
    # vLLM reads the number of states here and assumes 3 without it
    config[speculators.LAYER]["num_aux_hidden_states"] = len(raw["spec_train"]["layers"])
    tensors = {name.replace(_OURS, _THEIRS): value for name, value in own.tensors.items()}
    return DraftFiles(config, tensors, own.where)


def named_class(config: dict[str, Any], plain: str = OWN) -> dict[str, Any]:
    """Return the keys that name the class of a draft with this config; `plain`: without q/k norm.

    Norms of queries and keys exist only in Qwen3's classes, so `model_type` is theirs too.
    """
    if config.get("qk_norm"):
        return {"architectures": [WITH_QK_NORM], "model_type": "qwen3"}
    return {"architectures": [plain], "model_type": "llama"}


def to_deepspec(own: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write for DeepSpec, whose class always norms queries and keys and has the full vocabulary."""
    raw = own.config
    options = raw["spec_train"]["options"]
    left_out = ("eagle_config", INPUT_KEY, "mlp_bias", "norm_before_residual", "norm_before_fc")
    config = {name: value for name, value in raw.items() if name not in left_out}
    config |= {
        "architectures": [DEEPSPEC],
        "model_type": "qwen3",
        "layer_types": ["full_attention"],
        "target_layer_ids": raw["spec_train"]["layers"],
        "draft_num_hidden_layers": 1,
        "ttt_length": options["ttt_steps"],
        "step_loss_decay": options["step_decay"],
    }
    if target.num_layers is not None:
        config["num_target_layers"] = target.num_layers
    if target.name is not None:
        config["target_model_name_or_path"] = target.name
    tensors = {name.replace(_OURS, _THEIRS): value for name, value in own.tensors.items()}
    return DraftFiles(config, tensors, own.where)


def from_speculators(flat: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint.

    Its states come from vLLM, which passes them in ascending order.
    """
    raw = flat.config
    if raw.get("norm_before_residual") is None:
        log.warning(
            "warning: %s: has no norm_before_residual; it is read as true, as vLLM serves such a "
            "file (the speculators library itself assumes false). Add the key to be sure",
            flat.config_path,
        )
        raw = raw | {"norm_before_residual": True}
    return _read(DraftFiles(raw, flat.tensors, flat.where), depth, target, collected=True)


def from_flat(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    `depth` is the number of tokens it drafts per round, None if unknown.

    Raises:
        DraftError: it computes something that our EAGLE-3 does not, or weights are missing.
    """
    # ModelOpt collects states with hooks, in the order of the target's blocks
    collected = "next_layer_regular" in (files.config.get("eagle_config") or {})
    return _read(draft_keys(files), depth, target, collected)


def _read(files: DraftFiles, depth: int | None, target: TargetFacts, collected: bool) -> DraftFiles:
    raw = files.config
    if raw.get("parallel_drafting"):  # with `mask_hidden` it is read as P-EAGLE
        raise DraftError(
            f"{files.config_path}: parallel_drafting = true, but {files.weights_path} has no "
            "mask_hidden: P-EAGLE drafts have it, and EAGLE-3 does not draft in parallel. Copy the "
            "draft again, or remove the key"
        )
    shape, tensors = shape_of(files), eagle_tensors(files, WHAT)
    refuse_arithmetic(files, WHAT)
    sizes = shape["vocab_size"], shape["draft_vocab_size"]
    tensors = own_vocabulary(tensors, *sizes, files.weights_path)
    layers, tensors = sort_states(
        tensors, aux_layers(files, target), files.config_path, collected=collected
    )
    tensors, fields = with_whole_biases(tensors, files)
    fields = switches_of(files) | fields | has_norms(tensors, files)
    fields |= {
        "norm_before_residual": flag(files, "norm_before_residual"),
        "norm_output": flag(files, "norm_output", "return_hidden_post_norm"),
    }
    if fields["norm_output"] and any(_OURS in name for name in files.tensors):
        log.warning(
            "warning: %s: norm_output = true is read as engines serve it: the normed state is fed "
            "back. SpecForge up to 0.2.0 trained such drafts as if it were false (see its pull "
            "request 879); if this is one of them, set norm_output to false",
            files.config_path,
        )
    count = layers_of(tensors, files)
    tensors = _own_names(tied_head(tensors, files, sizes[0] == sizes[1]), files, count)
    shared = ("embed_tokens.weight", *(("lm_head.weight",) if sizes[0] == sizes[1] else ()))
    tensors = with_target_weights(tensors, files, target, shape["dtype"], shared)
    windows = windows_of(files, count).keys()
    config = shape | fields | windows
    config |= {
        **named_class(config),
        "num_hidden_layers": count,
        "train_embeddings": has_own_embedding(tensors, files, target),
        INPUT_KEY: as_block_inputs(layers),
    }
    options = Eagle3Options(
        num_layers=count,
        layers=",".join(map(str, layers)),
        draft_vocab_size=shape["draft_vocab_size"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        ttt_steps=depth or raw.get("ttt_length") or Eagle3Options.ttt_steps,
        step_decay=raw.get("step_loss_decay") or Eagle3Options.step_decay,
        **shape_options(config, Eagle3Options),
    )
    config["spec_train"] = section_of(files, "eagle3", layers, to_dict(options))
    return DraftFiles(config, tensors, files.where)


def _own_names(tensors: dict[str, Tensor], files: DraftFiles, count: int) -> dict[str, Tensor]:
    """Return tensors with our names of `count` layers, without biases of zero that we have not.

    One layer is `midlayer`, several are `layers.0` and so on. The one norm before the attention of
    a later layer has two names: `hidden_norm` in SGLang and TensorRT-LLM.

    Raises:
        DraftError: a later layer reads the token, or there is a bias of `fc` or of the head.
    """
    one, found = count == 1, {}
    _refuse_tokens_in_later_layers(tensors, files)
    for name, value in tensors.items():
        first = name.startswith((_OURS, _THEIRS))
        if name in ("fc.bias", "lm_head.bias"):
            if no_bias(value):
                continue
            raise DraftError(f"{files.weights_path}: {name}: {WHAT} of spec-train has no such bias")
        if not first and name.endswith(".hidden_norm.weight"):
            other = name.replace("hidden_norm", "input_layernorm")
            if other in tensors and not torch.equal(tensors[other], value):
                raise DraftError(
                    f"{files.weights_path}: {name} and {other} differ, and a later layer has one "
                    "norm before its attention; copy the draft again"
                )
            name = other
        found[name.replace(_THEIRS, _OURS) if one else name.replace(_OURS, _THEIRS)] = value
    return found


def _refuse_tokens_in_later_layers(tensors: dict[str, Tensor], files: DraftFiles) -> None:
    wide = files.config["hidden_size"] * 2
    for name, value in tensors.items():
        later = not name.startswith((_OURS, _THEIRS))
        if later and name.endswith("self_attn.q_proj.weight") and value.shape[-1] == wide:
            raise DraftError(
                f"{files.weights_path}: {name} reads the token again, as every layer of DeepSpec's "
                f"EAGLE-3 does; in {WHAT} of spec-train only the first layer reads it"
            )
