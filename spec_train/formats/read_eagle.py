"""EAGLE-1/2, EAGLE-3 and P-EAGLE: read the checkpoints of engines and of other trainers as ours.

Tensors decide what a published draft computes: configs are often copies of other configs. Nothing
here changes the result of a forward pass.
"""

import logging
import re
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import as_block_inputs
from spec_data.terminal.config import to_dict
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat import (
    INPUT_KEY,
    MASK_KEYS,
    aux_layers,
    drop_target_head,
    has_own_embedding,
    no_bias,
    refuse_set,
    section_of,
    shape_of,
    shape_options,
    sizes_of_weights,
    switches_of,
    with_target_weights,
)
from spec_train.formats.layer_order import sort_states
from spec_train.formats.names import (
    MASK_STATES,
    count_layers,
    draft_keys,
    eagle_tensors,
    plain_names,
    refuse_arithmetic,
)
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import windows_of
from spec_train.formats.write import (
    EAGLE,
    EAGLE3,
    EAGLE_NORMS,
    EMBEDDING,
    HEAD,
    PEAGLE,
    named_class,
)
from spec_train.options.draft_options import Eagle3Options, EagleOptions, PeagleOptions

log = logging.getLogger(__name__)

_WHAT = {"eagle": "an EAGLE-1/2 draft", "eagle3": "an EAGLE-3 draft", "peagle": "a P-EAGLE draft"}
_BIAS = "fc.bias"
_PROJECTIONS = {
    "attention_bias": r"self_attn\.(?:q_proj|k_proj|v_proj|o_proj)",
    "mlp_bias": r"mlp\.(?:gate_proj|up_proj|down_proj)",
}
_NORM_KEYS = {
    "fc_norm": ("fc_norm", "use_aux_norm", "fc_norm_perslice"),
    "norm_before_fc": ("norm_before_fc",),
}
"""(field, the keys that name it; the second ones are aliases of SGLang and of a fork)."""
_LAYER = r"(?:midlayer|layers\.\d+)"
_FIRST = ("midlayer.", "layers.0.")


def from_speculators(
    kind: str, flat: DraftFiles, depth: int | None, target: TargetFacts
) -> DraftFiles:
    """Convert unwrapped files of the speculators form to our checkpoint.

    Its states come from vLLM, which passes them in ascending order.
    """
    raw = flat.config
    if kind == "peagle":
        raw = {"embed_requires_grad": True} | raw  # the library's default for P-EAGLE
    elif raw.get("norm_before_residual") is None:
        log.warning(
            "warning: %s: has no norm_before_residual; it is read as true, as vLLM serves such a "
            "file (the speculators library itself assumes false). Add the key to be sure",
            flat.config_path,
        )
        raw = raw | {"norm_before_residual": True}
    files = DraftFiles(raw, flat.tensors, flat.where)
    return from_flat(kind, files, depth, target, collected=True)


def from_flat(
    kind: str,
    files: DraftFiles,
    depth: int | None,
    target: TargetFacts,
    *,
    collected: bool = False,
) -> DraftFiles:
    """Convert a flat checkpoint of any tool to ours.

    Args:
        kind: eagle, eagle3 or peagle.
        files: the checkpoint.
        depth: the number of tokens it drafts per verification step, None if unknown.
        target: supplies what the file shares with it.
        collected: as for `sort_states`.

    Raises:
        DraftError: it computes something that ours does not, or weights are missing.
    """
    # ModelOpt collects states with hooks, in the order of the target's blocks
    collected |= "next_layer_regular" in (files.config.get("eagle_config") or {})
    files = draft_keys(files)
    refuse_arithmetic(files, _WHAT[kind], but=EAGLE_NORMS if kind == "eagle" else ())
    if kind == "eagle":
        return _eagle(files, depth, target)
    if kind == "peagle":
        files = _checked_peagle(files)
    elif files.config.get("parallel_drafting"):  # with `mask_hidden` it is read as P-EAGLE
        raise DraftError(
            f"{files.config_path}: parallel_drafting = true, but {files.weights_path} has no "
            f"{MASK_STATES}: P-EAGLE drafts have it, and EAGLE-3 does not draft in parallel. Copy "
            "the draft again, or remove the key"
        )
    shape, tensors = shape_of(files), eagle_tensors(files, _WHAT[kind])
    own_embedding = has_own_embedding(tensors, files, target)
    vocab, draft_vocab = shape["vocab_size"], shape["draft_vocab_size"]
    tensors = own_vocabulary(tensors, vocab, draft_vocab, files.weights_path)
    layers, tensors = sort_states(
        tensors, aux_layers(files, target), files.config_path, collected=collected
    )
    tensors, biases = _whole_biases(tensors, files)
    count = _layer_count(tensors, files)
    norms = {
        **_norms(tensors, files),
        "norm_before_residual": _flag(files, "norm_before_residual"),
        "norm_output": _flag(files, "norm_output", "return_hidden_post_norm"),
    }
    config = shape | switches_of(files) | biases | norms | windows_of(files, count).keys()
    config |= {
        "num_hidden_layers": count,
        "train_embeddings": own_embedding,
        INPUT_KEY: as_block_inputs(layers),
    }
    full = vocab == draft_vocab
    tensors = _own_names(_with_tied_head(tensors, files, full), files, count, kind)
    shared = (EMBEDDING, HEAD) if full else (EMBEDDING,)
    tensors = with_target_weights(tensors, files, target, shape["dtype"], shared)
    finish = _peagle_config if kind == "peagle" else _eagle3_config
    config, options = finish(config, files, layers, depth)
    config[SECTION] = section_of(files, kind, layers, options)
    return DraftFiles(config, tensors, files.where)


def _eagle(files: DraftFiles, depth: int | None, target: TargetFacts) -> DraftFiles:
    """EAGLE-1/2 reads the target's final hidden states and has the whole vocabulary."""
    norms = ("norm_before_residual", "norm_output", "return_hidden_post_norm")
    refuse_set(files, _WHAT["eagle"], **dict.fromkeys(norms, False))
    shape, tensors = shape_of(files), eagle_tensors(files, _WHAT["eagle"])
    tensors, biases = _whole_biases(tensors, files)
    fields = switches_of(files) | biases | {"qk_norm": _norms(tensors, files)["qk_norm"]}
    bias = tensors.get(_BIAS)
    if files.config.get("bias") and bias is None:
        raise DraftError(
            f"{files.config_path}: bias = true, but {files.weights_path} has no {_BIAS}, for which "
            "SGLang uses random values; copy the draft again, or set it to false"
        )
    if no_bias(bias):
        tensors.pop(_BIAS, None)
    count = _layer_count(tensors, files)
    tensors = drop_target_head(tensors, files, target)
    tensors = with_target_weights(tensors, files, target, shape["dtype"], (EMBEDDING,))
    config = shape | fields | windows_of(files, count).keys()
    config |= {
        "architectures": [EAGLE],
        "model_type": "llama",
        "num_hidden_layers": count,
        "bias": _BIAS in tensors,
        EAGLE_NORMS[0]: "layers.0.input_layernorm.weight" in tensors,
        EAGLE_NORMS[1]: "norm.weight" in tensors,
    }
    options = EagleOptions(
        num_layers=count, depth=depth or EagleOptions.depth, **shape_options(config, EagleOptions)
    )
    config[SECTION] = section_of(files, "eagle", (), to_dict(options))
    return DraftFiles(config, tensors, files.where)


def _eagle3_config(
    config: dict[str, Any], files: DraftFiles, layers: tuple[int, ...], depth: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and options of an EAGLE-3 draft."""
    raw = files.config
    if config["norm_output"] and any("midlayer." in name for name in files.tensors):
        log.warning(
            "warning: %s: norm_output = true is read as engines serve it: the normed state is fed "
            "back. SpecForge up to 0.2.0 trained such drafts as if it were false (see its pull "
            "request 879); if this is one of them, set norm_output to false",
            files.config_path,
        )
    config = config | named_class(config, EAGLE3)
    options = Eagle3Options(
        num_layers=config["num_hidden_layers"],
        layers=",".join(map(str, layers)),
        draft_vocab_size=config["draft_vocab_size"],
        fc_norm=config["fc_norm"],
        norm_output=config["norm_output"],
        ttt_steps=depth or raw.get("ttt_length") or Eagle3Options.ttt_steps,
        step_decay=raw.get("step_loss_decay") or Eagle3Options.step_decay,
        **shape_options(config, Eagle3Options),
    )
    return config, to_dict(options)


def _checked_peagle(files: DraftFiles) -> DraftFiles:
    """Return files of a P-EAGLE draft with the sizes of its weights."""
    raw = sizes_of_weights(files)
    if raw.get("tie_word_embeddings") and HEAD not in plain_names(files.tensors):
        raise DraftError(
            f"{files.config_path}: tie_word_embeddings = true, and the file has no {HEAD}: "
            "P-EAGLE drafts of spec-train have a head of their own"
        )
    blocks = raw.get("num_hidden_layers")
    if _mask_token(raw) is None or blocks is None or MASK_STATES not in plain_names(files.tensors):
        raise DraftError(
            f"{files.where}: a P-EAGLE draft needs num_hidden_layers, a mask token "
            f"({', '.join(MASK_KEYS)}) and the tensor {MASK_STATES}"
        )
    return DraftFiles(raw, files.tensors, files.where)


def _mask_token(raw: dict[str, Any]) -> int | None:
    return next((raw[key] for key in MASK_KEYS if raw.get(key) is not None), None)


def _peagle_config(
    config: dict[str, Any], files: DraftFiles, layers: tuple[int, ...], depth: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return config and options of a P-EAGLE draft; nothing is fed back, so no output is normed."""
    raw = files.config
    config = config | named_class(config, PEAGLE)
    config |= {"mask_token_id": _mask_token(raw), "norm_output": False}
    options = PeagleOptions(
        layers=",".join(map(str, layers)),
        draft_vocab_size=config["draft_vocab_size"],
        depths=depth or raw.get("num_depths") or PeagleOptions.depths,
        num_layers=config["num_hidden_layers"],
        mask_token_id=config["mask_token_id"],
        fc_norm=config["fc_norm"],
        **shape_options(config, PeagleOptions),
    )
    return config, to_dict(options)


# -- what only tensors tell ------------------------------------------------------------------------


def _whole_biases(
    tensors: dict[str, Tensor], files: DraftFiles
) -> tuple[dict[str, Tensor], dict[str, bool]]:
    """Return tensors in which all projections of a kind have a bias or none has, and which do.

    A missing bias among others is zero: SafeAILab's drafts for Qwen2 have biases of queries, keys
    and values only.

    Returns:
        The tensors, and the fields `attention_bias` and `mlp_bias`.

    Raises:
        DraftError: the config says that there are biases, and there is none.
    """
    result, fields = dict(tensors), {}
    for field, parts in _PROJECTIONS.items():
        pattern = re.compile(rf"({_LAYER}\.{parts})\.weight")
        names = [m[1] for name in tensors if (m := pattern.fullmatch(name))]
        fields[field] = any(f"{name}.bias" in tensors for name in names)
        if files.config.get(field) and not fields[field]:
            raise DraftError(
                f"{files.config_path}: {field} = true, but {files.weights_path} has no such bias; "
                "copy the draft again, or set it to false if it was trained without"
            )
        for name in names if fields[field] else ():
            weight = tensors[f"{name}.weight"]
            result.setdefault(f"{name}.bias", weight.new_zeros(weight.shape[0]))
    return result, fields


def _norms(tensors: dict[str, Tensor], files: DraftFiles) -> dict[str, bool]:
    """Return the fields `fc_norm`, `norm_before_fc` and `qk_norm`, as the tensors say.

    Raises:
        DraftError: a key of the config says otherwise, or only some layers norm queries and keys.
    """
    tables = (files.config, files.config.get("eagle_config") or {})
    each = any(name.startswith("fc_norm.") for name in tensors)
    fields = {"fc_norm": each, "norm_before_fc": "input_norm.weight" in tensors}
    for field, keys in _NORM_KEYS.items():
        values = [table[key] for table in tables for key in keys if key in table]
        stated = any(values)
        one_norm = stated and fields["norm_before_fc"]  # `fc_norm` in forks of DeepSpec
        if any(value is not None for value in values) and stated != fields[field] and not one_norm:
            raise DraftError(
                f"{files.config_path}: {field} = {str(stated).lower()}, but the norms in "
                f"{files.weights_path} say otherwise; copy the draft again, or correct the key"
            )
    normed, layers = (
        [name for name in tensors if re.fullmatch(rf"{_LAYER}\.self_attn\.{part}\.weight", name)]
        for part in ("q_norm", "q_proj")
    )
    if normed and len(normed) != len(layers):
        raise DraftError(
            f"{files.weights_path}: {len(normed)} of {len(layers)} layers norm queries and keys; "
            "all layers of our drafts do, or none does"
        )
    return fields | {"qk_norm": bool(normed)}


def _layer_count(tensors: dict[str, Tensor], files: DraftFiles) -> int:
    """Return the number of decoder layers in the tensors.

    Raises:
        DraftError: the config has another number.
    """
    count, stated = count_layers(tensors), files.config.get("num_hidden_layers")
    if stated not in (None, count):
        raise DraftError(
            f"{files.config_path}: num_hidden_layers = {stated}, but {files.weights_path} has "
            f"{count} layers; copy the draft again, or correct the key"
        )
    return count


def _with_tied_head(tensors: dict[str, Tensor], files: DraftFiles, full: bool) -> dict[str, Tensor]:
    """Return tensors with an LM head where the config ties it to the embedding in the file.

    A head of its own in the file decides: SpecForge's configs say `tie_word_embeddings = true` of
    drafts that have one.

    Raises:
        DraftError: the head is tied, but has another size than the embedding.
    """
    if HEAD in tensors or not files.config.get("tie_word_embeddings") or EMBEDDING not in tensors:
        return tensors
    if not full:
        raise DraftError(
            f"{files.config_path}: tie_word_embeddings = true with a reduced draft vocabulary, and "
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

    Raises:
        DraftError: a later layer reads the token, or there is a bias of `fc` or of the head.
    """
    ours, theirs = _FIRST if kind == "eagle3" and count == 1 else _FIRST[::-1]
    result: dict[str, Tensor] = {}
    wide = files.config["hidden_size"] * 2
    queries = [name for name in tensors if name.endswith("self_attn.q_proj.weight")]
    for name in queries:
        if not name.startswith(_FIRST) and tensors[name].shape[-1] == wide:
            raise DraftError(
                f"{files.weights_path}: {name} reads the token again, as every layer of DeepSpec's "
                f"EAGLE-3 does; in {_WHAT[kind]} of spec-train only the first layer reads it"
            )
    for name, value in tensors.items():
        later = not name.startswith(_FIRST)
        if name in (_BIAS, "lm_head.bias"):
            if no_bias(value):
                continue
            raise DraftError(
                f"{files.weights_path}: {name}: {_WHAT[kind]} of spec-train has no such bias"
            )
        if later and name.endswith(".hidden_norm.weight"):
            other = name.replace("hidden_norm", "input_layernorm")
            if other in tensors and not torch.equal(tensors[other], value):
                raise DraftError(
                    f"{files.weights_path}: {name} and {other} differ, and a later layer has one "
                    "norm before its attention; copy the draft again"
                )
            name = other
        result[name.replace(theirs, ours)] = value
    if MASK_STATES in result:
        result[MASK_STATES] = result[MASK_STATES].reshape(1, 1, -1)
    return result


def _flag(files: DraftFiles, *names: str) -> bool:
    """Return a switch that several keys name, at the top level or in `eagle_config`.

    Raises:
        DraftError: two keys differ.
    """
    tables: tuple[dict[str, Any], ...] = (files.config, files.config.get("eagle_config") or {})
    said = {
        name: bool(table[name]) for table in tables for name in names if table.get(name) is not None
    }
    if len(set(said.values())) > 1:
        text = ", ".join(f"{name} = {str(value).lower()}" for name, value in said.items())
        raise DraftError(f"{files.config_path}: {text} contradict each other; correct one")
    return any(said.values())
