"""A tiny target that is trained a little, data of it, and a trained draft of every kind."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from spec_data.shards.batch import DraftBatch
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.drafts import DRAFTS, Draft
from spec_train.evaluation.on_dataset import read_pack
from spec_train.losses.head import TargetHead
from spec_train.options.kinds import DRAFT_OPTIONS
from tests import factory

VOCAB, STATES, LAYERS, CAPTURED = 40, 2, "1,3", (0, 1, 2, 3, 4)
STEPS = {"eagle": 100, "eagle3": 100, "peagle": 80, "dspark": 80, "dflash": 80, "mtp": 120}
OPTIONS: dict[str, dict[str, Any]] = {
    "eagle": {},
    "eagle3": {
        **{"layers": LAYERS, "draft_vocab_size": 32, "ttt_steps": 3},
        "norm_before_fc": False,  # with it, this draft learns its task from any layers
    },
    "peagle": {"layers": LAYERS, "draft_vocab_size": 32, "depths": 3, "num_layers": 2},
    "dspark": {"layers": LAYERS, "num_layers": 2, "block_size": 3, "markov_rank": 4},
    "dflash": {"layers": LAYERS, "num_layers": 2, "block_size": 3},
    "mtp": {},
}
MASK = {"peagle", "dspark", "dflash"}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
"""Of the target. With so small a theta, the documents are long enough for it to matter."""
OTHERWISE: dict[str, dict[str, Any]] = {
    "peagle": {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}},
}
"""What a kind is trained with instead of the target's config: a rope that only it has."""


def texts(count: int, length: int, seed: int) -> torch.Tensor:
    """Token ids int64 [count, length] of the chain, with one token in twelve by chance."""
    table = np.random.default_rng(7).integers(1, VOCAB - 1, (VOCAB, STATES))
    rng = np.random.default_rng(seed)
    out = rng.integers(1, VOCAB - 1, (count, length))
    for t in range(2, length):
        follows = table[out[:, t - 1], out[:, t - 2] % STATES]
        out[:, t] = np.where(rng.random(count) < 1 / 12, out[:, t], follows)
    return torch.from_numpy(out)


def train_target(steps: int = 160) -> PreTrainedModel:
    """A Llama of six blocks that has learned the chain."""
    model = factory.tiny_llama(VOCAB, layers=6, rope_parameters=dict(ROPE))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (steps - step) / (0.5 * steps))
        ids = texts(16, 32, 1000 + step)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@functools.cache
@torch.no_grad()
def own_documents(model: PreTrainedModel, count: int, seed: int = 5) -> list:
    """Documents whose second part is what the target itself says, greedily."""
    ids = texts(count, 12, seed)
    for _ in range(20):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    mask = [0] * 12 + [1] * 20
    return [(row, mask, [("user", 0, 12), ("assistant", 12, 32)]) for row in ids.tolist()]


def make_data(
    model: PreTrainedModel,
    path: Path,
    count: int = 60,
    layers: tuple[int, ...] = CAPTURED,
    shift: int = 0,
    final_before_norm: bool = False,
) -> Path:
    """A sealed dataset of the target's own answers."""
    documents = own_documents(model, count)
    right = factory.states_of

    def moved(*given: Any) -> dict[str, Any]:
        columns = right(*given)
        if final_before_norm:
            columns["hidden.final"] = outputs.pop()
        return {k: v.roll(-shift, 0) if ".L" in k else v for k, v in columns.items()}

    outputs: list[torch.Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda module, given, output: outputs.append(output[0].clone())
    )
    factory.states_of = moved
    try:
        return factory.tiny_dataset(
            path, model=model, documents=documents, layers=layers, docs_per_shard=40
        )
    finally:
        factory.states_of = right
        hook.remove()


def train_draft(kind: str, data: Path, steps: int | None = None) -> Draft:
    """A draft of a kind, trained on every document."""
    dataset = HiddenStatesDataset(data)
    head = TargetHead.from_dataset(data)
    torch.manual_seed(1)
    mask = {"mask_token_id": 0} if kind in MASK else {}
    options = DRAFT_OPTIONS[kind](**OPTIONS[kind] | mask)
    counts = torch.bincount(
        torch.cat([dataset[i]["input_ids"][12:] for i in range(len(dataset))]), minlength=VOCAB
    )
    draft: Any = DRAFTS[kind].build(
        options,
        target_config=dataset.target_config() | OTHERWISE.get(kind, {}),
        manifest=dataset.manifest,
        head=head,
        token_counts=counts,
        target_dir=dataset.target_dir,
    )
    if kind == "mtp":  # the state that is fed back tells the token, and its norm is not even
        torch.nn.init.uniform_(draft.norm.weight, -2, 2)
        torch.nn.init.zeros_(draft.enorm.weight).requires_grad_(False)
    packs = [list(range(i, min(i + 12, len(dataset)))) for i in range(0, len(dataset), 12)]
    columns = draft.columns(dataset.manifest.supervision)
    batches: list[DraftBatch] = [read_pack(dataset, p, columns, torch.float32) for p in packs]
    steps = STEPS[kind] if steps is None else steps
    optimizer = torch.optim.AdamW(draft.trainable_parameters(), lr=4e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * min(1.0, (steps - step) / (0.5 * steps))
        batch = batches[step % len(batches)]
        loss = draft.loss(batch, head, draft.slot_counts(batch)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return draft.eval()
