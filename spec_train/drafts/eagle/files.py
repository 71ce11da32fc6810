"""The files of an EAGLE-1/2 draft, and what they share with those of EAGLE-3 and P-EAGLE.

Tensors decide what a published draft computes: configs are often copies of other configs. Our
checkpoint is the flat form that vLLM and llama.cpp read.
"""

import logging
import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat_config import (
    options_of,
    refuse_set,
    section_of,
    shape_of,
    switches_of,
    with_sizes,
)
from spec_train.formats.kind_files import KindFiles, Source, every_kind, unchanged
from spec_train.formats.names import (
    INPUT_KEY,
    NAMES,
    NESTED,
    copied_from_target,
    count_layers,
    refuse_arithmetic,
    renamed,
    table_of,
)
from spec_train.formats.shared_weights import own_tensors
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.windows import Windows, windows_of

log = logging.getLogger(__name__)

SHARED = "LlamaForCausalLM"
"""SafeAILab's name of EAGLE-1/2 and of EAGLE-3."""
NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")
"""Keys of AutoModel, and ours."""
AUTOMODEL_EAGLE3, _LAYER_IDS = "LlamaEagle3DraftModel", (NESTED, INPUT_KEY)
BIAS = "fc.bias"
_LAYER = r"(?:midlayer|layers\.\d+)"
_PROJECTIONS = {
    "attention_bias": r"self_attn\.(?:q_proj|k_proj|v_proj|o_proj)",
    "mlp_bias": r"mlp\.(?:gate_proj|up_proj|down_proj)",
}
NORM_KEYS = {  # field: the keys that name it; the later ones are aliases of SGLang and of a fork
    "fc_norm": ("fc_norm", "use_aux_norm", "fc_norm_perslice"),
    "norm_before_fc": ("norm_before_fc",),
}
_WITH_NORMS = {"Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model", "PeagleQwen3ForCausalLM"}
"""Classes of EAGLE-3 and P-EAGLE that norm queries and keys; most files have no key for it."""
_TENSORS = {  # start of a name (pattern): ours
    r"aux_norm_low\.": "fc_norm.0.",  # SGLang's aliases
    r"aux_norm_mid\.": "fc_norm.1.",
    r"aux_norm_high\.": "fc_norm.2.",
    r"fc_norm_perslice\.": "fc_norm.",  # forks of DeepSpec
    r"fc_norm\.weight$": "input_norm.weight",  # the same: one norm over all states
}
_ONE_NORM = "fc_norm.weight"
"""In forks of DeepSpec, of which `fc_norm` says that one norm is over all states."""
_REFUSED = {  # part of a name (pattern): what drafts here do not have
    r"\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj)\.": "multi-head latent attention (MLA)",
    r"\.(experts|shared_experts?|block_sparse_moe)\.|mlp\.(router|gate)\.": "a mixture of experts",
    r"\.lora_[AB]\.": "LoRA adapters; merge them into the weights",
    "parallel_draft_heads|medusa": "parallel (Medusa) heads",
    r"self_attn\.sinks$": "attention sinks",
    r"self_attn\.(g_proj|gate_proj)\.": "a gate on the attention's output",
    r"(embed|embedding|hidden_states|lm_head)_layernorm\.": "the extra norms of HASS",
    "additional_fc": "a second input projection",
}


def draft_keys(files: DraftFiles) -> DraftFiles:
    """Return files with the keys that describe the draft, if the config is a copy of a target's.

    `num_hidden_layers` becomes the number of layers in the file, and `num_target_layers` what a
    copy of the target's config says. Files of other trainers are unchanged.
    """
    writer = copied_from_target(files)
    if writer is None:
        return files
    raw = keys_of_copy(files, writer).config | {"num_hidden_layers": count_layers(files.tensors)}
    if writer == AUTOMODEL_EAGLE3 and not any(name in raw for name in _LAYER_IDS):
        log.warning(
            "warning[assumed]: %s: AutoModel writes no layer ids; its default is assumed, "
            "the outputs "
            "of blocks 1, L/2-1 and L-4. If aux_layer_ids were given to it, add the key "
            '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [...]} with them',
            files.config_path,
        )
    return replace(files, config=raw)


def own_keys(files: DraftFiles) -> DraftFiles:
    """Return files with the keys that describe the draft, which may be a copy of a target's."""
    writer = copied_from_target(files)
    return files if writer is None else keys_of_copy(files, writer)


def keys_of_copy(files: DraftFiles, writer: str) -> DraftFiles:
    """Return files with the keys that describe the draft, of a config that `writer` has copied.

    Its number of layers is that of the target, but for P-EAGLE.
    """
    raw = files.config
    own = next(one.copies[writer] for one in every_kind().values() if writer in one.copies)
    names = f"{NAMES['of_target_copies']['shape']} {own}".split()
    result = {name: raw[name] for name in (*names, SECTION) if name in raw}
    if writer == AUTOMODEL_EAGLE3:  # of P-EAGLE the number is the draft's own
        count = "num_hidden_layers" if raw.get("parallel_drafting") else "num_target_layers"
        result[count] = raw.get("num_hidden_layers")
        result |= {name: raw[name] for name in _LAYER_IDS if name in raw}
    return replace(files, config=result)


def plain_tensors(files: DraftFiles, what: str) -> dict[str, Tensor]:
    """Return the tensors of an EAGLE draft under our names; refuse parts that `what` has not."""
    for name in files.tensors:
        for pattern, words in _REFUSED.items():
            if re.search(pattern, name):
                raise files.bad_weights(
                    f"{name}: {words} cannot be represented: {what} of spec-train has none"
                )
    return renamed(files, _TENSORS)


def with_all_biases(
    tensors: dict[str, Tensor], files: DraftFiles
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Return tensors in which all projections of a kind have a bias or none has, and which do.

    A missing bias among others is zero: SafeAILab's drafts for Qwen2 have biases of queries, keys
    and values only. The fields are `attention_bias` and `mlp_bias`.
    """
    result, fields = dict(tensors), {}
    for field, parts in _PROJECTIONS.items():
        pattern = re.compile(rf"({_LAYER}\.{parts})\.weight")
        names = [m[1] for name in tensors if (m := pattern.fullmatch(name))]
        fields[field] = any(f"{name}.bias" in tensors for name in names)
        if files.config.get(field) and not fields[field]:
            raise files.bad_config(
                f"{field} = true, but {files.weights_path} has no such bias; copy the draft again, "
                "or set it to false if it was trained without"
            )
        for name in names if fields[field] else ():
            weight = tensors[f"{name}.weight"]
            result.setdefault(f"{name}.bias", weight.new_zeros(weight.shape[0]))
    return result, fields


def norms_of(tensors: dict[str, Tensor], files: DraftFiles) -> dict[str, bool]:
    """Return the fields `fc_norm`, `norm_before_fc` and `qk_norm`, as the tensors say."""
    tables = (files.config, table_of(files.config, NESTED))
    each = any(name.startswith("fc_norm.") for name in tensors)
    fields = {"fc_norm": each, "norm_before_fc": "input_norm.weight" in tensors}
    for field, keys in NORM_KEYS.items():
        values = [table[key] for table in tables for key in keys if key in table]
        stated = any(values)
        one_norm = stated and any(name.endswith(_ONE_NORM) for name in files.tensors)
        if any(value is not None for value in values) and stated != fields[field] and not one_norm:
            raise files.bad_config(
                f"{field} = {str(stated).lower()}, but the norms in {files.weights_path} say "
                "otherwise; copy the draft again, or correct the key"
            )
    normed, layers = (
        [name for name in tensors if re.fullmatch(rf"{_LAYER}\.self_attn\.{part}\.weight", name)]
        for part in ("q_norm", "q_proj")
    )
    if normed and len(normed) != len(layers):
        raise files.bad_weights(
            f"{len(normed)} of {len(layers)} layers norm queries and keys; all layers of our "
            "drafts do, or none does"
        )
    return fields | {"qk_norm": bool(normed)}


def layer_count(tensors: dict[str, Tensor], files: DraftFiles) -> int:
    """Return the number of layers in the file, which the config may not deny."""
    count, stated = count_layers(tensors), files.config.get("num_hidden_layers")
    if stated not in (None, count):
        raise files.bad_config(
            f"num_hidden_layers = {stated}, but {files.weights_path} has {count} layers; copy the "
            "draft again, or correct the key"
        )
    return count


def no_bias(bias: Tensor | None) -> bool:
    """Return whether a bias changes nothing."""
    return bias is None or not bool(torch.any(bias))


def _refuse_parts(files: DraftFiles) -> None:
    """Refuse an EAGLE-1/2 of a shape that is read, but that no option of a new draft makes."""
    if odd := [name for name in ("bias", *NORMS) if files.config.get(name)]:
        raise files.bad_config(
            f"{', '.join(odd)}: no option makes a new draft with it; --init-from goes on from one"
        )


def stated_windows(windows: Windows) -> dict[str, Any]:
    """Return the options of sliding layers."""
    if not windows.layer_types:
        return {}
    types = ",".join(windows.layer_types)
    return {"sliding_window": windows.sliding_window, "layer_types": types}


def normed_by_class(raw: dict[str, Any], library: bool) -> bool:
    """Return whether the class of an EAGLE-3 or P-EAGLE norms queries and keys.

    Most files have no key for it; those of a `library`, speculators, have the type of the layer.
    """
    normed = library and raw.get("model_type") == "qwen3"
    return normed or not _WITH_NORMS.isdisjoint(raw.get("architectures") or ())


def stated_chains(files: DraftFiles, what: str, library: bool) -> dict[str, Any]:
    """Return the options that the config of a draft without blocks states."""
    raw = files.config
    refuse_arithmetic(files, what)
    count, named = raw.get("num_hidden_layers"), library or "architectures" in raw
    return {
        "num_layers": count,
        "step_decay": raw.get("step_loss_decay"),
        **stated_windows(windows_of(files, count or 1)),
        "qk_norm": raw.get("qk_norm", normed_by_class(raw, library) if named else None),
    }


def _stated(files: DraftFiles, own: set[str], library: bool) -> dict[str, Any]:
    found = stated_chains(files, FILES.what, library)
    _refuse_parts(files)
    return found


# -- EAGLE-1/2 itself ------------------------------------------------------------------------------


def _read(files: DraftFiles, target: TargetFacts, source: Source) -> DraftFiles:
    """EAGLE-1/2 reads the target's final hidden states and has the whole vocabulary."""
    files, what = draft_keys(files), FILES.what
    refuse_arithmetic(files, what, but=NORMS)
    files = with_sizes(files)
    norms = ("norm_before_residual", "norm_output", "return_hidden_post_norm")
    refuse_set(files, what, norms)
    shape, tensors = shape_of(files), plain_tensors(files, what)
    tensors, biases = with_all_biases(tensors, files)
    bias = tensors.get(BIAS)
    if files.config.get("bias") and bias is None:
        raise files.bad_config(
            f"bias = true, but {files.weights_path} has no {BIAS}, for which SGLang uses random "
            "values; copy the draft again, or set it to false"
        )
    if no_bias(bias):
        tensors.pop(BIAS, None)
    count = layer_count(tensors, files)
    config = shape | switches_of(files) | biases | windows_of(files, count).keys()
    config |= {
        "qk_norm": norms_of(tensors, files)["qk_norm"],
        "architectures": [FILES.classes[0]],
        "model_type": "llama",
        "num_hidden_layers": count,
        "bias": BIAS in tensors,
        NORMS[0]: "layers.0.input_layernorm.weight" in tensors,
        NORMS[1]: "norm.weight" in tensors,
    }
    options = options_of("eagle", config, (), depth=source.depth or None)
    config[SECTION] = section_of(files, "eagle", (), options)
    tensors = own_tensors(tensors, files, target, shape["dtype"], target_head=True)
    return DraftFiles(config, tensors, files.where)


def _to_sglang(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-1/2: `fc` always has a bias there, with random values if the file has none.

    The key `bias` is false: there it would give the attention projections biases of random values.
    """
    weight = ours.tensors["fc.weight"]
    bias = ours.tensors.get("fc.bias", torch.zeros(weight.shape[0], dtype=weight.dtype))
    config = ours.config | {"architectures": ["LlamaForCausalLMEagle"], "bias": False}
    return DraftFiles(config, ours.tensors | {"fc.bias": bias}, ours.where)


FILES = KindFiles(
    title="EAGLE",
    what="an EAGLE-1/2 draft",
    classes=(
        *("EagleLlamaForCausalLM", "LlamaForCausalLMEagle", SHARED, "LlamaEagleDraftModel"),
        "Qwen2ForCausalLMEagle",  # SGLang's, of which the attention has biases
    ),
    shared_class=True,
    own_keys=own_keys,
    stated=_stated,
    read=_read,
    forms={"hf": unchanged, "vllm": unchanged, "sglang": _to_sglang},
    copies={"LlamaEagleDraftModel": "mlp_bias quantization_config"},
    others={
        "EagleCohereForCausalLM": "Cohere's layers: attention and MLP side by side, norms that "
        "subtract the mean",
        "EagleLlama4ForCausalLM": "Llama 4's layers: experts, and queries that are scaled by their "
        "position",
        "EagleMiniCPMForCausalLM": "MiniCPM's scaled embeddings, layers and states",
        **dict.fromkeys(
            ("EagleMistralForCausalLM", "MistralForCausalLMEagle"),
            "Mistral's layers, whose queries can be scaled by their position",
        ),
        **dict.fromkeys(
            ("EagleMistralLarge3ForCausalLM", "MistralLarge3ForCausalLMEagle"),
            "multi-head latent attention",
        ),
    },
)
