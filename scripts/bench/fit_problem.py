"""Rows of random states, a random head, and a fresh draft for them: of `fit.py`, `prove_gpu.py`.

Each row is one document; its last 60 % are supervised.
"""

import functools
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.batch import DraftBatch
from spec_data.shards.schema import FINAL, HeadSpec, layer_column
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead

LAYERS = (1, 4, 6)


@dataclass(frozen=True)
class Size:
    """Sizes of a problem; `key_heads` 0: half as many as query heads."""

    hidden: int
    heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int
    rows: int = 1
    key_heads: int = 0


SIZE = Size(hidden=256, heads=8, head_dim=32, vocab=32768, draft_vocab=4096, tokens=2048)
"""The sizes that `fit.py` measures, but for its own lengths and draft vocabularies."""


@functools.lru_cache(1)
def _states(size: Size, device: str) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return embedding and head [V, H], and the states [B, T, H] and choices [B, T] by name."""
    generator = torch.Generator(device).manual_seed(0)
    like: dict[str, Any] = {"generator": generator, "device": device}

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, **like).mul_(scale)

    rows = draw(size.vocab, size.hidden, scale=0.1)
    rows[size.draft_vocab :] *= 0.5  # most choices are in the draft vocabulary
    states = {layer_column(k): draw(size.rows, size.tokens, size.hidden) for k in LAYERS}
    states[FINAL] = draw(size.rows, size.tokens, size.hidden)
    logits = [part @ rows.T for part in states[FINAL].split(256, 1)]
    states["argmax"] = torch.cat([part.argmax(-1) for part in logits], 1)
    states["logsumexp"] = torch.cat([part.logsumexp(-1) for part in logits], 1)
    states["ids"] = torch.randint(size.vocab, (size.rows, size.tokens), **like)
    return draw(size.vocab, size.hidden, scale=0.02), rows, states


def random_batch(size: Size, device: str = "cpu") -> tuple[TargetHead, DraftBatch]:
    """Return a head and documents of random states, drawn on the device."""
    embedding, rows, states = _states(size, device)
    slots = torch.arange(size.tokens, device=device).repeat(size.rows, 1)
    spec = HeadSpec(vocab_size=size.vocab, hidden_size=size.hidden, tied=False)
    return TargetHead(spec, embedding, rows), DraftBatch(
        input_ids=states["ids"],
        loss_mask=slots >= 0.4 * size.tokens,
        position_ids=slots,
        document_ids=torch.zeros_like(slots),
        hidden={name: states[name] for name in (*map(layer_column, LAYERS), FINAL)},
        target_argmax=states["argmax"],
        target_logsumexp=states["logsumexp"],
        rows=[[row] for row in range(size.rows)],
    )


def fresh_draft(name: str, head: TargetHead, size: Size, published: bool = False) -> Any:
    """Return a fresh draft of a kind; the same weights every time.

    `published`: with layers and rank of the published drafts; else without noise of its own, and
    with the layers that fit the target.
    """
    kind = DRAFTS[name]
    options = kind.options_class()
    changes = {"draft_vocab_size": size.draft_vocab, "mask_token_id": 5}
    changes |= {} if published else {"noise": 0.0}
    known = {field.name for field in fields(options)}
    options = replace(options, **{k: v for k, v in changes.items() if k in known})
    if published:
        options = options.sized(4096, 36)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.key_heads or size.heads // 2,
        "head_dim": size.head_dim,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
        "dtype": "float32",
    }
    target = {"name": "random", "revision": None, "dtype": "float32", "architectures": []}
    manifest = SimpleNamespace(
        layers=LAYERS,
        supervision="final-hidden",
        final="all",
        columns=[SimpleNamespace(name=FINAL)],
        where="random",
        fingerprint="random",
        draft_layers={},
        target=SimpleNamespace(**target, quantised_as=None),
        identity={},
        head=head.spec,
        hidden_size=size.hidden,
        vocab_size=size.vocab,
    )
    torch.manual_seed(0)
    counts = torch.arange(size.vocab, 0, -1)
    given = {"manifest": manifest, "head": head, "token_counts": counts, "target_dir": Path()}
    return kind.build(options, target_config=config, **given)
