"""How engines read the layer ids of a config, written from their sources, not from the exporter.

Each reader gives the indices into transformers' `hidden_states` (k = input of block k) of the
states that the engine feeds the draft, in the order in which it concatenates them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import spec_train
from spec_train.drafts import load_draft


def vllm_states(config: dict[str, Any], blocks: int) -> list[int]:
    """vLLM, both runners: the speculators config is unwrapped first; ids are sorted."""
    if "speculators_model_type" in config:
        config = config["transformer_layer_config"] | {
            key: config[key] for key in ("eagle_aux_hidden_state_layer_ids",) if key in config
        }
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return sorted(set(ids)) if ids else [2, blocks // 2, blocks - 3]


def llama_cpp_states(config: dict[str, Any], blocks: int) -> list[int]:
    """llama.cpp's converter: the top-level key, in the file's order."""
    layer = config.get("transformer_layer_config", {})
    return list((layer | config).get("eagle_aux_hidden_state_layer_ids") or [])


def sglang_states(config: dict[str, Any], blocks: int) -> list[int]:
    """SGLang: the nested key, whose ids are outputs of decoder blocks."""
    ids = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
    return [k + 1 for k in ids] if ids else [2, blocks // 2, blocks - 3]


ENGINES: dict[str, Callable[[dict[str, Any], int], list[int]]] = {
    "vllm": vllm_states,
    "llama.cpp": llama_cpp_states,
    "sglang": sglang_states,
}


def export(draft: Path, form: str, out: Path, target: Path | str | None = None) -> Path:
    """Run the export; return `out`."""
    spec_train.export(draft, out, form, target)
    return out


def put(raw: Any, path: str, value: Any) -> None:
    """Set a key by its dotted path: a value, a function of the old one, or ... to remove it."""
    *parents, name = path.split(".")
    for parent in parents:
        raw = raw[int(parent) if isinstance(raw, list) else parent]
    if value is ...:
        del raw[name]
    else:
        raw[name] = value(raw[name]) if callable(value) else value


def same_weights(one: Any, other: Any) -> bool:
    """Whether two drafts have the same tensors, bit for bit."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[k], theirs[k]) for k in mine)


def same_draft(a: Path, b: Path) -> bool:
    """Whether two directories, in any forms, hold the same draft: config, options, every bit."""
    one, other = load_draft(a), load_draft(b)
    if (one.config, one.options) != (other.config, other.options):
        return False
    return same_weights(one, other) and torch.equal(one.draft_ids, other.draft_ids)


def nulls(value: Any, path: str = "") -> list[str]:
    """Paths of null fields outside the section of this project, which no engine reads."""
    if isinstance(value, dict):
        items = [(k, v) for k, v in value.items() if k != "spec_train"]
        return [found for key, item in items for found in nulls(item, f"{path}.{key}")]
    return [path] if value is None else []
