"""The files of an EAGLE-3 draft, and what they share with those of P-EAGLE.

Our checkpoint is the flat form that vLLM and llama.cpp read, with both keys for the layer ids.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.layer_ids import as_block_inputs, from_block_inputs, low_middle_high
from spec_train.drafts.eagle.files import (
    BIAS,
    NORM_KEYS,
    SHARED,
    draft_keys,
    layer_count,
    no_bias,
    norms_of,
    own_keys,
    plain_tensors,
    stated_chains,
    with_all_biases,
)
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat_config import (
    options_of,
    section_of,
    shape_of,
    sort_states,
    stated_vocabulary,
    switches_of,
    with_sizes,
)
from spec_train.formats.kind_files import KindFiles, Source, unchanged
from spec_train.formats.names import (
    EMBEDDING,
    HEAD,
    INPUT_KEY,
    MASK_KEYS,
    NESTED,
    refuse_arithmetic,
    table_of,
)
from spec_train.formats.shared_weights import has_own_embedding, own_tensors
from spec_train.formats.speculators import speculators_files
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import windows_of

log = logging.getLogger(__name__)

MASK_STATES = "mask_hidden"
"""Tensor of P-EAGLE: the learned states of unknown tokens."""
WITH_QK_NORM = "Eagle3Qwen3ForCausalLM"  # vLLM's one class whose queries and keys are normed
_OF_VLLM = re.compile(r"(Eagle3|Peagle)\w+ForCausalLM$").match
_FED_BACK = {
    "norm_before_residual": ("norm_before_residual",),
    "norm_output": ("norm_output", "return_hidden_post_norm"),
}
_FIRST = ("midlayer.", "layers.0.")
_MIDLAYER, _LAYER0 = _FIRST
_LATER_NORM = re.compile(r"^(layers\.[1-9]\d*\.)input_layernorm\.")
_WIDE = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"}


def named_class(config: dict[str, Any], plain: str) -> dict[str, Any]:
    """Return the keys that name the class of a draft with this config; `plain`: without q/k norm.

    Norms of queries and keys exist only in Qwen3's classes, so `model_type` is theirs too.
    """
    if config.get("qk_norm"):
        return {"architectures": [WITH_QK_NORM], "model_type": "qwen3"}
    return {"architectures": [plain], "model_type": "llama"}


# -- reading ---------------------------------------------------------------------------------------


def _claims(files: DraftFiles) -> bool:
    """Return whether files under a name that EAGLE-1/2 has too are of this kind."""
    tensors = files.tensors.keys()
    ours = "fc.weight" in tensors and MASK_STATES not in tensors and bool(_WIDE & tensors)
    return ours and SHARED in (files.config.get("architectures") or [])


def _of_speculators(files: DraftFiles, depth: int | None) -> tuple[str, DraftFiles]:
    """Return a flat file; vLLM serves one without `norm_before_residual` as true."""
    raw = dict(files.config)
    if raw.get("norm_before_residual") is None:
        log.warning(
            "warning[assumed]: %s: has no norm_before_residual; it is read as true, as vLLM serves "
            "such a file (the speculators library itself assumes false). Add the key to be sure",
            files.config_path,
        )
        raw.pop("norm_before_residual", None)
    return "eagle3", replace(files, config={**FILES.served_absent, **raw})


def _claims_config(raw: Mapping[str, Any]) -> bool:
    """Return whether a config under a name that EAGLE-1/2 has too is of this kind."""
    layers = raw.get("draft_vocab_size") or raw.get(INPUT_KEY) or raw.get(NESTED)
    return SHARED in (raw.get("architectures") or ()) and bool(layers)


def _refined(raw: Mapping[str, Any]) -> str | None:
    """P-EAGLE may have this kind's class, and then a mask token or keys of its own."""
    masked = any(raw.get(name) is not None for name in MASK_KEYS)
    parallel = any(raw.get(name) for name in ("parallel_drafting", "num_depths"))
    return "peagle" if masked or parallel else None


def _stated_norms(files: DraftFiles, named: bool) -> dict[str, Any]:
    """Return the norms of EAGLE-3's first layer; one that a file of a known class lacks is none."""
    tables = (files.config, table_of(files.config, NESTED))
    found: dict[str, Any] = {}
    for field, keys in NORM_KEYS.items():
        said = [table[key] for table in tables for key in keys if table.get(key) is not None]
        found[field] = any(said) if said or named else None
    for field, keys in _FED_BACK.items():
        if named or any(table.get(key) is not None for table in tables for key in keys):
            found[field] = _flag(files, *keys)
    return found


def _stated_layers(files: DraftFiles) -> dict[str, Any]:
    """Return the captured layers that a file names."""
    raw = files.config
    nested = table_of(raw, NESTED).get(INPUT_KEY)
    if not (raw.get(INPUT_KEY) or nested or raw.get("target_layer_ids")):
        return {}
    ids = sorted(set(_aux_layers(files, TargetFacts())))
    return {"layers": ",".join(map(str, ids))}


def stated_aux(files: DraftFiles, what: str, library: bool) -> dict[str, Any]:
    """Return the options that the config of a draft over captured layers states."""
    raw, found = files.config, stated_chains(files, what, library)
    named = library or "architectures" in raw
    found |= _stated_norms(files, named) | _stated_layers(files)
    return found | stated_vocabulary(raw, named)


def _stated(files: DraftFiles, own: set[str], library: bool) -> dict[str, Any]:
    found = stated_aux(files, FILES.what, library)
    return found | {"ttt_steps": files.config.get("ttt_length")}


@dataclass(frozen=True)
class Found:
    """What files of EAGLE-3 or P-EAGLE hold, under our names."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    layers: tuple[int, ...]


def plain_files(files: DraftFiles, what: str) -> DraftFiles:
    """Return files with the keys and sizes of the draft; refuse arithmetic that `what` has not."""
    files = draft_keys(files)
    refuse_arithmetic(files, what)
    return with_sizes(files)


def found_in(files: DraftFiles, target: TargetFacts, source: Source, what: str) -> Found:
    """Read the config and the tensors of a draft over captured layers."""
    # ModelOpt collects states with hooks, in the order of the target's blocks
    collected = source.collected or "next_layer_regular" in table_of(files.config, NESTED)
    shape, tensors = shape_of(files), plain_tensors(files, what)
    own_embedding = has_own_embedding(tensors, files, target)
    vocab, draft_vocab = shape["vocab_size"], shape["draft_vocab_size"]
    tensors = own_vocabulary(tensors, vocab, draft_vocab, files.weights_path)
    layers, tensors = sort_states(
        tensors, _aux_layers(files, target), files.config_path, collected=collected
    )
    tensors, biases = with_all_biases(tensors, files)
    count = layer_count(tensors, files)
    config = shape | switches_of(files) | biases | norms_of(tensors, files)
    config |= windows_of(files, count).keys() | {
        "norm_before_residual": _flag(files, "norm_before_residual"),
        "norm_output": _flag(files, "norm_output", "return_hidden_post_norm"),
        "num_hidden_layers": count,
        "train_embeddings": own_embedding,
        INPUT_KEY: as_block_inputs(layers),
    }
    return Found(config, tensors, layers)


def our_files(
    kind: str, what: str, files: DraftFiles, target: TargetFacts, found: Found, **given: Any
) -> DraftFiles:
    """Return our checkpoint of what files hold; `given` are options that the files say."""
    config, layers = found.config, found.layers
    options = options_of(kind, config, layers, **given)
    section = section_of(files, kind, layers, options)
    full, count = config["vocab_size"] == config["draft_vocab_size"], config["num_hidden_layers"]
    tensors = _with_tied_head(found.tensors, files, full)
    names = _FIRST if kind == "eagle3" and count == 1 else _FIRST[::-1]
    tensors = _own_names(tensors, files, names, what)
    tensors = own_tensors(tensors, files, target, config["dtype"], own_head=full)
    return DraftFiles(config | {SECTION: section}, tensors, files.where)


def _read(files: DraftFiles, target: TargetFacts, source: Source) -> DraftFiles:
    files, what = plain_files(files, FILES.what), FILES.what
    if files.config.get("parallel_drafting"):  # with `mask_hidden` it is read as P-EAGLE
        raise files.bad_config(
            f"parallel_drafting = true, but {files.weights_path} has no {MASK_STATES}: P-EAGLE "
            "drafts have it, and EAGLE-3 does not draft in parallel. Copy the draft again, or "
            "remove the key"
        )
    found, raw = found_in(files, target, source, what), files.config
    if found.config["norm_output"] and any("midlayer." in name for name in files.tensors):
        log.warning(
            "warning[assumed]: %s: norm_output = true is read as engines serve it: the normed "
            "state is fed back. SpecForge up to 0.2.0 trained such drafts as if it were false "
            "(see its pull request 879); if this is one of them, set norm_output to false",
            files.config_path,
        )
    found.config.update(named_class(found.config, FILES.classes[0]))
    return our_files(
        *("eagle3", what, files, target, found),
        ttt_steps=source.depth or raw.get("ttt_length") or None,
        step_decay=raw.get("step_loss_decay") or None,
    )


def _aux_layers(files: DraftFiles, target: TargetFacts) -> tuple[int, ...]:
    """Return the layer ids (outputs of decoder blocks) of an EAGLE-3 style config, in its order.

    The top-level key holds inputs of blocks, as vLLM and llama.cpp read it. The nested key, which
    SGLang reads, holds outputs; `contradictions` has compared the two. Whoever names vLLM's class
    may count as vLLM does, which is said. DeepSpec's key holds outputs. Without a key all engines
    use the inputs of blocks 2, L//2 and L-3 of a target with L blocks.
    """
    raw = files.config
    if raw.get(INPUT_KEY):
        return tuple(from_block_inputs(raw[INPUT_KEY]))
    if ids := table_of(raw, NESTED).get(INPUT_KEY):
        if SECTION not in raw and (names := [*filter(_OF_VLLM, raw.get("architectures") or ())]):
            log.warning(
                "warning[assumed]: %s: the class %s is vLLM's, which reads no ids inside "
                "eagle_config, so two counts are possible: %s are the outputs of these blocks, as "
                "SGLang reads that key, or their inputs, as vLLM counts, which are the outputs of "
                "%s. The outputs are read; `spec-train doctor` tries both. To settle it, add "
                '"%s": %s (outputs) or %s (inputs) at the top level',
                *(files.config_path, names[0], list(ids), from_block_inputs(ids)),
                *(INPUT_KEY, as_block_inputs(ids), list(ids)),
            )
        return tuple(ids)
    if ids := raw.get("target_layer_ids"):
        return tuple(ids)
    if blocks := raw.get("num_target_layers") or target.num_layers:
        return low_middle_high(blocks)
    raise files.bad_config(
        "contains no layer ids; engines then derive them from the target's number of decoder "
        "blocks. Pass the target with --target DIR"
    )


def _with_tied_head(tensors: dict[str, Tensor], files: DraftFiles, full: bool) -> dict[str, Tensor]:
    """Return tensors with an LM head where the config ties it to the embedding in the file.

    A head of its own in the file decides: SpecForge's configs say `tie_word_embeddings = true` of
    drafts that have one.
    """
    if HEAD in tensors or not files.config.get("tie_word_embeddings") or EMBEDDING not in tensors:
        return tensors
    if not full:
        raise files.bad_config(
            "tie_word_embeddings = true with a reduced draft vocabulary, and "
            f"{files.weights_path} has no lm_head; copy the draft again"
        )
    return tensors | {HEAD: tensors[EMBEDDING].clone()}


def _own_names(
    tensors: dict[str, Tensor], files: DraftFiles, names: tuple[str, ...], what: str
) -> dict[str, Tensor]:
    """Return tensors with our names of layers, without biases of zero that we have not.

    `names` are our name of the first layer and the other one. One layer of EAGLE-3 is `midlayer`,
    several are `layers.0` and so on, as always in P-EAGLE. The one norm before the attention of a
    later layer has two names: `hidden_norm` in SGLang and TensorRT-LLM.
    """
    ours, theirs = names
    result: dict[str, Tensor] = {}
    later = [name for name in tensors if not name.startswith(_FIRST)]
    for name in later:
        wide = name.endswith("self_attn.q_proj.weight")
        if wide and tensors[name].shape[-1] == files.config["hidden_size"] * 2:
            raise files.bad_weights(
                f"{name} reads the token again, as every layer of DeepSpec's EAGLE-3 does; in "
                f"{what} of spec-train only the first layer reads it"
            )
    for name, value in tensors.items():
        if name in (BIAS, "lm_head.bias"):
            if no_bias(value):
                continue
            raise files.bad_weights(f"{name}: {what} of spec-train has no such bias")
        if name in later and name.endswith(".hidden_norm.weight"):
            other = name.replace("hidden_norm", "input_layernorm")
            if other in tensors and not torch.equal(tensors[other], value):
                raise files.bad_weights(
                    f"{name} and {other} differ, and a later layer has one norm before its "
                    "attention; copy the draft again"
                )
            name = other
        result[name.replace(theirs, ours)] = value
    if MASK_STATES in result:
        result[MASK_STATES] = result[MASK_STATES].reshape(1, 1, -1)
    return result


def _flag(files: DraftFiles, *names: str) -> bool:
    """Return a switch that several keys name, at the top level or in `eagle_config`."""
    tables = (files.config, table_of(files.config, NESTED))
    said = {
        name: bool(table[name]) for table in tables for name in names if table.get(name) is not None
    }
    if len(set(said.values())) > 1:
        text = ", ".join(f"{name} = {str(value).lower()}" for name, value in said.items())
        raise files.bad_config(f"{text} contradict each other; correct one")
    return any(said.values())


# -- writing ---------------------------------------------------------------------------------------


def _to_sglang(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3: the input norm of the layers after the first is `hidden_norm` there."""
    if ours.config["num_hidden_layers"] == 1:
        return ours
    tensors = {_LATER_NORM.sub(r"\1hidden_norm.", name): v for name, v in ours.tensors.items()}
    return DraftFiles(ours.config, tensors, ours.where)


def _to_deepspec(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write EAGLE-3 for DeepSpec, whose class always norms queries and keys."""
    raw = ours.config
    options = raw[SECTION]["options"]
    left_out = (NESTED, INPUT_KEY, "mlp_bias", "norm_before_residual", "norm_before_fc")
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
    return DraftFiles(config, without_midlayer(ours), ours.where)


def without_midlayer(ours: DraftFiles) -> dict[str, Tensor]:
    """Return tensors whose first layer is `layers.0`."""
    return {name.replace(_MIDLAYER, _LAYER0): value for name, value in ours.tensors.items()}


def speculators_fields(raw: Mapping[str, Any], mask: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the algorithm; `mask` are those of P-EAGLE's mask token."""
    return {
        "embed_requires_grad": raw.get("train_embeddings", False),
        **{name: raw[name] for name in ("norm_before_residual", "norm_before_fc", "fc_norm")},
        "norm_output": False if mask else raw["norm_output"],
        **mask,
        **{name: raw[name] for name in ("target_hidden_size", INPUT_KEY)},
    }


def _to_speculators(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    section = ours.config[SECTION]
    return speculators_files(
        *(ours, target, ("eagle3", "Eagle3DraftModel")),
        *(speculators_fields(ours.config, {}), section["options"]["ttt_steps"]),
        *(without_midlayer(ours), {"num_aux_hidden_states": len(section["layers"])}),
    )


def facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the steps of the unroll."""
    steps = (config[SECTION].get("options") or {}).get("ttt_steps", 1)
    return {"ttt_steps": steps, "later_steps": steps - 1}


FILES = KindFiles(
    title="EAGLE-3",
    what="an EAGLE-3 draft",
    classes=(
        *("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator"),
        *("Eagle3DraftModel", WITH_QK_NORM, "Qwen3Eagle3Model", "LlamaEagle3DraftModel"),
        *("Eagle3Qwen2_5vlForCausalLM", "Eagle3Qwen3vlForCausalLM", "Eagle3MiniMaxM2ForCausalLM"),
    ),
    claims=_claims,
    claims_config=_claims_config,
    refined=_refined,
    shared_class=True,
    own_keys=own_keys,
    stated=_stated,
    read=_read,
    speculators=_of_speculators,
    served_absent={"norm_before_residual": True},
    forms={
        **{"hf": unchanged, "vllm": unchanged, "sglang": _to_sglang},
        **{"speculators": _to_speculators, "deepspec": _to_deepspec},
    },
    copies={
        "LlamaEagle3DraftModel": "mlp_bias hidden_act num_aux_hidden_states fc_norm norm_output "
        "parallel_drafting mask_token_id num_depths quantization_config",
        "Qwen3Eagle3Model": "hidden_act target_layer_ids num_target_layers ttt_length "
        "step_loss_decay draft_num_hidden_layers fc_norm fc_norm_perslice",
    },
    others={
        "Gemma4Eagle3DraftModel": "Gemma 4's layers: four norms each, keys that are also values, "
        "scaled embeddings",
        **dict.fromkeys(
            ("Eagle3DeepseekV2ForCausalLM", "Eagle3DeepseekV3ForCausalLM"),
            "multi-head latent attention",
        ),
    },
    facts=facts,
)
