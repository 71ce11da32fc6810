"""What a dataset needs on disk beside its shards, from config and tokenizer files alone.

The head is counted from a model without memory (torch's meta device), so its tensors are those that
`generate` writes. Index, tables and tokenizer files are sized as they will be; the manifest and the
card are approximated. All together are right to within 1 % plus 64 KB.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from spec_data.devices import DTYPES
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import GENERATION_CONFIG, config_json
from spec_data.models.parameter_counts import empty_model
from spec_data.models.reading import text_config
from spec_data.shards.files import dump_json, writing
from spec_data.target.head_form import head_parts

_INDEX_ROW = 4 + 4 + 5 * 4 + 8  # two text offsets, five int32, a checksum
_MANIFEST, _OF_A_SHARD, _CARD = 9_000, 330, 3_000
_SAFETENSORS_ENTRY, _ARROW_SCHEMA = 110, 2_000
_LEVELS = 64 * 4


def other_files(setup: Setup, plan: Plan) -> dict[str, int]:
    """Return the bytes of everything but the shards, by kind: head, target, index, rest."""
    documents = plan.documents
    lossy = [c for c in setup.columns if c.lossy]
    tables = sum(2 * 4 * (c.width or 1) + _LEVELS + 4 * _SAFETENSORS_ENTRY for c in lossy)
    shards = len(plan.units) * _OF_A_SHARD
    return {
        "head": head_bytes(setup),
        "target": _target_files(setup),
        "index": documents.text_bytes + len(documents) * _INDEX_ROW + _ARROW_SCHEMA,
        "rest": tables + shards + _MANIFEST + _CARD + len(dump_json(plan.settings)),
    }


def head_bytes(setup: Setup) -> int:
    """Return the size of target/head.safetensors; no weights are read."""
    width = torch.empty(0, dtype=_dtype(setup)).element_size()
    try:
        model = empty_model(setup.model_config, setup.config.trust_remote_code)
        tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        sizes = [p.numel() for p in head_parts(model, tied).values()]
    except Exception:
        # A family that cannot be built without weights, for any reason of its own: embedding and
        # head, as the config has them. The size is only an estimate.
        tied = bool(getattr(setup.model_config, "tie_word_embeddings", False))
        sizes = [setup.vocab_size * setup.target["hidden_size"]] * (1 if tied else 2)
    return sum(sizes) * width + len(sizes) * _SAFETENSORS_ENTRY


def _dtype(setup: Setup) -> torch.dtype:
    """Return the dtype in which the target will run, as far as its config tells."""
    if setup.config.dtype != "auto":
        return DTYPES[setup.config.dtype]
    for config in (setup.model_config, text_config(setup.model_config)):
        found: Any = getattr(config, "dtype", None)
        if isinstance(found, str):
            found = getattr(torch, found, None)
        if isinstance(found, torch.dtype):
            return found
    return torch.float32


def _target_files(setup: Setup) -> int:
    """Return the bytes of config and tokenizer files, written to a temporary directory."""
    total = len(config_json(setup, _dtype(setup)))
    generation = setup.model_dir / GENERATION_CONFIG
    if generation.is_file():
        total += generation.stat().st_size
    with tempfile.TemporaryDirectory() as scratch:
        with writing(Path(scratch)):
            setup.tokenizer.save_pretrained(scratch)
        return total + sum(p.stat().st_size for p in Path(scratch).rglob("*") if p.is_file())
