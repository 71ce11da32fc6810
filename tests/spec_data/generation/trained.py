"""A tiny target that knows 24 answers by heart, and the mistakes that are planted in its corpus.

It is a GPT-2, because its positions are absolute: a doubled BOS token shifts them all.
"""

import copy
import json
import random
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, GPT2Config

from tests.spec_data.corpus.templates import tokenizer

_TEXT = """the quick brown fox asks what is capital of France answer Paris user system model tool
weather in city hello there I think so def add return"""
_WORDS = _TEXT.split()
BOS = "{{- '<|im_start|>' }}"


class TrainedTarget:
    """A model directory `path` and the chats `rows` that it answers greedily as they stand."""

    def __init__(self, folder: Path) -> None:
        rng = random.Random(0)
        self.folder, self.path = folder, folder / "trained"
        self.rows = [
            {
                "messages": [
                    {"role": "user", "content": " ".join(rng.choices(_WORDS, k=5))},
                    {"role": "assistant", "content": " ".join(rng.choices(_WORDS, k=9))},
                ]
            }
            for _ in range(24)
        ]
        self.tokenizer = tokenizer("chatml")
        self.documents = [
            self.tokenizer.apply_chat_template(r["messages"], return_dict=True)["input_ids"]
            for r in self.rows
        ]
        self.model = _train(self.documents, len(self.tokenizer))
        self.save(self.model, self.path)

    def save(self, model, path: Path) -> Path:
        """Write a model with the tokenizer of this target."""
        model.config.eos_token_id = self.tokenizer.eos_token_id
        model.save_pretrained(path)
        self.tokenizer.save_pretrained(path)
        return path

    def with_template(self, name: str, template: str) -> Path:
        """Return a copy of the target with another chat template."""
        path = self.folder / name
        if not path.is_dir():
            shutil.copytree(self.path, path)
            other = tokenizer("chatml")
            other.chat_template = template
            other.save_pretrained(path)
        return path

    def damaged(self) -> Path:
        """Return a copy of the target in which the weights of one block were lost."""
        path = self.folder / "damaged"
        if not path.is_dir():
            model = copy.deepcopy(self.model)
            model.transformer.h[1].mlp.c_proj.weight.data.zero_()
            model.transformer.h[1].attn.c_proj.weight.data.zero_()
            self.save(model, path)
        return path

    def corpus(self, name: str, rows: list[dict]) -> Path:
        """Write rows as JSONL."""
        path = self.folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return path

    def shuffled(self) -> list[dict]:
        """Return the chats with every answer under the next question."""
        answers = [r["messages"][1] for r in self.rows]
        return [
            {"messages": [r["messages"][0], answers[(i + 1) % len(answers)]]}
            for i, r in enumerate(self.rows)
        ]

    def foreign(self) -> list[dict]:
        """Return the documents as another tokenizer would number their tokens."""
        generator = torch.Generator().manual_seed(0)
        other = torch.randperm(len(self.tokenizer), generator=generator).tolist()
        return [{"input_ids": [other[i] for i in ids]} for ids in self.documents]

    @torch.no_grad()
    def sampled(self, temperature: float, count: int = 40) -> list[dict]:
        """Return documents whose last 12 tokens the target sampled at this temperature."""
        torch.manual_seed(1)
        ids = torch.tensor([self.documents[i % len(self.documents)][:9] for i in range(count)])
        for _ in range(12):
            logits = self.model(ids).logits[:, -1] / temperature
            ids = torch.cat([ids, logits.softmax(-1).multinomial(1)], 1)
        return [{"input_ids": row, "loss_mask": [0] * 9 + [True] * 12} for row in ids.tolist()]


def _train(documents: list[list[int]], vocab: int):
    """Train until the answers are known by heart: 50 steps, about two seconds."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab, n_embd=64, n_layer=3, n_head=4, n_positions=128,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    width = max(map(len, documents))
    ids = torch.zeros(len(documents), width, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        ids[row, : len(document)] = labels[row, : len(document)] = torch.tensor(document)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(50):
        model(input_ids=ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
