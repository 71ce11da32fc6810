"""Sealed datasets of random states for benchmarks: no target is run, everything else is real.

Lengths are log-normal, like those of chat corpora. States are noise of the size of hidden states,
and the head is random: `spec-train fit` runs on such a dataset but has nothing to learn.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from spec_data.shards.records import plain
from spec_data.shards.schema import (
    FORMAT,
    FORMAT_VERSION,
    Column,
    HeadSpec,
    Manifest,
    ShardRecord,
    token_columns,
)
from spec_data.shards.seal import seal
from spec_data.shards.writer import UnitData, write_shard

SHARD_TOKENS = 1 << 14


def log_normal_lengths(count: int, mean: float, longest: int, seed: int = 0) -> np.ndarray:
    """Return lengths of `count` documents with about this mean, from 2 to `longest`."""
    spread = 0.7
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(mean) - spread**2 / 2, spread, count))
    return np.clip(lengths, 2, longest).astype(np.int64)


def synthetic_dataset(
    path: Path,
    lengths: np.ndarray,
    *,
    hidden: int,
    layers: tuple[int, ...] = (1, 2, 3),
    vocab: int = 1024,
    shard_tokens: int = SHARD_TOKENS,
    seed: int = 0,
) -> Path:
    """Write and seal a dataset of documents with these `lengths`; return `path`."""
    (path / "shards").mkdir(parents=True)
    columns = token_columns(layers, hidden, "final-hidden", vocab)
    noise = _noise(columns, shard_tokens + int(lengths.max()), seed)
    records: list[ShardRecord] = []
    first = 0
    while first < len(lengths):
        last = first + int(np.searchsorted(np.cumsum(lengths[first:]), shard_tokens)) + 1
        unit = _unit(columns, noise, lengths[first:last], first, vocab, seed)
        file = path / "shards" / f"unit-{len(records):05d}.arrow"
        records.append(write_shard(file, unit, columns))
        first = last
    head = _head(path / "target", layers, vocab, hidden, seed)
    seal(path, _manifest(columns, layers, head, len(lengths)), records)
    return path


def _noise(columns: tuple[Column, ...], tokens: int, seed: int) -> dict[str, np.ndarray]:
    """Encoded random states of every wide column; shards share them, shifted."""
    generator = torch.Generator().manual_seed(seed)
    return {
        c.name: c.coder.encode(torch.randn(tokens, c.width, generator=generator))
        for c in columns
        if c.width
    }


def _unit(
    columns: tuple[Column, ...],
    noise: dict[str, np.ndarray],
    lengths: np.ndarray,
    first: int,
    vocab: int,
    seed: int,
) -> UnitData:
    rng = np.random.default_rng((seed, first))
    count = len(lengths)
    ids = [f"{value:032x}" for value in rng.integers(0, 2**62, count).tolist()]
    turns = [
        [("user", 0, length // 2), ("assistant", length // 2, length)]
        for length in lengths.tolist()
    ]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offsets[-1])
    unit = UnitData(ids, ["synthetic"] * count, turns, offsets)
    inside = np.arange(total) - np.repeat(offsets[:-1], lengths)
    random = {
        "input_ids": rng.integers(0, vocab, total, dtype=np.int32),
        "loss_mask": (inside >= np.repeat(lengths // 2, lengths)).astype(np.uint8),
        "target_argmax": rng.integers(0, vocab, total, dtype=np.int32),
        "target_logsumexp": np.full(total, np.log(vocab), np.float32),
    }
    unit.tokens = {c.name: noise[c.name][:total] if c.width else random[c.name] for c in columns}
    return unit


def _head(folder: Path, layers: tuple[int, ...], vocab: int, hidden: int, seed: int) -> HeadSpec:
    """Write target/ of a Llama of this shape: config.json and head.safetensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": max(layers) + 2,
        "num_attention_heads": max(1, hidden // 64),
        "num_key_value_heads": max(1, hidden // 128),
        "head_dim": min(64, hidden),
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "embed_tokens": torch.randn(vocab, hidden, generator=generator),
        "lm_head": torch.randn(vocab, hidden, generator=generator) / hidden**0.5,
        "norm": torch.ones(hidden),
    }
    save_file({k: v.to(torch.bfloat16) for k, v in tensors.items()}, folder / "head.safetensors")
    return HeadSpec(vocab_size=vocab, hidden_size=hidden, tied=False)


def _manifest(
    columns: tuple[Column, ...], layers: tuple[int, ...], head: HeadSpec, documents: int
) -> Manifest:
    draft = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": {},
        "target": {"name": "random states", "dtype": "bfloat16", "num_layers": max(layers) + 2},
        "corpus": [{"source": "synthetic"}],
        "layers": list(layers),
        "supervision": "final-hidden",
        "columns": plain(columns),
        "head": plain(head),
        "packing": {"form": "rows"},
        "policy": "off-policy",
        "documents": {"read": documents},
    }
    return Manifest.of(draft)
