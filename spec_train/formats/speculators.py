"""The envelope of the speculators library (0.9): a layer config inside, an algorithm outside.

vLLM reads it too, and takes the target from `verifier.name_or_path`.
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
)


def wrap(
    flat: dict[str, Any], kind: str, architecture: str, depth: int, target: TargetFacts, **own: Any
) -> dict[str, Any]:
    """Put a flat config into the envelope; `own` are the fields of this kind.

    Args:
        flat: as engines read it; the `spec_train` section is carried along.
        kind: `speculators_model_type`.
        architecture: class of the library.
        depth: tokens to draft per round.
        target: its name is written as the verifier's.

    Raises:
        ConfigError: the target has no name.
    """
    if target.name is None:
        raise ConfigError(
            "the speculators form names the target it belongs to: give --target (a directory, or "
            "the name under which it will be served)"
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
    """The kind, the flat form and the tokens per round of files in the envelope.

    Raises:
        DraftError: there is no layer config.
    """
    raw = dict(files.config)
    kind = raw.pop(TYPE)
    layer = raw.pop(LAYER, None)
    if not isinstance(layer, dict):
        raise DraftError(f"{files.config_path}: speculators form without {LAYER}")
    methods = (raw.pop("speculators_config", None) or {}).get("proposal_methods") or [{}]
    flat = {**layer, **{name: value for name, value in raw.items() if value is not None}}
    return kind, DraftFiles(flat, files.tensors, files.where), methods[0].get("speculative_tokens")
