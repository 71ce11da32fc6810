"""What names in the files of other programs mean here, by the tables of `names.toml`.

A key that changes the arithmetic of a draft must not be dropped without a word: those that are
known and neutral are read over, others are refused, and unknown ones are reported when the draft is
read and by the report of `export`. `auto_map` and files of code are never used.
"""

import logging
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spec_data.models.families import TARGETS
from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.options.draft_options import DRAFT_OPTIONS

log = logging.getLogger(__name__)

NAMES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_KEYS, _TENSORS = NAMES["keys"], NAMES["tensors"]
READ, HARMLESS = (frozenset(_KEYS[name].split()) for name in ("read", "harmless"))
KNOWN = READ | HARMLESS | _KEYS["neutral"].keys() | _KEYS["scales"].keys()
KNOWN |= _KEYS["blocks"].keys()
KNOWN |= {f"rope {name}" for name in _KEYS["rope"].split()}
"""Every key whose meaning is known."""
CLASSES = {kind: tuple(text.split()) for kind, text in NAMES["classes"].items()}
"""Names in `architectures`, by kind of draft."""

EAGLE, EAGLE_SGLANG = "EagleLlamaForCausalLM", "LlamaForCausalLMEagle"
EAGLE3, PEAGLE = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
WITH_QK_NORM = "Eagle3Qwen3ForCausalLM"  # vLLM's one class whose queries and keys are normed
DSPARK, DFLASH, DFLASH2 = "Qwen3DSparkModel", "DFlashDraftModel", "DFlash2DraftModel"
LILICORR, XPRESS = "LiLiCorrDraftModel", "Qwen3XPressModel"
BLOCK_KINDS = ("dspark", "dflash", "dflash2", "domino", "lilicorr", "xpress")
STAGE_KEYS = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "domino": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len"),
    "lilicorr": (
        *("conv_kernel_size", "conv_group_size", "lilicorr_candidate_topk"),
        *("lilicorr_hidden_size", "lilicorr_num_layers", "lilicorr_num_heads"),
        *("lilicorr_mlp_ratio", "lilicorr_factor_dim", "lilicorr_vector_eps"),
        "lilicorr_logit_scale",
    ),
    "xpress": ("xpress_rank", "xpress_mlp_hidden", "xpress_num_passes"),
}
"""Keys of the second stage of a kind of block draft, and fields of its configuration."""
SHAPE_KEYS = tuple({name: 0 for names in STAGE_KEYS.values() for name in names})
MUSE = "MuseGlimmerAssistantModel"  # the DFlash draft of transformers
_AUTOMODEL_BLOCKS = {"Qwen3DFlashDraftModel", "Qwen3DFlash2DraftModel"}
SHARED = "LlamaForCausalLM"  # SafeAILab's name of EAGLE-1/2 and of EAGLE-3
EAGLE_NORMS = ("use_input_layernorm_in_first_layer", "use_last_layernorm")  # AutoModel's, and ours
TOKEN_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
MASK_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
"""Names of the mask token, which replaces unknown tokens; vLLM reads the first one present."""
_PARALLEL = ("parallel_drafting", "num_depths")
FORM = "form"
"""In the section: the form of these files if they are not our checkpoint."""
TYPE, LAYER = "speculators_model_type", "transformer_layer_config"
DFLASH_CONFIG = "dflash_config"
"""The table of DFlash, whose keys have priority in engines."""
INPUT_KEY = "eagle_aux_hidden_state_layer_ids"
"""Layer ids: at the top level *inputs* of decoder blocks; nested, as SGLang reads it, outputs."""
BLOCK_INPUT_KEY = "aux_hidden_state_layer_ids"
"""Layer ids of block drafts in the speculators form, inputs of decoder blocks."""
_AUTOMODEL_EAGLE3, _LAYER_IDS = "LlamaEagle3DraftModel", ("eagle_config", INPUT_KEY)
_MASK_EMBEDDING = "mask_embedding.pt"
"""The file of a block draft whose row engines put in place of the mask token's."""
_TABLES = ("eagle_config", LAYER, DFLASH_CONFIG, "rope_parameters", "rope_scaling")

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
MASK_STATES = "mask_hidden"  # of P-EAGLE: the learned states of unknown tokens
_LAYER = re.compile(r"layers\.(\d+)\.")


def table_of(raw: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a nested table of a config; empty if it is absent or null; else a TypeError."""
    value = raw.get(name)
    if not isinstance(value, dict | None):
        raise TypeError(f"{name} is {value!r}, no object")
    return value or {}


def named_class(config: dict[str, Any], plain: str) -> dict[str, Any]:
    """Return the keys that name the class of a draft with this config; `plain`: without q/k norm.

    Norms of queries and keys exist only in Qwen3's classes, so `model_type` is theirs too.
    """
    if config.get("qk_norm"):
        return {"architectures": [WITH_QK_NORM], "model_type": "qwen3"}
    return {"architectures": [plain], "model_type": "llama"}


# -- which draft it is -----------------------------------------------------------------------------


def kind_of(files: DraftFiles) -> str:
    """Return the kind of a flat draft: by its tensors where names are shared, else by its name."""
    names, tensors = files.config.get("architectures") or [], files.tensors
    if MASK_STATES in tensors:  # its architecture may have EAGLE-3's name
        return "peagle"
    if SHARED in names:
        if "fc.weight" not in tensors:
            raise files.bad_weights(
                "has no fc.weight, by which a draft joins a token and states of the target. It is "
                "a whole language model: a target, or the small model of plain speculative "
                "decoding, which spec-train does not train"
            )
        wide = {"midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"} & tensors.keys()
        return "eagle3" if wide else "eagle"
    for kind, classes in CLASSES.items():
        if set(names) & set(classes):
            return kind
    if shared := sorted(set(names) & set(TARGETS)):
        raise files.bad_config(
            f"{shared[0]} is a target, and no draft; give the directory of a draft, such as the "
            "--out of `spec-train fit`"
        )
    raise files.bad_config(
        f"architectures {names} are not a known draft; known: "
        f"{', '.join(name for classes in CLASSES.values() for name in classes)}"
    )


def kind_of_config(files: DraftFiles, kind: str) -> str:
    """Return the kind of a flat draft without its tensors; of `kind` if it names no class."""
    raw = files.config
    stated = table_of(raw, SECTION).get("draft")
    names = set(raw.get("architectures") or ())
    if isinstance(stated, str):
        found = stated
    elif (stage := stage_of(raw)) is not None:
        found = stage
    elif not names:
        found = kind
    elif SHARED in names:
        layers = raw.get("draft_vocab_size") or raw.get(INPUT_KEY) or raw.get("eagle_config")
        found = "eagle3" if layers else kind
        if found not in ("eagle", "eagle3", "peagle"):
            raise files.bad_config(f"{SHARED} is the class of a target or of an EAGLE draft")
    else:
        found = kind_of(files)
    flat = raw | table_of(raw, DFLASH_CONFIG)
    masked = any(flat.get(name) is not None for name in MASK_KEYS)
    if found == "eagle3" and (masked or any(flat.get(name) for name in _PARALLEL)):
        found = "peagle"
    if found == "dflash" and (flat.get("markov_rank") or flat.get("enable_confidence_head")):
        found = "dspark"
    if found not in DRAFT_OPTIONS:
        raise files.bad_config(
            f"is of a {found} draft; --shape-of reads files of {', '.join(DRAFT_OPTIONS)}, and "
            "those of other kinds bring their shape with --init-from"
        )
    return found


def stage_of(raw: dict[str, Any]) -> str | None:
    """Return the kind of a block draft that has a second stage of `STAGE_KEYS`; else None.

    Its class says it, or the table of a DFlash draft.
    """
    names = set(raw.get("architectures") or ())
    type_of = raw.get("projector_type") or table_of(raw, DFLASH_CONFIG).get("projector_type")
    for kind in STAGE_KEYS:
        if kind == type_of or names & set(CLASSES[kind]):
            return kind
    return None


def refuse_other_drafts(files: DraftFiles) -> None:
    """Refuse drafts of other projects whose arithmetic this project does not have.

    Some of them have the class of a plain draft, and would be read as that draft without their own
    parts. A key that is null, false or 0 switches nothing on.
    """
    for shown, what in _other_parts(files):
        raise files.bad_config(
            f"{shown}: the draft has {what}. Drafts of spec-train do not, and without it the draft "
            "would be another one, so it cannot be read"
        )


def _other_parts(files: DraftFiles) -> Iterator[tuple[str, str]]:
    raw, mtp = files.config, NAMES["other_types"]["mtp"]
    if (Path(files.where) / _MASK_EMBEDDING).is_file():
        yield f"the file {_MASK_EMBEDDING}", "an embedding of its own for the mask token"
    for name in raw.get("architectures") or ():
        if name in NAMES["others"] or "MTP" in name:
            yield f"a {name}", NAMES["others"].get(name, mtp)
    if (
        "pard_token" in raw
        and files.tensors
        and not {"fc.weight", MASK_STATES} & files.tensors.keys()
    ):
        yield "pard_token", "the form of PARD, a whole small language model that drafts in parallel"
    if (kind := raw.get("speculators_model_type")) in NAMES["other_types"]:
        yield f"speculators_model_type = {kind}", NAMES["other_types"][kind]
    if any(name.startswith("mtp.") for name in files.tensors):  # keys: also of copied targets
        yield "tensors mtp.*", mtp
    nested, stage = table_of(raw, DFLASH_CONFIG), stage_of(raw)
    named = [(name, f"{DFLASH_CONFIG}.{name}") for name, value in nested.items() if value]
    named += [(name, name) for name, value in raw.items() if value]
    named += [(name.removeprefix("model."), name) for name in files.tensors]
    for name, shown in named:
        for part, what in NAMES["other_parts"].items():
            if part != stage and name.startswith((f"{part}_", f"{part}.")):
                yield shown, what


# -- keys ------------------------------------------------------------------------------------------


def written_names(form: str) -> list[str]:
    """Return the names of our keys that a form has, in its order."""
    return _KEYS["written"][form].split()


def copied_from_target(files: DraftFiles) -> str | None:
    """Return the draft class of a trainer that copies its target's config; None for others."""
    names = files.config.get("architectures") or ()
    return next((name for name in names if name in _KEYS["of_target_copies"]), None)


def said_causal(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config without an `is_causal` that says nothing of the draft.

    AutoModel writes false into every block draft of its class; in those of its JetSpec trainer, the
    table says that blocks are causal.
    """
    table = table_of(raw, DFLASH_CONFIG)
    automodel = not _AUTOMODEL_BLOCKS.isdisjoint(raw.get("architectures") or ())
    causal = table.get("causal") or table.get("causal_head")
    if automodel and causal and raw.get("is_causal") is False:
        return {name: value for name, value in raw.items() if name != "is_causal"}
    return raw


def draft_keys(files: DraftFiles) -> DraftFiles:
    """Return files with the keys that describe the draft, if the config is a copy of a target's.

    `num_hidden_layers` becomes the number of layers in the file, and `num_target_layers` what a
    copy of the target's config says. Files of other trainers are unchanged.
    """
    writer = copied_from_target(files)
    if writer is None:
        return files
    raw = keys_of_copy(files, writer).config | {"num_hidden_layers": count_layers(files.tensors)}
    if writer == _AUTOMODEL_EAGLE3 and not any(name in raw for name in _LAYER_IDS):
        log.warning(
            "warning[assumed]: %s: AutoModel writes no layer ids; its default is assumed, "
            "the outputs "
            "of blocks 1, L/2-1 and L-4. If aux_layer_ids were given to it, add the key "
            '"eagle_config": {"eagle_aux_hidden_state_layer_ids": [...]} with them',
            files.config_path,
        )
    return replace(files, config=raw)


def keys_of_copy(files: DraftFiles, writer: str) -> DraftFiles:
    """Return files with the keys that describe the draft, of a config that `writer` has copied.

    Its number of layers is that of the target, but for P-EAGLE.
    """
    raw, tables = files.config, _KEYS["of_target_copies"]
    names = f"{tables['shape']} {tables[writer]}".split()
    result = {name: raw[name] for name in (*names, SECTION) if name in raw}
    if writer == _AUTOMODEL_EAGLE3:  # of P-EAGLE the number is the draft's own
        own = "num_hidden_layers" if raw.get("parallel_drafting") else "num_target_layers"
        result[own] = raw.get("num_hidden_layers")
        result |= {name: raw[name] for name in _LAYER_IDS if name in raw}
    return replace(files, config=result)


def block_keys(files: DraftFiles) -> DraftFiles:
    """Return files of a block draft with our keys, those of `dflash_config` at the top level.

    A DraftError says that two of them differ, or that a key of `dflash_config` is unknown.
    """
    raw, nested = dict(said_causal(files.config)), files.config.get(DFLASH_CONFIG) or {}
    if odd := sorted(nested.keys() - KNOWN):
        raise files.bad_config(
            f"{DFLASH_CONFIG} has {', '.join(odd)}, which spec-train does not know; such a key can "
            "change what the draft computes, so the draft is not read"
        )
    for name, value in nested.items():
        _put(raw, name, value, files)
    for theirs, ours in _KEYS["blocks"].items():
        if theirs not in raw:
            continue
        value = raw.pop(theirs)
        if ours == "num_target_layers" and value is not None:
            raw.pop(ours, None)  # TorchSpec: the number of captured layers
        _put(raw, ours, value, files)
    if "use_confidence_head" in nested:  # ModelOpt reads both, always
        raw.setdefault("confidence_head_with_markov", raw["enable_confidence_head"])
    if raw.get("confidence_head_alpha") and "enable_confidence_head" not in raw:  # SpecForge
        raw["enable_confidence_head"] = True
    if raw.get("markov_head_type") == "classical":  # TorchSpec
        raw["markov_head_type"] = "vanilla"
    if MUSE in (raw.get("architectures") or ()):
        raw = _of_transformers(raw)
    return replace(files, config=raw)


def _put(raw: dict[str, Any], name: str, value: Any, files: DraftFiles) -> None:
    """Set a key that may already have a value, which must then be the same."""
    if value is None:
        return
    if raw.get(name) is not None and raw[name] != value:
        raise files.bad_config(
            f"{name} = {raw[name]} and, in another place of the config, {value}; engines read "
            "different ones. Correct the wrong one"
        )
    raw[name] = value


def _of_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a config of transformers' class, with what that class does without a key for it.

    Its layers are sliding unless the config lists them, its blocks see both directions, and it lets
    a position see those at a distance of up to `sliding_window`: one more than other programs do.
    """
    layers = int(raw.get("num_hidden_layers") or 5)
    window = raw.get("sliding_window", 2048)
    return (
        {"is_causal": False, "sample_from_anchor": False}
        | {"rope_theta": 500_000.0, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072}
        | raw
        | {
            "num_hidden_layers": layers,
            "layer_types": raw.get("layer_types") or ["sliding_attention"] * layers,
            "sliding_window": window + 1 if window else window,
        }
    )


def refuse_arithmetic(files: DraftFiles, what: str, but: tuple[str, ...] = ()) -> None:
    """Refuse a config with a key that changes the arithmetic in a way that `what` does not have.

    `but` are keys that `what` reads.
    """
    raw, neutral, scales = files.config, _KEYS["neutral"], _KEYS["scales"]
    size = raw.get("head_dim") or raw.get("hidden_size", 0) // raw.get("num_attention_heads", 1)
    faults = []
    for name, value, path in _leaves(raw):
        if name in scales and value not in (None, size ** scales[name]):
            faults.append(f"{path} = {value}")
        if name in neutral and name not in but and value not in (None, *neutral[name]):
            faults.append(f"{path} = {'...' if isinstance(value, dict) else value}")
    if faults:
        raise files.bad_config(
            f"{', '.join(faults)} cannot be represented: {what} of spec-train has no such "
            "arithmetic"
        )


def unread_keys(files: DraftFiles) -> list[str]:
    """Return the keys of a published config, sorted, of which it is unknown what they change.

    Null values are left out. Drafts of this project have other checks, and a config that is a copy
    of the target's may have any key: its draft class reads a few of them.
    """
    if SECTION in files.config or copied_from_target(files) is not None:
        return []
    leaves = _leaves(files.config)
    return sorted(path for name, value, path in leaves if value is not None and name not in KNOWN)


def unread_text(names: list[str]) -> str:
    """Return a sentence about keys that were not read."""
    return (
        f"keys of unknown meaning were not read: {', '.join(names)}. If one of them changes what "
        "the draft computes, it is read as another draft than the one that was trained"
    )


def _leaves(raw: dict[str, Any], path: str = "", rope: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield (name, value, path) of the keys at the top and in the nested tables.

    `rope` goes before the names of a rope table, which may have a table for each type of layers.
    """
    for name, value in raw.items():
        if rope and isinstance(value, dict):
            yield from _leaves(value, f"{path}{name}.", rope)
        elif name in _TABLES:
            inner = "rope " if name.startswith("rope_") else ""
            yield from _leaves(table_of(raw, name), f"{path}{name}.", inner)
        else:
            yield rope + name, value, path + name


# -- tensors ---------------------------------------------------------------------------------------


def plain_names(tensors: dict[str, Tensor], where: str) -> dict[str, Tensor]:
    """Return the tensors without the prefix `model.` that some tools add to the names.

    DraftError: one is there with the prefix and without; `where` is the path of the weights.
    """
    plain = {re.sub(r"^(model\.)+", "", name): value for name, value in tensors.items()}
    if len(plain) < len(tensors):
        twice = next(name for name in plain if f"model.{name}" in tensors)
        raise DraftError(f"{where}: {twice} is there twice, under two names: also as model.{twice}")
    return plain


def count_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers in a draft's tensors; `midlayer` is the first one."""
    plain = [name.replace("midlayer.", "layers.0.", 1) for name in names]
    return len({int(m[1]) for name in plain if (m := _LAYER.match(name))})


def refuse_quantised(files: DraftFiles) -> None:
    """Raise DraftError if the weights of a draft are quantised, or its config says that they are.

    A config that is a copy of the target's has the target's.
    """
    tables = (files.config.get(name) for name in ("quantization_config", "compression_config"))
    table = next((table for table in tables if isinstance(table, dict) and table), None)
    method = (table or {}).get("quant_method")
    advice = (
        "spec-train reads weights in bfloat16, float16 or float32: take the draft before it was "
        "quantised, or export it in bfloat16 with the program that quantised it"
    )
    for name in files.tensors:
        for pattern, by in _TENSORS["quantised"].items():
            if re.search(pattern, name):
                raise files.bad_weights(f"{name}: quantised weights ({method or by}); {advice}")
    if table is not None and copied_from_target(files) is None:
        raise files.bad_config(
            f"says that the weights are quantised ({method or 'quantization_config'}), and no "
            f"tensor is. {advice}. If they never were, remove the key"
        )


def eagle_tensors(files: DraftFiles, what: str) -> dict[str, Tensor]:
    """Return the tensors of an EAGLE draft under our names; refuse parts that `what` has not."""
    for name in files.tensors:
        for pattern, words in _TENSORS["refused"].items():
            if re.search(pattern, name):
                raise files.bad_weights(
                    f"{name}: {words} cannot be represented: {what} of spec-train has none"
                )
    return _renamed(files, _TENSORS["eagle"])


def block_tensors(files: DraftFiles) -> dict[str, Tensor]:
    """Return the tensors of a block draft under our names."""
    return _renamed(files, _TENSORS["blocks"])


def _renamed(files: DraftFiles, table: Mapping[str, str]) -> dict[str, Tensor]:
    """Return tensors under our names, without rotary tables, which are computed from the config."""
    result: dict[str, Tensor] = {}
    for name, value in files.tensors.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        for pattern, ours in table.items():
            if match := re.match(pattern, name):
                name = match.expand(ours) + name[match.end() :]
                break
        if name in result:
            raise files.bad_weights(f"{name} is there twice, under two names")
        result[name] = value
    return result


def written_tensors(form: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under the names of a form."""
    result, table = {}, _TENSORS["written"][form]
    for name, value in tensors.items():
        ours = next((start for start in table if name.startswith(start)), "")
        result[table.get(ours, "") + name.removeprefix(ours)] = value
    return result
