"""The config format of the speculators library (0.9): a layer config inside an algorithm config.

vLLM reads it too, and uses `verifier.name_or_path` as the target.
"""

from typing import Any

from spec_data.shards.errors import ConfigError, DraftError
from spec_train.formats.draft_files import DraftFiles
from spec_train.formats.target_facts import TargetFacts

VERSION = "0.9.0"
TYPE = "speculators_model_type"
LAYER = "transformer_layer_config"
_LAYER_KEYS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size", "rms_norm_eps"),
    *("max_position_embeddings", "rope_parameters", "rope_theta", "rope_scaling"),
    *("partial_rotary_factor", "attention_bias", "mlp_bias", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "layer_types"),
    *("sliding_window", "use_sliding_window", "is_causal"),
)


def wrap(
    flat: dict[str, Any], kind: str, architecture: str, depth: int, target: TargetFacts, **own: Any
) -> dict[str, Any]:
    """Convert a flat config to the speculators format; `own` are the fields of this kind.

    Args:
        flat: the config that engines read; its `spec_train` section is copied.
        kind: `speculators_model_type`.
        architecture: class of the library.
        depth: tokens to draft per round.
        target: its name becomes the verifier's.

    Raises:
        ConfigError: the target has no name.
    """
    if target.name is None:
        raise ConfigError(
            "the speculators form contains the name of its target: pass --target (a directory, or "
            "the name under which the target will be served)"
        )
    return {
        TYPE: kind,
        "speculators_version": VERSION,
        "architectures": [architecture],
        "dtype": flat["dtype"],
        "tie_word_embeddings": False,
        "draft_vocab_size": flat["draft_vocab_size"],
        **own,
        LAYER: {name: flat[name] for name in _LAYER_KEYS if name in flat},
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": depth,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {
                "name_or_path": target.name,
                "architectures": list(target.architectures),
            },
        },
        "spec_train": flat["spec_train"],
    }


def unwrap(files: DraftFiles) -> tuple[str, DraftFiles, int | None]:
    """Return the kind, the flat form and the tokens per round of files in the speculators format.

    Raises:
        DraftError: the layer config is missing.
    """
    raw = dict(files.config)
    kind = raw.pop(TYPE)
    layer = raw.pop(LAYER, None)
    if not isinstance(layer, dict):
        raise DraftError(f"{files.config_path}: {LAYER} is missing, which speculators files need")
    methods = (raw.pop("speculators_config", None) or {}).get("proposal_methods") or [{}]
    flat = {**layer, **{name: value for name, value in raw.items() if value is not None}}
    return kind, DraftFiles(flat, files.tensors, files.where), methods[0].get("speculative_tokens")
