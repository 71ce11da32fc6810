"""Drafts in the forms of engines and of other trainers, read as our checkpoint.

Tensors decide what a published draft computes: configs are often copies of other configs. Published
files omit different fields. An absent field gets the default of the class that reads it; a field
without a safe default must be present. Nothing here changes the result of a forward pass.

Two things have no key in most files of DSpark and DFlash, because the program that wrote them has
only one form. Which slot drafts first follows from the kind of draft: DSpark drafts from the
anchor's slot, DFlash from the slot after it. Whether slots see later slots of their block follows
from the layer, as in vLLM, SGLang, SpecForge and z-lab's code: sliding layers are causal, full ones
are not.
"""

import dataclasses
import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from spec_data.models.rope_settings import rope_parameters
from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import (
    as_block_inputs,
    eagle3_layers,
    from_block_inputs,
    published_dflash_layers,
)
from spec_data.shards.schema import LAYER_CONVENTION
from spec_data.terminal.config import to_dict
from spec_data.terminal.given import decided
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    BLOCK_KINDS,
    CLASSES,
    DFLASH,
    DFLASH2,
    DSPARK,
    EAGLE,
    EAGLE3,
    EAGLE_NORMS,
    EMBEDDING,
    FORM,
    HEAD,
    INPUT_KEY,
    LAYER,
    LILICORR,
    MASK_KEYS,
    MASK_STATES,
    PEAGLE,
    SHAPE_KEYS,
    STAGE_KEYS,
    TOKEN_KEYS,
    TYPE,
    XPRESS,
    block_keys,
    block_tensors,
    count_layers,
    draft_keys,
    eagle_tensors,
    kind_of,
    named_class,
    plain_names,
    refuse_arithmetic,
    refuse_other_drafts,
    refuse_quantised,
    stage_of,
    table_of,
)
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import SLIDING, causal_windows, slides_non_causal, windows_of
from spec_train.options.draft_options import draft_options

log = logging.getLogger(__name__)

WHAT = {"eagle": "an EAGLE-1/2 draft", "eagle3": "an EAGLE-3 draft", "peagle": "a P-EAGLE draft"}
WHAT |= dict.fromkeys(("dspark", "dflash"), "a DSpark or DFlash draft")
WHAT |= {"dflash2": "a DFlash 2 draft", "domino": "a Domino draft"}
WHAT |= {"lilicorr": "a LiLiCorr draft", "xpress": "an XPress draft"}
_LAYER_NORMS = ("norm_before_fc", "norm_before_residual")
_NORMS = (*_LAYER_NORMS, "fc_norm", "norm_output")
_ANCHOR, _NON_CAUSAL = "sample_from_anchor", "sliding_window_non_causal"
_OF_VLLM = re.compile(r"(Eagle3|Peagle)\w+ForCausalLM$").match
SINKS = "attention_sink_bias"
_STATE_COLUMNS = ("fc.weight", "input_norm.weight", "mask_hidden")
"""Tensors whose last dimension is the concatenated states."""
_ONE_NORM = re.compile(r"fc_norm\.(\d+)\.weight")
_BIAS = "fc.bias"
_LAYER = r"(?:midlayer|layers\.\d+)"
_FIRST = ("midlayer.", "layers.0.")
_PROJECTIONS = {
    "attention_bias": r"self_attn\.(?:q_proj|k_proj|v_proj|o_proj)",
    "mlp_bias": r"mlp\.(?:gate_proj|up_proj|down_proj)",
}
_OPTIONS = (
    *(*_LAYER_NORMS, "hidden_act", "qk_norm", "train_embeddings", "draft_vocab_size", "block_size"),
    *("mask_token_id", "fc_norm", "norm_output", "markov_rank", "markov_head_type"),
    *("sliding_window_non_causal", "attention_sink_bias", *SHAPE_KEYS),
)
"""Options of a draft that have the name of the field in its config."""
_COMPARED, _NEAR = 4096, 0.5
"""Rows of two embeddings that are compared, and the mean cosine from which one is the other's."""
NORM_KEYS = {  # field: the keys that name it; the later ones are aliases of SGLang and of a fork
    "fc_norm": ("fc_norm", "use_aux_norm", "fc_norm_perslice"),
    "norm_before_fc": ("norm_before_fc",),
}
_WITH_NORMS = {"Eagle3Qwen3ForCausalLM", "Qwen3Eagle3Model", "PeagleQwen3ForCausalLM"}
"""Classes of EAGLE-3 and P-EAGLE that norm queries and keys; most files have no key for it."""
_FED_BACK = {
    "norm_before_residual": ("norm_before_residual",),
    "norm_output": ("norm_output", "return_hidden_post_norm"),
}
_OF_SPECULATORS: dict[str, dict[str, Any]] = {
    "eagle3": {"norm_before_residual": True},
    "peagle": {"embed_requires_grad": True},
    "dflash": {_ANCHOR: False, "block_size": 8},
    "dflash2": {
        **{_ANCHOR: False, _NON_CAUSAL: True, "block_size": 8, "conv_kernel_size": 2},
        **{"conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16},
    },
    "dspark": {
        _ANCHOR: True,
        "block_size": 8,
        "markov_rank": 256,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}
"""Values of keys that a file of the speculators library lacks, in the library (0.9); of EAGLE-3, in
vLLM."""


def is_own_form(config: dict[str, Any]) -> bool:
    """Return whether a config.json is that of our own checkpoint, which has all of a draft."""
    section = config.get(SECTION)
    return isinstance(section, dict) and FORM not in section


def own_form(files: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Convert files of any known form to our checkpoint; the inverse of an export, bit for bit.

    Our own checkpoint is returned unchanged; its class checks it.

    Raises:
        DraftError: the form or kind is unknown, the draft computes something that ours does not, or
            weights are missing.
    """
    if is_own_form(files.config):
        return files
    refuse_other_drafts(files)
    refuse_quantised(files)
    files = replace(files, tensors=plain_names(files.tensors, files.weights_path))
    depth, collected = None, False
    if TYPE in files.config:  # its states come from vLLM, which passes them in ascending order
        kind, files, depth = of_speculators(files)
        collected = True
    else:
        kind = kind_of(files)
    if kind in BLOCK_KINDS:
        return _blocks(files, target, collected)
    # ModelOpt collects states with hooks, in the order of the target's blocks
    collected |= "next_layer_regular" in table_of(files.config, "eagle_config")
    files = draft_keys(files)
    refuse_arithmetic(files, WHAT[kind], but=EAGLE_NORMS if kind == "eagle" else ())
    if kind == "eagle":
        return _eagle(files, depth, target)
    return _eagle3(kind, files, depth, target, collected)


def of_speculators(files: DraftFiles) -> tuple[str, DraftFiles, int | None]:
    """Return kind, flat files and tokens per step of files in the speculators form."""
    raw = dict(files.config)
    kind, layer = raw.pop(TYPE), raw.pop(LAYER, None)
    if not isinstance(layer, dict):
        raise files.bad_config(f"{LAYER} is missing, which speculators files need")
    if kind not in _OF_SPECULATORS:
        kinds = ", ".join(_OF_SPECULATORS)
        raise files.bad_config(f"speculators drafts of type {kind} are unknown; known: {kinds}")
    methods = (raw.pop("speculators_config", None) or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens")
    raw = {**layer, **{name: value for name, value in raw.items() if value is not None}}
    if kind == "eagle3" and raw.get("norm_before_residual") is None:
        log.warning(
            "warning[assumed]: %s: has no norm_before_residual; it is read as true, as vLLM serves "
            "such a file (the speculators library itself assumes false). Add the key to be sure",
            files.config_path,
        )
        raw.pop("norm_before_residual", None)
    if kind in ("dspark", "dflash", "dflash2"):
        if kind != "dflash2":
            kind = "dflash" if has_dflash_class(raw) else "dspark"
        _check_blocks_of_speculators(kind, replace(files, config=raw), depth)
        raw["target_layer_ids"] = from_block_inputs(raw.pop(BLOCK_INPUT_KEY))
        raw["architectures"] = [{"dflash": DFLASH, "dflash2": DFLASH2}.get(kind, DSPARK)]
    return kind, replace(files, config=_OF_SPECULATORS[kind] | raw), depth


def _check_blocks_of_speculators(kind: str, files: DraftFiles, depth: int | None) -> None:
    """Refuse a block draft that the library and vLLM read in different ways."""
    raw = files.config
    if kind == "dspark" and _ANCHOR not in raw:
        if raw.get("block_size") is not None and depth == raw["block_size"] - 1:
            raise files.bad_config(
                f"has no {_ANCHOR}, and {depth} drafted tokens with blocks of "
                f"{raw['block_size']}: the speculators library reads it as {_ANCHOR} = true, vLLM "
                "as false. Add the value that it was trained with"
            )
        log.warning(
            "warning[assumed]: %s: has no %s; read as true, as the speculators library does. vLLM "
            "reads it as false: serve an export of this draft",
            *(files.config_path, _ANCHOR),
        )
    if BLOCK_INPUT_KEY not in raw:
        raise files.bad_config(f"{BLOCK_INPUT_KEY} is missing; add it")
    if _NON_CAUSAL not in _OF_SPECULATORS[kind] | raw and windows_of(files).layer_types:
        raise files.bad_config(
            f"has sliding layers and no {_NON_CAUSAL}; the speculators library reads it as false, "
            "vLLM as true. Add the value that it was trained with"
        )
    read = _OF_SPECULATORS[kind] | raw
    rnn = kind == "dspark" and read["markov_rank"] and read["markov_head_type"] == "rnn"
    if rnn and not read[_ANCHOR]:
        raise files.bad_config(
            f"markov_head_type = rnn with {_ANCHOR} = false: the speculators library advances the "
            "head's state over the anchor's slot before the first draft, while drafts here and "
            "SGLang start at the first draft, so other tokens would be drafted than in training. "
            f"Train it with {_ANCHOR} = true, or another Markov head"
        )


# -- EAGLE-1/2, EAGLE-3 and P-EAGLE ----------------------------------------------------------------


def _eagle(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """EAGLE-1/2 reads the target's final hidden states and has the whole vocabulary."""
    files = with_sizes(files)
    norms = ("norm_before_residual", "norm_output", "return_hidden_post_norm")
    _refuse_set(files, WHAT["eagle"], norms)
    shape, tensors = shape_of(files), eagle_tensors(files, WHAT["eagle"])
    tensors, biases = _with_all_biases(tensors, files)
    bias = tensors.get(_BIAS)
    if files.config.get("bias") and bias is None:
        raise files.bad_config(
            f"bias = true, but {files.weights_path} has no {_BIAS}, for which SGLang uses random "
            "values; copy the draft again, or set it to false"
        )
    if _no_bias(bias):
        tensors.pop(_BIAS, None)
    count = _layer_count(tensors, files)
    config = shape | switches_of(files) | biases | windows_of(files, count).keys()
    config |= {
        "qk_norm": _norms(tensors, files)["qk_norm"],
        "architectures": [EAGLE],
        "model_type": "llama",
        "num_hidden_layers": count,
        "bias": _BIAS in tensors,
        EAGLE_NORMS[0]: "layers.0.input_layernorm.weight" in tensors,
        EAGLE_NORMS[1]: "norm.weight" in tensors,
    }
    options = options_of("eagle", config, (), depth=depth or None)
    config[SECTION] = section_of(files, "eagle", (), options)
    tensors = own_tensors(tensors, files, target, shape["dtype"], target_head=True)
    return DraftFiles(config, tensors, files.where)


def _eagle3(
    kind: str, files: DraftFiles, depth: int | None, target: TargetFacts, collected: bool
) -> DraftFiles:
    """EAGLE-3 and P-EAGLE read captured layers."""
    files = with_sizes(files)
    if kind == "peagle":
        files = _checked_peagle(files)
    elif files.config.get("parallel_drafting"):  # with `mask_hidden` it is read as P-EAGLE
        raise files.bad_config(
            f"parallel_drafting = true, but {files.weights_path} has no {MASK_STATES}: P-EAGLE "
            "drafts have it, and EAGLE-3 does not draft in parallel. Copy the draft again, or "
            "remove the key"
        )
    raw, shape, tensors = files.config, shape_of(files), eagle_tensors(files, WHAT[kind])
    own_embedding = has_own_embedding(tensors, files, target)
    vocab, draft_vocab = shape["vocab_size"], shape["draft_vocab_size"]
    full = vocab == draft_vocab
    tensors = own_vocabulary(tensors, vocab, draft_vocab, files.weights_path)
    layers, tensors = _sort_states(
        tensors, aux_layers(files, target), files.config_path, collected=collected
    )
    tensors, biases = _with_all_biases(tensors, files)
    count = _layer_count(tensors, files)
    config = shape | switches_of(files) | biases | _norms(tensors, files)
    config |= windows_of(files, count).keys() | {
        "norm_before_residual": flag_of(files, "norm_before_residual"),
        "norm_output": flag_of(files, "norm_output", "return_hidden_post_norm"),
        "num_hidden_layers": count,
        "train_embeddings": own_embedding,
        INPUT_KEY: as_block_inputs(layers),
    }
    if kind == "peagle":  # nothing is fed back, so no output is normed
        config |= {"mask_token_id": _mask_token(raw), "norm_output": False}
        given = {"depths": depth or raw.get("num_depths") or None}
    else:
        given = {
            "ttt_steps": depth or raw.get("ttt_length") or None,
            "step_decay": raw.get("step_loss_decay") or None,
        }
        if config["norm_output"] and any("midlayer." in name for name in files.tensors):
            log.warning(
                "warning[assumed]: %s: norm_output = true is read as engines serve it: the normed "
                "state is fed back. SpecForge up to 0.2.0 trained such drafts as if it were false "
                "(see its pull request 879); if this is one of them, set norm_output to false",
                files.config_path,
            )
    config |= named_class(config, PEAGLE if kind == "peagle" else EAGLE3)
    config[SECTION] = section_of(files, kind, layers, options_of(kind, config, layers, **given))
    tensors = _own_names(_with_tied_head(tensors, files, full), files, count, kind)
    tensors = own_tensors(tensors, files, target, shape["dtype"], own_head=full)
    return DraftFiles(config, tensors, files.where)


def _checked_peagle(files: DraftFiles) -> DraftFiles:
    """Return files of a P-EAGLE draft that has what it needs."""
    raw = files.config
    if raw.get("tie_word_embeddings") and HEAD not in files.tensors:
        raise files.bad_config(
            f"tie_word_embeddings = true, and the file has no {HEAD}: P-EAGLE drafts of spec-train "
            "have a head of their own"
        )
    blocks = raw.get("num_hidden_layers")
    if _mask_token(raw) is None or blocks is None or MASK_STATES not in files.tensors:
        raise files.bad_config(
            f"a P-EAGLE draft needs num_hidden_layers, a mask token ({', '.join(MASK_KEYS)}) and "
            f"the tensor {MASK_STATES}"
        )
    return files


def _mask_token(raw: dict[str, Any]) -> int | None:
    return next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)


def aux_layers(files: DraftFiles, target: TargetFacts) -> tuple[int, ...]:
    """Return the layer ids (outputs of decoder blocks) of an EAGLE-3 style config, in its order.

    The top-level key holds inputs of blocks, as vLLM and llama.cpp read it. The nested key, which
    SGLang reads, holds outputs; `contradictions` has compared the two. Whoever names vLLM's class
    may count as vLLM does, which is said. DeepSpec's key holds outputs. Without a key all engines
    use the inputs of blocks 2, L//2 and L-3 of a target with L blocks.
    """
    raw = files.config
    if raw.get(INPUT_KEY):
        return tuple(from_block_inputs(raw[INPUT_KEY]))
    if ids := table_of(raw, "eagle_config").get(INPUT_KEY):
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
        return eagle3_layers(blocks)
    raise files.bad_config(
        "contains no layer ids; engines then derive them from the target's number of decoder "
        "blocks. Pass the target with --target DIR"
    )


def _sort_states(
    tensors: dict[str, Tensor], layers: Sequence[int], where: str, *, collected: bool = False
) -> tuple[tuple[int, ...], dict[str, Tensor]]:
    """Return the layer ids of a file in ascending order, and its tensors sorted with them.

    Our drafts concatenate states by ascending layer id. A draft with another order computes the
    same as one whose parts of `fc`, `fc_norm`, `input_norm` and `mask_hidden` are sorted with them.
    If the trainer has `collected` the states during one forward pass of its target, they are in
    ascending order, also if the ids are not. `where` is the path of config.json, for messages.
    """
    if len(set(layers)) != len(layers):
        raise DraftError(f"{where}: layers {list(layers)} repeat an id; each layer is read once")
    order = sorted(range(len(layers)), key=lambda i: layers[i])
    ascending = tuple(layers[i] for i in order)
    if ascending == tuple(layers) or collected:
        return ascending, tensors
    log.warning(
        "warning[layer-order]: %s: layers %s are not ascending. The parts of fc are taken to have "
        "the order of the file, as llama.cpp does, and were sorted; vLLM and SGLang would pass "
        "ascending states to the unsorted parts. An export is read alike by all engines",
        *(where, list(layers)),
        extra={"failure": "layer-order"},
    )
    result = dict(tensors)
    for name in _STATE_COLUMNS:
        if name not in tensors:
            continue
        if tensors[name].shape[-1] % len(order):
            raise DraftError(
                f"{where}: {name} has {tensors[name].shape[-1]} columns, which are not equal parts "
                f"for {len(order)} layers"
            )
        parts = tensors[name].chunk(len(order), dim=-1)
        result[name] = torch.cat([parts[i] for i in order], dim=-1).contiguous()
    norms = {int(m[1]): n for n in tensors if (m := _ONE_NORM.fullmatch(n))}
    for number, source in enumerate(order):
        if source in norms:
            result[f"fc_norm.{number}.weight"] = tensors[norms[source]]
    return ascending, result


def _with_all_biases(
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


def _norms(tensors: dict[str, Tensor], files: DraftFiles) -> dict[str, bool]:
    """Return the fields `fc_norm`, `norm_before_fc` and `qk_norm`, as the tensors say."""
    tables = (files.config, table_of(files.config, "eagle_config"))
    each = any(name.startswith("fc_norm.") for name in tensors)
    fields = {"fc_norm": each, "norm_before_fc": "input_norm.weight" in tensors}
    for field, keys in NORM_KEYS.items():
        values = [table[key] for table in tables for key in keys if key in table]
        stated = any(values)
        one_norm = stated and fields["norm_before_fc"]  # `fc_norm` in forks of DeepSpec
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


def _layer_count(tensors: dict[str, Tensor], files: DraftFiles) -> int:
    count, stated = count_layers(tensors), files.config.get("num_hidden_layers")
    if stated not in (None, count):
        raise files.bad_config(
            f"num_hidden_layers = {stated}, but {files.weights_path} has {count} layers; copy the "
            "draft again, or correct the key"
        )
    return count


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
    tensors: dict[str, Tensor], files: DraftFiles, count: int, kind: str
) -> dict[str, Tensor]:
    """Return tensors with our names of `count` layers, without biases of zero that we have not.

    One layer of EAGLE-3 is `midlayer`, several are `layers.0` and so on, as always in P-EAGLE. The
    one norm before the attention of a later layer has two names: `hidden_norm` in SGLang and
    TensorRT-LLM.
    """
    ours, theirs = _FIRST if kind == "eagle3" and count == 1 else _FIRST[::-1]
    result: dict[str, Tensor] = {}
    later = [name for name in tensors if not name.startswith(_FIRST)]
    for name in later:
        wide = name.endswith("self_attn.q_proj.weight")
        if wide and tensors[name].shape[-1] == files.config["hidden_size"] * 2:
            raise files.bad_weights(
                f"{name} reads the token again, as every layer of DeepSpec's EAGLE-3 does; in "
                f"{WHAT[kind]} of spec-train only the first layer reads it"
            )
    for name, value in tensors.items():
        if name in (_BIAS, "lm_head.bias"):
            if _no_bias(value):
                continue
            raise files.bad_weights(f"{name}: {WHAT[kind]} of spec-train has no such bias")
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


def _no_bias(bias: Tensor | None) -> bool:
    """Return whether a bias changes nothing."""
    return bias is None or not bool(torch.any(bias))


def flag_of(files: DraftFiles, *names: str) -> bool:
    """Return a switch that several keys name, at the top level or in `eagle_config`."""
    tables = (files.config, table_of(files.config, "eagle_config"))
    said = {
        name: bool(table[name]) for table in tables for name in names if table.get(name) is not None
    }
    if len(set(said.values())) > 1:
        text = ", ".join(f"{name} = {str(value).lower()}" for name, value in said.items())
        raise files.bad_config(f"{text} contradict each other; correct one")
    return any(said.values())


def stated_norms(files: DraftFiles, named: bool) -> dict[str, Any]:
    """Return the norms of EAGLE-3's first layer; one that a file of a known class lacks is none."""
    tables = (files.config, table_of(files.config, "eagle_config"))
    found: dict[str, Any] = {}
    for field, keys in NORM_KEYS.items():
        said = [table[key] for table in tables for key in keys if table.get(key) is not None]
        found[field] = any(said) if said or named else None
    for field, keys in _FED_BACK.items():
        if named or any(table.get(key) is not None for table in tables for key in keys):
            found[field] = flag_of(files, *keys)
    return found


def stated_layers(files: DraftFiles) -> dict[str, Any]:
    """Return the captured layers that a file names."""
    raw = files.config
    nested = table_of(raw, "eagle_config").get(INPUT_KEY)
    if not (raw.get(INPUT_KEY) or nested or raw.get("target_layer_ids")):
        return {}
    ids = sorted(set(aux_layers(files, TargetFacts())))
    return {"layers": ",".join(map(str, ids))}


def normed_by_class(raw: dict[str, Any], library: bool) -> bool:
    """Return whether the class of an EAGLE-3 or P-EAGLE norms queries and keys.

    Most files have no key for it; those of a `library`, speculators, have the type of the layer.
    """
    normed = library and raw.get("model_type") == "qwen3"
    return normed or not _WITH_NORMS.isdisjoint(raw.get("architectures") or ())


def refuse_parts_of_files(files: DraftFiles) -> None:
    """Refuse an EAGLE-1/2 of a shape that is read, but that no option of a new draft makes."""
    if odd := [name for name in ("bias", *EAGLE_NORMS) if files.config.get(name)]:
        raise files.bad_config(
            f"{', '.join(odd)}: no option makes a new draft with it; --init-from goes on from one"
        )


def _refuse_set(files: DraftFiles, what: str, names: tuple[str, ...]) -> None:
    """Refuse a config with one of the switches `names`, which `what` does not have."""
    raw, nested = files.config, table_of(files.config, "eagle_config")
    values = {n: raw[n] if raw.get(n) is not None else nested.get(n) for n in names}
    if faults := [f"{n} = {value}" for n, value in values.items() if value not in (None, False)]:
        raise files.bad_config(
            f"{', '.join(faults)} cannot be represented: {what} of spec-train has "
            + ", ".join(f"{name} = False" for name in names)
        )


# -- block drafts ----------------------------------------------------------------------------------


def _blocks(files: DraftFiles, target: TargetFacts, collected: bool) -> DraftFiles:
    """Drafts of whole blocks."""
    stated = table_of(files.config, SECTION).get("draft")
    stage = stage_of(files.config)
    dflash = stage is not None or has_dflash_class(files.config)
    files = block_keys(files)
    files = replace(files, tensors=block_tensors(files))
    what = WHAT[stage or "dspark"]
    of_stage = ("projector_type", *STAGE_KEYS[stage]) if stage else ()
    refuse_arithmetic(files, what, but=(SINKS, *of_stage))
    _refuse_set(files, what, _NORMS)
    blocks = _needed(files, "num_hidden_layers")
    _check_layer_ids(files)
    files = with_sizes(files)
    raw, windows = files.config, windows_of(files, blocks)
    if SLIDING in (raw.get("layer_types") or ())[:blocks] and not windows.layer_types:
        raise files.bad_config(
            f"layer_types has {SLIDING}, but use_sliding_window = {raw.get('use_sliding_window')} "
            f"and sliding_window = {raw.get('sliding_window')} set no window; programs read such "
            "layers in different ways. Correct the wrong key"
        )
    windows = causal_windows(files, windows, blocks)
    confident = bool(raw.get("enable_confidence_head"))
    heads = bool(raw.get("markov_rank")) or confident
    if stage and heads:
        raise files.bad_config(f"{what} has no Markov or confidence head")
    anchor = anchor_first(files, dflash, heads or stage == "domino")
    layers, tensors = _sort_states(
        files.tensors, raw["target_layer_ids"], files.config_path, collected=collected
    )
    config = shape_of(files) | switches_of(files)
    config |= {SINKS: True} if _has_sinks(files) else {}
    embedding = bool(config.get("train_embeddings")) or has_own_embedding(tensors, files, target)
    config |= {
        "train_embeddings": embedding,
        "architectures": [DFLASH if dflash and not anchor and not heads else DSPARK],
        "model_type": "qwen3",
        "num_hidden_layers": blocks,
        "num_target_layers": raw.get("num_target_layers") or target.num_layers,
        "block_size": _needed(files, "block_size"),
        "mask_token_id": _mask_token(raw),
        _ANCHOR: anchor,
        **windows.keys(),
        "markov_rank": raw.get("markov_rank") or 0,
        "markov_head_type": raw.get("markov_head_type") or "vanilla",
        "enable_confidence_head": confident,
    }
    if stage:
        classes = {"dflash2": DFLASH2, "lilicorr": LILICORR, "xpress": XPRESS}
        config["architectures"] = [classes.get(stage, DFLASH)]
        files = with_stage_sizes(files, stage)
        config |= {name: _needed(files, name) for name in STAGE_KEYS[stage]}
    config["confidence_head_with_markov"] = _with_markov(files, config)
    non_causal = slides_non_causal(files, windows)
    config |= {_NON_CAUSAL: True} if windows.layer_types and non_causal else {}
    if config["num_target_layers"] is None:
        raise files.bad_config(
            "num_target_layers is missing; pass --target, or --data, where the command has it"
        )
    _needed(replace(files, config=config), "mask_token_id")
    kind = stated or stage or ("dflash" if dflash and not heads else "dspark")
    options = options_of(
        kind,
        config,
        layers,
        layout="anchor" if anchor else "mask",
        num_anchors=raw.get("num_anchors") or None,
        confidence_weight=1.0 if confident else 0.0,
        confidence_head_with_markov=config["confidence_head_with_markov"] or not confident,
    )
    config[SECTION] = section_of(files, kind, layers, options)
    vocab, draft_vocab = config["vocab_size"], config["draft_vocab_size"]
    tensors = own_vocabulary(tensors, vocab, draft_vocab, files.weights_path)
    full = vocab == draft_vocab
    if not full and not {HEAD, "d2t"} <= tensors.keys():
        raise files.bad_weights("a reduced draft vocabulary needs lm_head.weight and d2t")
    tensors = own_tensors(tensors, files, target, config["dtype"], target_head=full)
    return DraftFiles(config, tensors, files.where)


def with_stage_sizes(files: DraftFiles, stage: str) -> DraftFiles:
    """Return files with the keys of a second stage that the programs which read them add."""
    raw = files.config
    if stage == "lilicorr":  # 0: as wide as the draft, and no convolutions
        none = {"conv_kernel_size": 0, "conv_group_size": 0}
        own = {"lilicorr_hidden_size": raw.get("lilicorr_hidden_size") or raw["hidden_size"]}
        return replace(files, config=none | raw | own)
    if stage == "xpress":  # vLLM's defaults
        sizes = {"xpress_rank": 256, "xpress_mlp_hidden": 512, "xpress_num_passes": 6}
        return replace(files, config=sizes | raw)
    return files


def _has_sinks(files: DraftFiles) -> bool:
    """Return whether heads have sinks: by the tensors, which a key of the config may not deny."""
    found = any(name.endswith(f"self_attn.{SINKS}") for name in files.tensors)
    if files.config.get(SINKS) not in (None, found):
        have = "has" if found else "has no"
        raise files.bad_config(f"{SINKS} = {not found}, but the file {have} {SINKS} tensors")
    return found


def has_dflash_class(raw: dict[str, Any]) -> bool:
    """Return whether a config names a class of DFlash."""
    return not set(raw.get("architectures") or ()).isdisjoint(CLASSES["dflash"])


def _needed(files: DraftFiles, name: str) -> Any:
    if files.config.get(name) is None:
        raise files.bad_config(f"{name} is missing")
    return files.config[name]


def _check_layer_ids(files: DraftFiles) -> None:
    """Refuse a block draft that does not say which layers it reads; programs have other defaults.

    Those of z-lab's code are named, for a DFlash that was trained with it.
    """
    raw = files.config
    if raw.get("target_layer_ids"):
        return
    blocks, size, usual = raw.get("num_target_layers"), raw.get("hidden_size"), ""
    if "fc.weight" in files.tensors and isinstance(size, int) and isinstance(blocks, int):
        ids = published_dflash_layers(blocks, files.tensors["fc.weight"].shape[1] // size)
        usual = f". The default of z-lab's code, if its trainer was given none, is {ids}"
    raise files.bad_config(
        "target_layer_ids is missing, and no tensor says which layers of the target the draft "
        f"reads. Add the ids that it was trained with, counted as --layers counts: k is the output "
        f"of block k{usual}"
    )


def anchor_first(files: DraftFiles, dflash: bool, heads: bool) -> bool:
    """Return whether the anchor's slot makes the first draft."""
    raw = files.config
    said = {name: raw[name] for name in (_ANCHOR, "shift_label") if raw.get(name) is not None}
    if raw.get("dspark_bonus_anchor") is not None:  # older vLLM
        said["dspark_bonus_anchor"] = not raw["dspark_bonus_anchor"]
    if raw.get("projector_type") == "dspark":  # ModelOpt, SpecForge
        said["projector_type"] = True
    if len({bool(value) for value in said.values()}) > 1 or (
        dflash and not heads and raw.get("shift_label")
    ):
        raise files.bad_config(
            "it is unclear which slot drafts first: "
            + ", ".join(f"{name} = {raw[name]}" for name in said)
            + f". Set {_ANCHOR} to the value that it was trained with, and remove the others"
        )
    if said:
        return bool(next(iter(said.values())))
    if dflash and heads:
        raise files.bad_config(
            f"a DFlash draft with a head after the logits, and no {_ANCHOR}: add the value "
            "that it was trained with (true if the anchor's slot drafts the token after the anchor)"
        )
    return not dflash


def _with_markov(files: DraftFiles, config: dict[str, Any]) -> bool:
    """Return whether the confidence head also reads the Markov embedding.

    Readers have different defaults for the key, so the weight must have the width that it says.
    """
    if not config["enable_confidence_head"]:
        return False
    rank, key = config["markov_rank"], "confidence_head_with_markov"
    wanted = files.config.get(key)
    weight = files.tensors.get("confidence_head.proj.weight")
    if wanted is None and weight is not None:
        wanted = weight.shape[-1] > config["hidden_size"]
    if wanted and not rank:
        raise files.bad_config(f"{key} = true, but markov_rank is 0")
    width = config["hidden_size"] + (rank if wanted else 0)
    if weight is not None and weight.shape[-1] != width:
        raise files.bad_config(
            f"{key} = {bool(wanted)} needs a confidence head of width {width}; the one in the file "
            f"has width {weight.shape[-1]}"
        )
    return bool(wanted)


# -- what the flat configs of all drafts share -----------------------------------------------------


def shape_of(files: DraftFiles) -> dict[str, Any]:
    """Return sizes, rope, dtype and token ids of a flat config, defaults as in LlamaConfig."""
    raw = files.config
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    missing = [name for name in needed if not isinstance(raw.get(name), int)]
    if missing:
        raise files.bad_config(f"missing {', '.join(missing)}")
    heads = raw["num_attention_heads"]
    limit = raw.get("max_position_embeddings") or 2048
    return {
        **{name: raw[name] for name in needed},
        "target_hidden_size": raw.get("target_hidden_size") or raw["hidden_size"],
        "num_key_value_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "rms_norm_eps": raw.get("rms_norm_eps", 1e-6),
        "max_position_embeddings": limit,
        "draft_vocab_size": raw.get("draft_vocab_size") or raw["vocab_size"],
        "rope_parameters": rope_parameters(text_rope(files) | {"max_position_embeddings": limit}),
        "dtype": _float_type(files.tensors),
        **{key: raw[key] for key in TOKEN_KEYS if raw.get(key) is not None},
    }


def with_sizes(files: DraftFiles) -> DraftFiles:
    """Return files whose config has the sizes of the weights where it had none.

    The defaults of config classes differ: without `head_dim`, Qwen3's has 128, Llama's H / heads.
    """
    raw = dict(files.config)
    tensors = {n.replace("midlayer.", "layers.0.", 1): t for n, t in files.tensors.items()}
    heads = raw.get("num_attention_heads")
    for name, tensor, parts in (
        ("head_dim", "layers.0.self_attn.q_proj.weight", heads if isinstance(heads, int) else 0),
        ("num_key_value_heads", "layers.0.self_attn.k_proj.weight", None),
        ("hidden_size", "norm.weight", 1),
        ("intermediate_size", "layers.0.mlp.gate_proj.weight", 1),
    ):
        parts = raw.get("head_dim") if parts is None else parts
        if raw.get(name) is None and tensor in tensors and parts:
            raw[name] = len(tensors[tensor]) // parts
    return replace(files, config=raw)


def text_rope(files: DraftFiles) -> dict[str, Any]:
    """Return a config with one rope, in which M-RoPE is the plain rope that it is for text.

    The three positions of a text token are equal. `mrope_section` stays, for engines and images,
    but not beside `rope_dim`: the number of channels that a draft was trained to rotate, which vLLM
    and SGLang read instead of the share that its config has from the target.
    """
    raw, result = files.config, dict(files.config)
    for key in ("rope_parameters", "rope_scaling"):
        rope = raw.get(key)
        if isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values()):
            kinds = sorted(set(windows_of(files).layer_types)) or ["full_attention"]
            ropes = [rope[kind] for kind in kinds if kind in rope]
            if any(other != ropes[0] for other in ropes):
                raise files.bad_config(
                    f"{key} differs between the draft's layers: {', '.join(kinds)}; drafts of "
                    "spec-train have one rope"
                )
            result[key] = rope = ropes[0] if ropes else rope
        if isinstance(rope, dict) and (rope.get("rope_type") or rope.get("type")) == "mrope":
            plain = {name: value for name, value in rope.items() if name != "type"}
            result[key] = rope = plain | {"rope_type": "default"}
        if isinstance(rope, dict) and rope.get("rope_dim"):
            size = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
            own = {n: v for n, v in rope.items() if n != "rope_dim" and not n.startswith("mrope")}
            result[key] = own | {"partial_rotary_factor": rope["rope_dim"] / size}
    return result


def _float_type(tensors: dict[str, Tensor]) -> str:
    """Return the name of the weights' dtype; the dtype of `fc.weight` if they are mixed."""
    floats = [value for value in tensors.values() if value.is_floating_point()]
    kinds = {str(value.dtype).removeprefix("torch.") for value in floats}
    chosen = str(tensors.get("fc.weight", floats[0]).dtype).removeprefix("torch.")
    if len(kinds) > 1:
        log.warning(
            "warning[dtypes]: the weights have several dtypes (%s); all are read as %s",
            *(", ".join(sorted(kinds)), chosen),
        )
    return chosen


def switches_of(files: DraftFiles) -> dict[str, Any]:
    """Return the switches of layers and norms that the file has; absent ones are left out.

    They have the names of a draft's configuration. Norms of queries and keys are known by their
    weights, because published configs have no key for them. `hidden_activation` is Gemma's name of
    `hidden_act`.
    """
    raw, nested = files.config, table_of(files.config, "eagle_config")
    said = {raw[name] for name in ("hidden_act", "hidden_activation") if raw.get(name) is not None}
    if len(said) > 1:
        raise files.bad_config(
            f"hidden_act = {raw['hidden_act']} and hidden_activation = {raw['hidden_activation']}: "
            "remove the one that the draft was not trained with"
        )
    both = nested | {name: value for name, value in raw.items() if value is not None}
    both |= {"hidden_act": next(iter(said))} if said else {}
    names = ("hidden_act", "attention_bias", "mlp_bias", *_LAYER_NORMS)
    result = {name: both[name] for name in names if both.get(name) is not None}
    result["qk_norm"] = any(".q_norm." in name for name in files.tensors)
    options = table_of(raw, SECTION).get("options") or {}  # the speculators form may lack the key
    trained = raw.get("train_embeddings", raw.get("embed_requires_grad"))
    trained = options.get("train_embeddings") if trained is None else trained
    return result | ({"train_embeddings": True} if trained else {})


def options_of(
    kind: str, config: dict[str, Any], layers: Sequence[int], **given: Any
) -> dict[str, Any]:
    """Return the options that lead to a draft of this config; unknown ones have their defaults.

    `given` are further options, None where unknown. Names that this kind of draft does not have are
    left out.
    """
    options = draft_options(kind)
    values = {name: config[name] for name in _OPTIONS if name in config} | given
    values |= {"layers": ",".join(map(str, layers)), "num_layers": config["num_hidden_layers"]}
    for name in ("attention_bias", "mlp_bias"):
        values[name] = "true" if config.get(name) else "false"
    if config.get("layer_types"):
        values["sliding_window"] = config["sliding_window"]
        values["layer_types"] = ",".join(config["layer_types"])
    names = {field.name for field in dataclasses.fields(options)}
    chosen = {n: value for n, value in values.items() if n in names and value is not None}
    return to_dict(decided(options(), **chosen))


def section_of(
    files: DraftFiles, kind: str, layers: tuple[int, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """Return the `spec_train` section of the file, or a new one with an unknown origin."""
    section = files.config.get(SECTION)
    if section is not None:
        return {name: value for name, value in section.items() if name != FORM}
    return {
        "draft": kind,
        "layers": list(layers),
        "layer_convention": LAYER_CONVENTION,
        "options": options,
        "origin": {},
    }


def has_own_embedding(tensors: dict[str, Tensor], files: DraftFiles, target: TargetFacts) -> bool:
    """Return whether the embedding is the draft's own, and not the target's.

    Not all trainers that train it write a key for it, so the target's decides if it is given. A
    trained embedding stays near the target's. One that has nothing to do with it belongs to another
    target: it is not the draft's own here, and is refused where the two are joined.
    """
    raw, stored = files.config, tensors.get(EMBEDDING)
    stated = bool(raw.get("train_embeddings", raw.get("embed_requires_grad")))
    if stored is None or SECTION in raw:
        return stated and stored is not None
    if target.embedding is None or stored.shape != target.embedding.shape:
        return stated
    theirs = target.embedding.detach().to("cpu", stored.dtype)
    if torch.equal(stored, theirs):
        return False
    pairs = stored[:_COMPARED].float(), theirs[:_COMPARED].float()
    return stated or float(torch.cosine_similarity(*pairs, dim=-1).mean()) > _NEAR


def own_tensors(
    tensors: dict[str, Tensor],
    files: DraftFiles,
    target: TargetFacts,
    dtype: str,
    *,
    target_head: bool = False,
    own_head: bool = False,
) -> dict[str, Tensor]:
    """Return tensors, under our names, with the target's weights that the file does not contain.

    Drafts that use the target's head (`target_head`) have no copy of it; `own_head`: a draft has a
    full head of its own, at the start the target's.
    """
    result = dict(tensors)
    head = result.pop(HEAD, None) if target_head else None
    if head is not None:
        _require_target_head(head, files, target)
    supply = {EMBEDDING: target.embedding} | ({HEAD: target.head} if own_head else {})
    for name, value in supply.items():
        if name in result:
            continue
        if value is None and target.name:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's, and {target.name} has no readable "
                "weights here: download them, as safetensors"
            )
        if value is None:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's; run `spec-train export --draft "
                "... --target DIR --format hf --out NEW` and use NEW"
            )
        size = [files.config["vocab_size"], files.config["hidden_size"]]
        if list(value.shape) != size:
            raise files.bad_weights(
                f"has no {name}, because it shares the target's, and that of "
                f"{target.name or 'the target'} has shape {list(value.shape)}, expected {size}: "
                "the draft was fitted to another target"
            )
        result[name] = value.detach().to("cpu", getattr(torch, dtype), copy=True)
    return result


def _require_target_head(head: Tensor, files: DraftFiles, target: TargetFacts) -> None:
    """Refuse an LM head in the file that is not the target's."""
    if target.head is None:
        log.warning(
            "warning[assumed]: %s: lm_head is assumed to be a copy of the target's; pass "
            "--target to check",
            files.weights_path,
        )
    elif not torch.equal(head, target.head.detach().to("cpu", head.dtype)):
        raise files.bad_weights(
            "its lm_head is not the target's; drafts of this kind use the target's head, so this "
            "one cannot be represented"
        )
