"""One random row of states, a random head, and a fresh draft for them."""

import functools
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import FINAL, HeadSpec, layer_column
from spec_train.data.batch import DraftBatch
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead
from spec_train.options.draft_options import DRAFT_OPTIONS

LAYERS = (1, 4, 6)


@dataclass(frozen=True)
class Size:
    """Sizes of a problem."""

    hidden: int
    heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int


TINY = Size(hidden=32, heads=4, head_dim=16, vocab=64, draft_vocab=40, tokens=40)
SMALL = Size(hidden=256, heads=4, head_dim=64, vocab=4096, draft_vocab=2048, tokens=256)
LARGE = Size(hidden=2048, heads=16, head_dim=128, vocab=32768, draft_vocab=16384, tokens=4096)


@functools.cache
def _states(size: Size) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return embedding and head [V, H], and the states [1, T, H] and choices [1, T] by name."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    rows = draw(size.vocab, size.hidden, scale=0.1)
    rows[size.draft_vocab :] *= 0.5  # most choices are in the draft vocabulary
    states = {layer_column(k): draw(1, size.tokens, size.hidden) for k in LAYERS}
    states[FINAL] = draw(1, size.tokens, size.hidden)
    logits = [part @ rows.T for part in states[FINAL].split(256, 1)]
    states["argmax"] = torch.cat([part.argmax(-1) for part in logits], 1)
    states["logsumexp"] = torch.cat([part.logsumexp(-1) for part in logits], 1)
    states["ids"] = torch.randint(size.vocab, (1, size.tokens), generator=generator)
    return draw(size.vocab, size.hidden, scale=0.02), rows, states


def random_batch(size: Size) -> tuple[TargetHead, DraftBatch]:
    """Return a head and one document of random states, its last 60 % supervised."""
    embedding, rows, states = _states(size)
    slots = torch.arange(size.tokens)[None]
    return TargetHead(
        HeadSpec(vocab_size=size.vocab, hidden_size=size.hidden, tied=False), embedding, rows
    ), DraftBatch(
        input_ids=states["ids"],
        loss_mask=slots >= 0.4 * size.tokens,
        position_ids=slots,
        document_ids=torch.zeros_like(slots),
        hidden={name: states[name] for name in (*map(layer_column, LAYERS), FINAL)},
        target_argmax=states["argmax"],
        target_logsumexp=states["logsumexp"],
        rows=[[0]],
    )


def fresh_draft(name: str, head: TargetHead, size: Size) -> Any:
    """Return a fresh draft of a kind; the same weights every time, and no noise of its own."""
    kind, options = DRAFTS[name], DRAFT_OPTIONS[name]()
    changes = {"draft_vocab_size": size.draft_vocab, "noise": 0.0, "mask_token_id": 5}
    known = type(options).__dataclass_fields__
    options = replace(options, **{k: v for k, v in changes.items() if k in known})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": size.hidden,
        "intermediate_size": 3 * size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.heads // 2,
        "head_dim": size.head_dim,
        "num_hidden_layers": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "rope_theta": 1e4,
        "dtype": "float32",
    }
    manifest = SimpleNamespace(
        layers=LAYERS,
        supervision="final-hidden",
        final="all",
        columns=[SimpleNamespace(name=FINAL)],
        where="random",
        fingerprint="random",
        draft_layers={},
        target=SimpleNamespace(name="random", dtype="float32", architectures=[], quantised_as=None),
        identity={},
        head=head.spec,
        hidden_size=size.hidden,
        vocab_size=size.vocab,
    )
    torch.manual_seed(0)
    counts = torch.arange(size.vocab, 0, -1)
    return kind.build(
        options, target_config=config, manifest=manifest, head=head, token_counts=counts
    )
