"""Make the identity of a target and its prompts: every fact that decides states and token ids.

`spec_data.shards.identity` describes the table of facts and compares two of them.
"""

import json
import platform
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import spec_data
from spec_data.models.reading import check_quantisation, load_config, text_config
from spec_data.models.resolve import resolve_model
from spec_data.models.streams import streams_of
from spec_data.models.tokenizer import load_tokenizer
from spec_data.models.weight_files import weights_hash
from spec_data.shards.errors import SpecDataError, TargetError
from spec_data.shards.files import read_object, sha256_file, sha256_json

_VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype"}

# Fields of the decoder's config that change its states. A field that a family lacks is left out.
_DECIDING = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size", "layer_types"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "attention_bias", "mlp_bias"),
    *("hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "sliding_window"),
    *("max_position_embeddings", "original_max_position_embeddings", "tie_word_embeddings"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
    *("logit_scale", "logits_scaling", "embedding_multiplier", "residual_multiplier"),
    *("attention_multiplier", "num_experts", "num_local_experts", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor"),
)


def identify(
    directory: Path, config: Any, tokenizer: Any, trust: bool, weights: bool = True
) -> dict[str, Any]:
    """Return the identity of the target in a directory, without loading its weights.

    Its weights and its config.json are hashed, with `trust` also the code that comes with it. How
    it runs (`dtype`) and what its prompts have (`chat_template_kwargs`) is not in it.

    Without `weights`, their hash is None, and they need not be there.

    Raises:
        TargetError: config.json is damaged, or there are no complete safetensors files.
        MissingError: a weight file is absent.
    """
    facts = {"weights_hash": weights_hash(directory) if weights else None}
    return _plain(facts | _config_facts(directory, config, trust) | tokenizer_facts(tokenizer))


def identify_files(directory: Path, trust: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Return the identity of a directory as far as its files allow, and what could not be read.

    A copy in the Hub's cache often lacks the weights; a target may come without a tokenizer.
    """
    facts: dict[str, Any] = {}
    problems = []
    for part in (
        lambda: {"weights_hash": weights_hash(directory)},
        lambda: _config_facts(directory, load_config(directory, trust), trust),
        lambda: tokenizer_facts(load_tokenizer(directory, trust)),
    ):
        try:
            facts |= _plain(part())
        except SpecDataError as error:
            problems.append(str(error).strip().splitlines()[0])
    return facts, problems


@dataclass(frozen=True, kw_only=True)
class TargetFiles:
    """What is known of a target without its weights."""

    model_dir: Path
    model_config: Any  # of transformers
    tokenizer: PreTrainedTokenizerBase
    identity: dict[str, Any]  # see `identify`
    target: dict[str, Any]  # the manifest's `target`
    tokenizer_id: dict[str, Any]  # what settings record of it

    def with_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> "TargetFiles":
        """Return the same target with another tokenizer."""
        facts = {k: v for k, v in self.identity.items() if not k.startswith("tokenizer.")}
        facts |= _plain(tokenizer_facts(tokenizer))
        return replace(
            self, tokenizer=tokenizer, identity=facts, tokenizer_id=_tokenizer_id(facts, tokenizer)
        )


def read_target(
    name: str, revision: str | None, template_kwargs: dict[str, Any], trust: bool, weights: bool
) -> TargetFiles:
    """Find a target and read its configuration and its tokenizer.

    `name` is a directory or a Hub id, `revision` one of the Hub. Without `weights`, they are
    neither downloaded nor hashed.

    Raises:
        MissingError, TargetError, ConfigError: there is no such model, or it cannot be used.
    """
    directory, commit = resolve_model(name, revision, weights)
    config = load_config(directory, trust)
    if weights:
        check_quantisation(name, config)  # before gigabytes are hashed
    text, tokenizer = text_config(config), load_tokenizer(directory, trust)
    facts = identify(directory, config, tokenizer, trust, weights)
    facts["chat_template_kwargs"] = template_kwargs
    target = {
        "name": name if commit else directory.resolve().name,
        "revision": commit,
        "architectures": facts["architectures"],
        "model_type": config.model_type,
        "num_layers": text.num_hidden_layers,
        "hidden_size": text.hidden_size,
        "quantization": facts["quantization"],
        "config_hash": facts["config_hash"],
        "weights_hash": facts["weights_hash"],
        **({"code_hash": facts["code_hash"]} if "code_hash" in facts else {}),
    }
    return TargetFiles(
        model_dir=directory,
        model_config=config,
        tokenizer=tokenizer,
        identity=facts,
        target=target,
        tokenizer_id=_tokenizer_id(facts, tokenizer),
    )


def _tokenizer_id(facts: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    return {
        "hash": facts["tokenizer_hash"],
        "chat_template_hash": facts["chat_template_hash"],
        "chat_template_kwargs": facts["chat_template_kwargs"],
        "size": len(tokenizer),
    }


def versions() -> dict[str, str]:
    """Return the releases that compute states and answers, and the kind of machine."""
    return {
        "spec_data": spec_data.__version__,
        "torch": torch.__version__.split("+")[0],
        "transformers": transformers.__version__,
        "machine": platform.machine(),
    }


def config_hash(directory: Path) -> str:
    """Return the hash of config.json without the fields that change when a model is saved again."""
    config = read_object(directory / "config.json", TargetError)
    return sha256_json({k: v for k, v in config.items() if k not in _VOLATILE})


def _plain(facts: dict[str, Any]) -> dict[str, Any]:
    """Return facts as they are read back from JSON: lists for tuples, texts for other objects."""
    plain: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return plain


def _config_facts(directory: Path, config: Any, trust: bool) -> dict[str, Any]:
    """Return the hash of config.json, and by name the fields that decide the states.

    With `trust`, transformers runs the Python files beside a config.json with `auto_map`.
    """
    text = text_config(config)
    quantization: Any = getattr(config, "quantization_config", None)
    if hasattr(quantization, "to_dict"):
        quantization = quantization.to_dict()
    facts = {
        "architectures": list(config.architectures or []),
        "config_hash": config_hash(directory),
        "quantization": quantization,
    }
    if trust and getattr(config, "auto_map", None):
        code = sorted(directory.rglob("*.py"))
        hashes = {f.relative_to(directory).as_posix(): sha256_file(f) for f in code}
        facts["code_hash"] = sha256_json(hashes)
    for name in _DECIDING:
        # absent, or transformers refuses a field that differs between blocks
        with suppress(Exception):
            facts[f"config.{name}"] = getattr(text, name)
    if per_layer := text.to_dict().get("per_layer_config"):
        facts["config.per_layer_config"] = per_layer
    if several := streams_of(text).text:
        facts["streams"] = several
    return facts | _flat("rope", getattr(text, "rope_parameters", None) or {})


def _flat(prefix: str, table: dict[str, Any]) -> dict[str, Any]:
    """Return a nested table as one level, with dots in the names."""
    flat: dict[str, Any] = {}
    for name, value in table.items():
        name = f"{prefix}.{name}"
        flat |= _flat(name, value) if isinstance(value, dict) else {name: value}
    return flat


def tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return the hash of the whole tokenizer, and of the template.

    Of each part of tokenizer.json (normaliser, vocabulary with merges, ...), there is its type with
    the start of its hash, so that the one that differs can be named.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    table = json.loads(backend.to_str()) if backend is not None else {}
    table = {k: v for k, v in table.items() if k not in ("truncation", "padding")}
    parts: dict[str, Any] = {}
    for name in sorted(table.keys() - {"version"}):
        part = table[name]
        kind = part.get("type") if isinstance(part, dict) else None
        text = f"{kind or type(part).__name__} {sha256_json(part)[:12]}"
        parts[f"tokenizer.{name}"] = None if part is None else text
    for name in ("bos_token", "eos_token"):
        parts[f"tokenizer.{name}"] = getattr(tokenizer, name, None)
    template = tokenizer.chat_template
    return {
        "tokenizer_hash": sha256_json(table or tokenizer.get_vocab()),
        **parts,
        "chat_template_hash": sha256_json(template) if template else None,
    }
