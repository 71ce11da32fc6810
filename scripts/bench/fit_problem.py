"""The batch and draft that `fit.py` measures: random states, one document per row."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.schema import FINAL, HeadSpec, layer_column
from spec_train.data.batch import DraftBatch
from spec_train.drafts import DRAFTS
from spec_train.losses.head import TargetHead

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 256, 8, 4, 32, 32768
LAYERS = (1, 4, 6)
SUPERVISED = 0.6
FREQUENT = 4096


def problem(name: str, length: int, vocab: int) -> tuple[Any, TargetHead, DraftBatch]:
    """A random draft, the head of a random target, and one row of random states."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    spec = HeadSpec(vocab_size=VOCAB, hidden_size=HIDDEN, tied=False)
    rows = draw(VOCAB, HIDDEN, scale=0.1)
    rows[FREQUENT:] *= 0.5  # targets choose frequent tokens, which draft vocabularies contain
    head = TargetHead(spec, draw(VOCAB, HIDDEN, scale=0.02), rows)
    final = draw(1, length, HIDDEN)
    figures = [(z.argmax(-1), z.logsumexp(-1)) for z in map(head.logits, final.split(256, 1))]
    choice, sums = (torch.cat(part, 1) for part in zip(*figures, strict=True))
    slots = torch.arange(length)[None]
    batch = DraftBatch(
        input_ids=torch.randint(VOCAB, (1, length), generator=generator),
        loss_mask=slots >= (1 - SUPERVISED) * length,
        position_ids=slots,
        document_ids=torch.zeros_like(slots),
        hidden={layer_column(k): draw(1, length, HIDDEN) for k in LAYERS} | {FINAL: final},
        target_argmax=choice,
        target_logsumexp=sums,
        rows=[[0]],
    )
    torch.manual_seed(0)
    return build(name, head, vocab), head, batch


def build(name: str, head: TargetHead, vocab: int) -> Any:
    """A fresh draft of the kind `name` for the random target."""
    kind = DRAFTS[name]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": 3 * HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
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
        draft_layers={},
        target=SimpleNamespace(name="random", dtype="float32", architectures=[], quantised_as=None),
        identity={},
        fingerprint="random",
        head=head.spec,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
    )
    fields = kind.options_class.__dataclass_fields__
    options = kind.options_class(
        **({"draft_vocab_size": vocab} if "draft_vocab_size" in fields else {})
    ).sized(4096, 36)  # layers and rank as published
    counts = torch.arange(VOCAB, 0, -1)
    return kind.build(
        options, target_config=config, manifest=manifest, head=head, token_counts=counts
    )
