"""The form of the speculators library: a config of a layer inside a config of an algorithm.

vLLM reads it too, and takes `verifier.name_or_path` as the target.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from spec_data.shards.errors import ConfigError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.draft_seal import SECTION
from spec_train.formats.kind_files import every_kind
from spec_train.formats.names import LAYER, TYPE
from spec_train.formats.target_facts import TargetFacts

VERSION = "0.9.0"
"""The release of the speculators library whose form is written."""
_LAYER_KEYS = """
model_type hidden_size intermediate_size num_hidden_layers hidden_act num_attention_heads
num_key_value_heads head_dim vocab_size rms_norm_eps max_position_embeddings rope_parameters
rope_theta rope_scaling partial_rotary_factor attention_bias mlp_bias tie_word_embeddings
bos_token_id eos_token_id pad_token_id layer_types sliding_window use_sliding_window is_causal"""
"""Keys of ours in the config of the layer."""


def flat_files(files: DraftFiles) -> tuple[str, DraftFiles, int | None]:
    """Return kind, flat files and tokens per step of files in the speculators form."""
    raw = dict(files.config)
    kind, layer = raw.pop(TYPE), raw.pop(LAYER, None)
    if not isinstance(layer, dict):
        raise files.bad_config(f"{LAYER} is missing, which speculators files need")
    known = {name: one.speculators for name, one in every_kind().items() if one.speculators}
    if kind not in known:
        raise files.bad_config(
            f"speculators drafts of type {kind} are unknown; known: {', '.join(known)}"
        )
    methods = (raw.pop("speculators_config", None) or {}).get("proposal_methods") or [{}]
    depth = methods[0].get("speculative_tokens")
    raw = {**layer, **{name: value for name, value in raw.items() if value is not None}}
    kind, files = known[kind](replace(files, config=raw), depth)
    return kind, files, depth


def speculators_files(
    ours: DraftFiles,
    target: TargetFacts,
    kind: tuple[str, str],  # the library's name of the algorithm, and of its class
    fields: Mapping[str, Any],
    depth: int,
    tensors: dict[str, Tensor],
    layer: Mapping[str, Any],
) -> DraftFiles:
    """Return our checkpoint in the speculators form.

    `fields` and `layer` are what the two configs have beside the keys of every draft; `depth` are
    the tokens per verification step.

    Raises:
        ConfigError: the target has no name, which the form contains.
    """
    if target.name is None:
        raise ConfigError(
            "the speculators form contains the name of its target: pass --target (a directory, or "
            "the name under which the target will be served)"
        )
    raw, (algorithm, name) = ours.config, kind
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        TYPE: algorithm,
        "speculators_version": VERSION,
        "architectures": [name],
        "dtype": raw["dtype"],
        "tie_word_embeddings": False,
        "draft_vocab_size": raw["draft_vocab_size"],
        **fields,
        LAYER: {name: raw[name] for name in _LAYER_KEYS.split() if name in raw} | dict(layer),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target.name, "architectures": list(target.architectures)},
        },
        SECTION: raw[SECTION],
    }
    return DraftFiles(config, tensors, ours.where)
