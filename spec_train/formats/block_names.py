"""Block drafts of all trainers under one set of names: those of DeepSpec, which engines read too.

In: files in the flat form of any trainer. Out: the same files with DeepSpec's names of tensors, and
with the keys of the table `dflash_config` at the top level of the config. Nothing is interpreted
here except keys that mean the same under two names. `auto_map` and files of code are never used.

Sources: z-lab's `dflash`, transformers 5.23 (`MuseGlimmerAssistantModel`), NVIDIA's ModelOpt 0.47
and AutoModel 0.7, SpecForge 0.2, TorchSpec, DeepSpec, speculators 0.9.
"""

from typing import Any

from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.dspark import MUSE
from spec_train.formats.flat import plain_names
from spec_train.formats.known_keys import KNOWN

NESTED = "dflash_config"
"""The table of DFlash, whose keys have priority in engines."""

_TENSORS = (
    ("encoder.fc.", "fc."),  # transformers
    ("encoder.output_norm_enc.", "hidden_norm."),
    ("context_proj.", "fc."),  # TorchSpec
    ("context_norm.", "hidden_norm."),
    ("final_norm.", "norm."),
    ("logit_head.markov_head.", "markov_head."),  # early SpecForge
    ("logit_head.confidence_head.", "confidence_head."),
    ("markov_w1.", "markov_head.markov_w1."),  # ModelOpt
    ("markov_w2.", "markov_head.markov_w2."),
    ("gate_proj.", "markov_head.gate_proj."),
    ("joint_proj.", "markov_head.joint_proj."),
    ("confidence_proj.", "confidence_head.proj."),
)
"""(start of a tensor's name in a trainer's file, in ours)."""
_KEYS = (
    ("causal", "is_causal"),  # z-lab, ModelOpt, vLLM
    ("use_confidence_head", "enable_confidence_head"),  # ModelOpt
    ("target_num_hidden_layers", "num_target_layers"),  # TorchSpec, whose num_target_layers differs
    ("dspark_block_size", "block_size"),
    ("dspark_target_layer_ids", "target_layer_ids"),
)
"""(key of a trainer, ours)."""


def block_names(files: DraftFiles) -> DraftFiles:
    """Return files of a block draft under DeepSpec's names.

    Raises:
        DraftError: two keys or two tensors that have one name here differ, or a key of
            `dflash_config` is unknown.
    """
    raw, nested = dict(files.config), files.config.get(NESTED) or {}
    if odd := sorted(nested.keys() - KNOWN):
        raise DraftError(
            f"{files.config_path}: {NESTED} has {', '.join(odd)}, which spec-train does not know; "
            "such a key can change what the draft computes, so the draft is not read"
        )
    for name, value in nested.items():
        _put(raw, name, value, files)
    for theirs, ours in _KEYS:
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
    return DraftFiles(raw, _renamed(files), files.where)


def _put(raw: dict[str, Any], name: str, value: Any, files: DraftFiles) -> None:
    """Set a key that may already have a value, which must then be the same."""
    if value is None:
        return
    if raw.get(name) is not None and raw[name] != value:
        raise DraftError(
            f"{files.config_path}: {name} = {raw[name]} and, in another place of the config, "
            f"{value}; engines read different ones. Correct the wrong one"
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
        | raw
        | {
            "num_hidden_layers": layers,
            "layer_types": raw.get("layer_types") or ["sliding_attention"] * layers,
            "sliding_window": window + 1 if window else window,
        }
    )


def _renamed(files: DraftFiles) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in plain_names(files.tensors).items():
        if name.endswith("rotary_emb.inv_freq"):
            continue  # computed from the config
        new = next(
            (ours + name[len(theirs) :] for theirs, ours in _TENSORS if name.startswith(theirs)),
            name,
        )
        if new in found:
            raise DraftError(f"{files.weights_path}: {new} is there twice, under two names")
        found[new] = value
    return found
