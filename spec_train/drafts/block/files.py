"""The files of block drafts: what DSpark, DFlash and those with a second stage share.

Two things have no key in most files of DSpark and DFlash, because the program that wrote them has
only one form. Which slot drafts first follows from the kind of draft: DSpark drafts from the
anchor's slot, DFlash from the slot after it. Whether slots see later slots of their block follows
from the layer, as in vLLM, SGLang, SpecForge and z-lab's code: sliding layers are causal, full ones
are not.

Engines share the target's embedding and head with a block draft over the full vocabulary, so the
forms for engines contain neither; llama.cpp would tie the head to an embedding without a head. The
slot that drafts first (`sample_from_anchor`) is always written, because the defaults of readers
differ.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.layer_ids import (
    as_block_inputs,
    from_block_inputs,
)
from spec_train.drafts.eagle.files import stated_windows
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.flat_config import (
    LAYER_NORMS,
    mask_token,
    needed,
    options_of,
    refuse_set,
    section_of,
    shape_of,
    sort_states,
    stated_vocabulary,
    switches_of,
    with_sizes,
)
from spec_train.formats.kind_files import Flatten, KindFiles, Source, Writer, every_kind, unchanged
from spec_train.formats.names import (
    BLOCK_INPUT_KEY,
    BLOCK_TABLE,
    EMBEDDING,
    HEAD,
    known_keys,
    refuse_arithmetic,
    renamed,
    said_causal,
    table_of,
)
from spec_train.formats.shared_weights import has_own_embedding, own_tensors
from spec_train.formats.speculators import speculators_files
from spec_train.formats.target_facts import TargetFacts
from spec_train.formats.vocabulary_maps import own_vocabulary
from spec_train.formats.windows import (
    SLIDING,
    Windows,
    causal_windows,
    slides_non_causal,
    windows_of,
)

log = logging.getLogger(__name__)

DSPARK, DFLASH = "Qwen3DSparkModel", "DFlashDraftModel"
"""The classes of block drafts whose first slot drafts, and of those of DFlash's form."""
MUSE = "MuseGlimmerAssistantModel"
"""The DFlash draft of transformers."""
_HEADS = (
    *("markov_rank", "markov_head_type"),
    *("enable_confidence_head", "confidence_head_with_markov"),
)
_NORMS = (*LAYER_NORMS, "fc_norm", "norm_output")
_ANCHOR, _NON_CAUSAL = "sample_from_anchor", "sliding_window_non_causal"
_SINKS = "attention_sink_bias"
_TENSORS = {  # start of a name (pattern): DeepSpec's, which are ours
    r"encoder\.fc\.": "fc.",  # transformers
    r"encoder\.output_norm_enc\.": "hidden_norm.",
    r"context_proj\.": "fc.",  # TorchSpec
    r"context_norm\.": "hidden_norm.",
    r"final_norm\.": "norm.",
    r"logit_head\.markov_head\.": "markov_head.",  # early SpecForge
    r"logit_head\.confidence_head\.": "confidence_head.",
    r"markov_w1\.": "markov_head.markov_w1.",  # ModelOpt
    r"markov_w2\.": "markov_head.markov_w2.",
    r"gate_proj\.": "markov_head.gate_proj.",
    r"joint_proj\.": "markov_head.joint_proj.",
    r"confidence_proj\.": "confidence_head.proj.",
}


@dataclass(frozen=True, kw_only=True)
class BlockFiles(KindFiles):
    """The files of a kind of block draft. One with `keys` has a second stage."""

    written: str
    """The class in our checkpoints."""
    absent: Mapping[str, Any] = field(default_factory=dict)
    """Values of keys that a file of the speculators library lacks, in the library (0.9)."""
    tensors: Mapping[str, str] = field(default_factory=dict)
    """Tensors of the second stage under the names of other programs: ours by theirs (pattern)."""
    defaults: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda raw: {}
    """Values of `keys` that files lack."""
    any_slot: bool = False
    """Its published drafts begin at the anchor's slot or after it, so that a file must say it."""
    facts: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: block_facts(config)


def stages() -> dict[str, BlockFiles]:
    """Return the kinds that have a second stage."""
    kinds = every_kind().items()
    return {kind: one for kind, one in kinds if isinstance(one, BlockFiles) and one.keys}


def stage_of(raw: Mapping[str, Any]) -> str | None:
    """Return the kind of a block draft that has a second stage; else None.

    Its class says it, or the table of a DFlash draft.
    """
    names = set(raw.get("architectures") or ())
    nested = table_of(dict(raw), BLOCK_TABLE)
    type_of = raw.get("projector_type") or nested.get("projector_type")
    for kind, one in stages().items():
        if kind == type_of or names & set(one.classes):
            return kind
    return None


def is_dflash(raw: Mapping[str, Any]) -> bool:
    """Return whether a config names a class of DFlash."""
    return not set(raw.get("architectures") or ()).isdisjoint(every_kind()["dflash"].classes)


def foreign_stage(kind: str, what: str) -> Callable[[DraftFiles], Iterator[tuple[str, str]]]:
    """Return what finds the second stage of a kind, `what`, in files of another one.

    Its keys and tensors begin with its name. A key that is null, false or 0 switches nothing on.
    """

    def found(files: DraftFiles) -> Iterator[tuple[str, str]]:
        raw = files.config
        if stage_of(raw) == kind:
            return
        nested = table_of(raw, BLOCK_TABLE)
        named = [(name, f"{BLOCK_TABLE}.{name}") for name, value in nested.items() if value]
        named += [(name, name) for name, value in raw.items() if value]
        named += [(name.removeprefix("model."), name) for name in files.tensors]
        for name, shown in named:
            if name.startswith((f"{kind}_", f"{kind}.")):
                yield shown, what

    return found


def block_facts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the table of engines may name; block drafts norm queries and keys unless denied.

    Files of DFlash's form have another class than DSpark's.
    """
    classes = config.get("architectures") or ()
    markov = config.get("markov_head_type") if config.get("markov_rank") else None
    dflash_class = bool(classes) and DSPARK not in classes
    return {"qk_norm": True, "dflash_class": dflash_class, "markov": markov}


def stated_block(kind: str) -> Callable[[DraftFiles, set[str], bool], dict[str, Any]]:
    """Return what tells the options that the config of a block draft of a kind states."""
    return lambda files, own, library: _stated(kind, files, own)


def _stated(kind: str, files: DraftFiles, own: set[str]) -> dict[str, Any]:
    """Return the options, of those in `own`, of a block draft that a file with our keys states."""
    one = every_kind()[kind]
    assert isinstance(one, BlockFiles)
    stage = one if one.keys else None
    of_stage = ("projector_type", *one.keys) if stage else ()
    refuse_arithmetic(files, one.what, but=(_SINKS, *of_stage))
    raw = files.config
    named = "architectures" in raw or SECTION in raw
    if named and stage is not None:
        raw = {**raw, **one.defaults(raw)}
    count = raw.get("num_hidden_layers")
    windows = windows_of(files, count)
    if count is not None:
        windows = causal_windows(files, windows, count)
    confident = bool(raw.get("enable_confidence_head"))
    ids = raw.get("target_layer_ids")
    found = {
        "num_layers": count,
        "block_size": raw.get("block_size"),
        "mask_token_id": mask_token(raw),
        "num_anchors": raw.get("num_anchors"),
        "qk_norm": raw.get("qk_norm"),
        _SINKS: raw.get(_SINKS),
        "layers": ",".join(map(str, sorted(set(ids)))) if ids else None,
        **stated_windows(windows),
        **{name: raw.get(name) for name in one.keys},
    }
    if windows.layer_types:
        found["sliding_window_non_causal"] = slides_non_causal(files, windows)
    heads = bool(raw.get("markov_rank")) or confident
    if named or raw.get("sample_from_anchor") is not None:
        first = stage is not None or is_dflash(raw)
        anchor = _anchor(files, first, heads or (stage is not None and "layout" in own))
        found["layout"] = "anchor" if anchor else "mask"
    if stage is None:
        found |= stated_vocabulary(raw, named)
    if "markov_rank" in own and (named or raw.get("markov_rank") is not None):
        found["markov_rank"] = raw.get("markov_rank") or 0
    if heads:
        found["markov_head_type"] = raw.get("markov_head_type")
    if confident:
        found["confidence_head_with_markov"] = raw.get("confidence_head_with_markov")
    said = raw.get("enable_confidence_head")
    if "markov_rank" in own and not confident and (named or said is not None):
        found["confidence_weight"] = 0.0
    return found


# -- reading ---------------------------------------------------------------------------------------


def of_speculators(kind: str) -> Flatten:
    """Return what makes a flat file of one of the speculators library, of a kind."""

    def flat(files: DraftFiles, depth: int | None) -> tuple[str, DraftFiles]:
        one = every_kind()[kind]
        assert isinstance(one, BlockFiles)
        _check_of_speculators(kind, files, depth, one.absent)
        raw = dict(files.config)
        raw["target_layer_ids"] = from_block_inputs(raw.pop(BLOCK_INPUT_KEY))
        raw["architectures"] = [one.written]
        return kind, replace(files, config={**one.absent, **raw})

    return flat


def of_plain_speculators(files: DraftFiles, depth: int | None) -> tuple[str, DraftFiles]:
    """Return a flat file of one without a second stage, whose class says which kind it is."""
    return of_speculators("dflash" if is_dflash(files.config) else "dspark")(files, depth)


def _check_of_speculators(
    kind: str, files: DraftFiles, depth: int | None, absent: Mapping[str, Any]
) -> None:
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
    if _NON_CAUSAL not in {**absent, **raw} and windows_of(files).layer_types:
        raise files.bad_config(
            f"has sliding layers and no {_NON_CAUSAL}; the speculators library reads it as false, "
            "vLLM as true. Add the value that it was trained with"
        )
    read = {**absent, **raw}
    rnn = kind == "dspark" and read["markov_rank"] and read["markov_head_type"] == "rnn"
    if rnn and not read[_ANCHOR]:
        raise files.bad_config(
            f"markov_head_type = rnn with {_ANCHOR} = false: the speculators library advances the "
            "head's state over the anchor's slot before the first draft, while drafts here and "
            "SGLang start at the first draft, so other tokens would be drafted than in training. "
            f"Train it with {_ANCHOR} = true, or another Markov head"
        )


def read_block(files: DraftFiles, target: TargetFacts, source: Source) -> DraftFiles:
    """Read a block draft; which kind it is follows from its class, table and heads."""
    stage, stated = stage_of(files.config), table_of(files.config, SECTION).get("draft")
    one = stages()[stage] if stage else None
    dflash = stage is not None or is_dflash(files.config)
    files = _plain(files, one)
    blocks = int(files.config["num_hidden_layers"])
    windows = _windows(files, blocks)
    confident, heads = _heads(files, one)
    anchor = _anchor(files, dflash, heads or (one is not None and one.any_slot))
    layers, tensors = sort_states(
        *(files.tensors, files.config["target_layer_ids"], files.config_path),
        collected=source.collected,
    )
    config = shape_of(files) | switches_of(files)
    config |= {_SINKS: True} if _has_sinks(files) else {}
    embedding = bool(config.get("train_embeddings")) or has_own_embedding(tensors, files, target)
    config |= {
        "train_embeddings": embedding,
        "architectures": [DFLASH if dflash and not anchor and not heads else DSPARK],
        "model_type": "qwen3",
        "num_hidden_layers": blocks,
    }
    config |= _own_keys(files, target, anchor, windows)
    config |= _stage_keys(files, one)
    config["confidence_head_with_markov"] = _with_markov(files, config)
    non_causal = slides_non_causal(files, windows)
    config |= {_NON_CAUSAL: True} if windows.layer_types and non_causal else {}
    if config["num_target_layers"] is None:
        raise files.bad_config(
            "num_target_layers is missing; pass --target, or --data, where the command has it"
        )
    needed(replace(files, config=config), "mask_token_id")
    kind = stated or stage or ("dflash" if dflash and not heads else "dspark")
    options = options_of(
        *(kind, config, layers),
        layout="anchor" if anchor else "mask",
        num_anchors=files.config.get("num_anchors") or None,
        confidence_weight=1.0 if confident else 0.0,
        confidence_head_with_markov=config["confidence_head_with_markov"] or not confident,
    )
    config[SECTION] = section_of(files, kind, layers, options)
    return DraftFiles(config, _tensors(tensors, config, files, target), files.where)


def _plain(files: DraftFiles, stage: BlockFiles | None) -> DraftFiles:
    """Return files with our keys, sizes and names; refuse what such a draft has not."""
    what = stage.what if stage else every_kind()["dspark"].what
    files = block_keys(files)
    table = dict(_TENSORS)
    for one in stages().values():
        table |= one.tensors
    files = replace(files, tensors=renamed(files, table))
    of_stage = ("projector_type", *stage.keys) if stage else ()
    refuse_arithmetic(files, what, but=(_SINKS, *of_stage))
    refuse_set(files, what, _NORMS)
    needed(files, "num_hidden_layers")
    _check_layer_ids(files)
    return with_sizes(files)


def _windows(files: DraftFiles, blocks: int) -> Windows:
    """Return the windows of the layers; refuse sliding ones without a window."""
    raw, windows = files.config, windows_of(files, blocks)
    if SLIDING in (raw.get("layer_types") or ())[:blocks] and not windows.layer_types:
        raise files.bad_config(
            f"layer_types has {SLIDING}, but use_sliding_window = {raw.get('use_sliding_window')} "
            f"and sliding_window = {raw.get('sliding_window')} set no window; programs read such "
            "layers in different ways. Correct the wrong key"
        )
    return causal_windows(files, windows, blocks)


def _heads(files: DraftFiles, stage: BlockFiles | None) -> tuple[bool, bool]:
    """Return whether there is a confidence head, and whether there is it or a Markov head."""
    confident = bool(files.config.get("enable_confidence_head"))
    heads = bool(files.config.get("markov_rank")) or confident
    if stage and heads:
        raise files.bad_config(f"{stage.what} has no Markov or confidence head")
    return confident, heads


def _own_keys(
    files: DraftFiles, target: TargetFacts, anchor: bool, windows: Windows
) -> dict[str, Any]:
    """Return the keys that every block draft has."""
    raw = files.config
    return {
        "num_target_layers": raw.get("num_target_layers") or target.num_layers,
        "block_size": needed(files, "block_size"),
        "mask_token_id": mask_token(raw),
        _ANCHOR: anchor,
        **windows.keys(),
        "markov_rank": raw.get("markov_rank") or 0,
        "markov_head_type": raw.get("markov_head_type") or "vanilla",
        "enable_confidence_head": bool(raw.get("enable_confidence_head")),
    }


def _stage_keys(files: DraftFiles, stage: BlockFiles | None) -> dict[str, Any]:
    """Return the class and the keys of a second stage."""
    if stage is None:
        return {}
    files = replace(files, config={**files.config, **stage.defaults(files.config)})
    return {
        "architectures": [stage.written],
        **{name: needed(files, name) for name in stage.keys},
    }


def _tensors(
    tensors: dict[str, Tensor], config: dict[str, Any], files: DraftFiles, target: TargetFacts
) -> dict[str, Tensor]:
    """Return the tensors of our checkpoint, with those that the target supplies."""
    vocab, draft_vocab = config["vocab_size"], config["draft_vocab_size"]
    tensors = own_vocabulary(tensors, vocab, draft_vocab, files.weights_path)
    full = vocab == draft_vocab
    if not full and not {HEAD, "d2t"} <= tensors.keys():
        raise files.bad_weights("a reduced draft vocabulary needs lm_head.weight and d2t")
    return own_tensors(tensors, files, target, config["dtype"], target_head=full)


def block_keys(files: DraftFiles) -> DraftFiles:
    """Return files of a block draft with our keys, those of its table at the top level.

    A DraftError says that two of them differ, or that a key of the table is unknown.
    """
    raw, nested = dict(said_causal(files.config)), files.config.get(BLOCK_TABLE) or {}
    if odd := sorted(nested.keys() - known_keys()):
        raise files.bad_config(
            f"{BLOCK_TABLE} has {', '.join(odd)}, which spec-train does not know; such a key can "
            "change what the draft computes, so the draft is not read"
        )
    for name, value in nested.items():
        _put(raw, name, value, files)
    aliases = [pair for one in every_kind().values() for pair in one.aliases.items()]
    for theirs, ours in aliases:
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
        raw = of_transformers(raw)
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


def of_transformers(raw: dict[str, Any]) -> dict[str, Any]:
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


def _has_sinks(files: DraftFiles) -> bool:
    """Return whether heads have sinks: by the tensors, which a key of the config may not deny."""
    found = any(name.endswith(f"self_attn.{_SINKS}") for name in files.tensors)
    if files.config.get(_SINKS) not in (None, found):
        have = "has" if found else "has no"
        raise files.bad_config(f"{_SINKS} = {not found}, but the file {have} {_SINKS} tensors")
    return found


def usual_layers(num_layers: int, count: int) -> list[int]:
    """Return the layers of a published DFlash draft that lists none: over [1, L-3]; one is L // 2.

    The rule is that of z-lab's code, SpecForge, TorchSpec and NVIDIA's AutoModel.
    """
    if count == 1:
        return [num_layers // 2]
    return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]


def _check_layer_ids(files: DraftFiles) -> None:
    """Refuse a block draft that does not say which layers it reads; programs have other defaults.

    Those of z-lab's code are named, for a DFlash that was trained with it.
    """
    raw = files.config
    if raw.get("target_layer_ids"):
        return
    blocks, size, usual = raw.get("num_target_layers"), raw.get("hidden_size"), ""
    if "fc.weight" in files.tensors and isinstance(size, int) and isinstance(blocks, int):
        ids = usual_layers(blocks, files.tensors["fc.weight"].shape[1] // size)
        usual = f". The default of z-lab's code, if its trainer was given none, is {ids}"
    raise files.bad_config(
        "target_layer_ids is missing, and no tensor says which layers of the target the draft "
        f"reads. Add the ids that it was trained with, counted as --layers counts: k is the output "
        f"of block k{usual}"
    )


def _anchor(files: DraftFiles, dflash: bool, heads: bool) -> bool:
    """Return whether the anchor's slot makes the first draft."""
    raw = files.config
    names = (_ANCHOR, "shift_label", "query_zero_predicts_next")  # the last: sglang#40144
    said = {name: raw[name] for name in names if raw.get(name) is not None}
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


# -- writing ---------------------------------------------------------------------------------------


def to_engines(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for engines: without the target's embedding; a trained one stays."""
    if ours.config.get("train_embeddings"):
        return ours
    tensors = {name: value for name, value in ours.tensors.items() if name != EMBEDDING}
    return DraftFiles(ours.config, tensors, ours.where)


def to_deepspec(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for DeepSpec: with copies of the given target's embedding and head."""
    if target.head is None:
        raise DraftError(
            f"{ours.where}: DeepSpec's checkpoints hold a copy of the target's LM head; pass "
            "--target with the target's directory"
        )
    head = target.head.detach().to("cpu", ours.tensors["fc.weight"].dtype, copy=True)
    config = ours.config | {"architectures": [DSPARK]}
    return DraftFiles(config, ours.tensors | {HEAD: head}, ours.where)


def to_speculators(ours: DraftFiles, target: TargetFacts) -> DraftFiles:
    """Write a block draft for the speculators library; its class is by the slot that drafts."""
    raw = ours.config
    by_class = {DFLASH: ("dflash", "DFlashSpeculator")} | {
        one.written: (kind, one.written) for kind, one in stages().items() if one.speculators
    }
    kind = by_class.get(raw["architectures"][0], ("dspark", "DSparkSpeculator"))
    fields: dict[str, Any] = {
        BLOCK_INPUT_KEY: as_block_inputs(raw[SECTION]["layers"]),
        **{name: raw[name] for name in ("block_size", "mask_token_id", _ANCHOR)},
        # without sliding layers: vLLM would make the full layers of DFlash causal by a false
        _NON_CAUSAL: raw.get(_NON_CAUSAL, not raw.get("sliding_window")),
        **{name: raw[name] for name in ("target_hidden_size", "num_target_layers")},
        **{
            name: raw[name]
            for name in (_HEADS if kind[0] == "dspark" else every_kind()[kind[0]].keys)
        },
    }
    depth = raw["block_size"] - (0 if raw[_ANCHOR] else 1)
    return speculators_files(
        ours, target, kind, fields, depth, to_engines(ours, target).tensors, {}
    )


BLOCK_FORMS: dict[str, Writer] = {
    "hf": unchanged,
    "vllm": to_engines,
    "sglang": to_engines,
    "speculators": to_speculators,
    "deepspec": to_deepspec,
}
