"""Tiny real things for tests: random targets of real families, and sealed datasets made from them.

`tiny_dataset` takes the slow, obvious route (one document at a time, `output_hidden_states`), so
that tests of the trainer do not lean on the capture code.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from spec_data.shards.records import plain
from spec_data.shards.schema import (
    FORMAT,
    FORMAT_VERSION,
    HeadSpec,
    Manifest,
    layer_column,
    token_columns,
)
from spec_data.shards.seal import seal
from spec_data.shards.writer import UnitData, write_shard


def hub_snapshot(cache: Path) -> Path:
    """The empty snapshot of some/model in a cache of the Hub; `main` is its commit."""
    repository, commit = cache / "models--some--model", "0123456789abcdef0123456789abcdef01234567"
    snapshot, refs = repository / "snapshots" / commit, repository / "refs"
    for folder in (snapshot, refs):
        folder.mkdir(parents=True)
    (refs / "main").write_text(commit)
    return snapshot


def tiny_llama(vocab: int = 64, layers: int = 4, hidden: int = 32, seed: int = 0, **changes: Any):
    """A random Llama in float32 with GQA, untied embeddings and head_dim 8."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.2,
        **changes,
    )
    config.architectures = ["LlamaForCausalLM"]
    return AutoModelForCausalLM.from_config(config).eval()


def random_documents(
    n_docs: int, vocab: int, seed: int = 0, shortest: int = 4, longest: int = 40
) -> list[tuple[list[int], list[int], list[tuple[str, int, int]]]]:
    """Token ids, loss mask and turns of random two- and four-turn conversations."""
    rng = np.random.default_rng(seed)
    documents = []
    for _ in range(n_docs):
        length = int(rng.integers(shortest, longest + 1))
        cuts = np.sort(rng.choice(np.arange(1, length), size=1 if length < 8 else 3, replace=False))
        bounds = [0, *map(int, cuts), length]
        mask, turns = [0] * length, []
        for t, (start, end) in enumerate(itertools.pairwise(bounds)):
            turns.append(("assistant" if t % 2 else "user", start, end))
            if t % 2:
                mask[start:end] = [1] * (end - start)
        documents.append((rng.integers(0, vocab, length).tolist(), mask, turns))
    return documents


@torch.no_grad()
def states_of(model: PreTrainedModel, ids: list[int], layers: tuple[int, ...]) -> dict[str, Any]:
    """Columns of one document from an ordinary forward; layer k is `hidden_states[k + 1]`."""
    out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    logits = out.logits[0].float()
    columns = {layer_column(k): out.hidden_states[k + 1][0] for k in layers}
    columns["hidden.final"] = out.hidden_states[-1][0]
    columns["target_argmax"] = logits.argmax(-1)
    columns["target_logsumexp"] = logits.logsumexp(-1)
    return columns


@torch.no_grad()
def _rounded_logits(model: PreTrainedModel, ids: list[int], supervision: str) -> dict[str, Any]:
    """Columns of one document that supervision by logits adds or replaces."""
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].bfloat16().float()
    k = int(supervision.partition(":")[2] or 1)
    top = logits.topk(k, -1)
    return {
        "logits": logits,
        "topk_ids": top.indices,
        "topk_logits": top.values,
        "target_argmax": logits.argmax(-1),
        "target_logsumexp": logits.logsumexp(-1),
    }


def tiny_dataset(
    path: Path,
    n_docs: int = 24,
    seed: int = 0,
    vocab: int = 64,
    layers: tuple[int, ...] = (0, 1, 2),
    docs_per_shard: int = 10,
    model: PreTrainedModel | None = None,
    documents: list | None = None,
    supervision: str = "final-hidden",
    mtp: bool = False,
    identity: dict[str, str] | None = None,
) -> Path:
    """Make a sealed dataset at `path` from a tiny random Llama (or `model`); gives `path`.

    The logits of "logits" and "topk:K" are the same numbers: rounded to bf16, which the former is
    stored in. With `mtp`, the last block is also copied as if the target had it as MTP block.
    `identity` are more facts of the target.
    """
    model = model if model is not None else tiny_llama(vocab, seed=seed)
    config = model.config
    documents = documents or random_documents(n_docs, config.vocab_size, seed)
    columns = token_columns(layers, config.hidden_size, supervision, config.vocab_size)
    (path / "shards").mkdir(parents=True)
    records = []
    for number, first in enumerate(range(0, len(documents), docs_per_shard)):
        part = documents[first : first + docs_per_shard]
        unit = UnitData.allocate(
            columns,
            [f"{seed:02d}{n:014d}{n:016d}" for n in range(first, first + len(part))],
            ["tiny"] * len(part),
            [turns for _, _, turns in part],
            [len(ids) for ids, _, _ in part],
        )
        for d, (ids, mask, _) in enumerate(part):
            span = slice(int(unit.offsets[d]), int(unit.offsets[d + 1]))
            values = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}
            values |= states_of(model, ids, layers)
            if supervision != "final-hidden":
                values |= _rounded_logits(model, ids, supervision)
            for column in columns:
                unit.tokens[column.name][span] = column.coder.encode(values[column.name])
        records.append(write_shard(path / "shards" / f"unit-{number:05d}.arrow", unit, columns))
    head = _save_target(path / "target", model)
    if mtp:
        save_file(mtp_block(model), path / "target" / "mtp.safetensors")
    draft = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "settings": {"seed": seed},
        "target": {
            "name": "tiny-llama",
            "dtype": "float32",
            "num_layers": config.num_hidden_layers,
        },
        "identity": {"dtype": "float32", "config.num_hidden_layers": config.num_hidden_layers}
        | (identity or {}),
        "corpus": [{"source": "tiny"}],
        "layers": list(layers),
        "supervision": supervision,
        "columns": plain(columns),
        "head": plain(head),
        "packing": {"form": "rows"},
        "policy": "off-policy",
        "documents": {"read": len(documents), "dropped": {}},
    }
    seal(path, Manifest.of(draft), records)
    return path


def mtp_block(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the last decoder block, and random weights, as DeepSeek's checkpoints name them."""
    prefix, size = f"model.layers.{model.config.num_hidden_layers}.", model.config.hidden_size
    block = model.model.layers[-1].state_dict()
    tensors = {prefix + name: value.clone() for name, value in block.items()}
    tensors[f"{prefix}eh_proj.weight"] = torch.randn(size, 2 * size) * 0.1
    norms = ("enorm", "hnorm", "shared_head.norm")
    return tensors | {f"{prefix}{name}.weight": torch.ones(size) for name in norms}


def _save_target(folder: Path, model: PreTrainedModel) -> HeadSpec:
    folder.mkdir()
    model.config.save_pretrained(folder)
    tied = bool(model.config.tie_word_embeddings)
    tensors = {"embed_tokens": model.get_input_embeddings().weight.data.clone()}
    if not tied:
        tensors["lm_head"] = model.get_output_embeddings().weight.data.clone()
    tensors["norm"] = model.model.norm.weight.data.clone()
    save_file(tensors, folder / "head.safetensors")
    vocab, hidden = tensors["embed_tokens"].shape
    return HeadSpec(vocab_size=vocab, hidden_size=hidden, tied=tied)
