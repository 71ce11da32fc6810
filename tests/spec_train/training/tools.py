"""A small training run, in this process or as a command, and what it leaves behind."""

import dataclasses
import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from spec_data.terminal.command import words_of
from spec_train.drafts import DRAFTS
from spec_train.drafts.eagle3.options import Eagle3Options
from spec_train.options.training import Training
from spec_train.training.fit import fit
from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.tolerance import close, close_weights, network

OPTIONS = Eagle3Options(ttt_steps=2, draft_vocab_size=40)
TIMING = ("tokens_per_second", "data_wait")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny_dataset(tmp_path_factory.mktemp("data") / "set", n_docs=60, mtp=True)


@pytest.fixture
def config(data, tmp_path):
    return small_run(data, tmp_path / "run")


def small_run(data: Path, out: Path) -> Training:
    return Training(
        data=str(data), out=str(out), steps=12, batch_size=2, accumulation=2,
        seq_len=48, lr=1e-3, validation=0.15, log_every=5, eval_every=4, save_every=5,
    )  # fmt: skip


def learnable_dataset(path: Path) -> Path:
    """A dataset that can be learned: each token determines the next one."""
    model = tiny_llama(vocab=24, hidden=32, seed=1)
    documents = []
    for ids, mask, turns in random_documents(80, 24, seed=2, shortest=20):
        for t in range(1, len(ids)):
            ids[t] = (5 * ids[t - 1] + 3) % 24
        documents.append((ids, mask, turns))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with torch.enable_grad():
        for step in range(160):
            ids = torch.tensor(documents[step % 80][0])[None]
            model(ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    return tiny_dataset(path, model=model, documents=documents, mtp=True)


def change(config: Training, **changes) -> Training:
    return dataclasses.replace(config, **changes)


def run(config: Training, options: Eagle3Options = OPTIONS):
    return fit("eagle3", config, options)


def metrics(out: str | Path, timing: bool = False) -> list[dict]:
    lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if timing or k not in TIMING} for line in lines]


def masters(out: str | Path) -> dict[str, torch.Tensor]:
    tensors = load_file(Path(out) / "last" / "training_state.safetensors")
    return {name: t for name, t in tensors.items() if name.startswith("master.")}


def make_noisy(monkeypatch) -> None:
    """Let the loss of the draft depend on random numbers, as drafts that sample slots do."""
    original = DRAFTS["eagle3"].scored

    def noisy(self, batch, head, counts):
        result = original(self, batch, head, counts)
        return dataclasses.replace(result, loss=result.loss * (0.5 + torch.rand(())))

    monkeypatch.setattr(DRAFTS["eagle3"], "scored", noisy)


COMMAND = [sys.executable, "-m", "spec_train.cli", "fit", "eagle3"]


def command(config: Training) -> list[str]:
    words = words_of(Training, config.given_values())
    return [*COMMAND, *words, *["--ttt-steps", "2", "--draft-vocab-size", "40"]]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


CHOSEN = (
    *("acceptance_length", "product_limit_length", "accept_rate", "hit_rate"),
    *("serving_like_length", "serving_like_rounds", "every_slot_length"),
)


def assert_close_runs(a: str | Path, b: str | Path) -> None:
    """Weights and metrics of two runs that sum the same gradients in another order."""
    one, two = masters(a), masters(b)
    config = json.loads((Path(a) / "fit.json").read_text())
    lines_a, lines_b = metrics(a), metrics(b)
    close_weights(one, two, config["lr"], steps=max(line["step"] for line in lines_a))
    counted: list[list[dict]] = []
    for lines in (lines_a, lines_b):
        chosen = [{k: line.pop(k) for k in [*line] if k.startswith(CHOSEN)} for line in lines]
        counted.append([{k: v and round(v, 9) for k, v in line.items()} for line in chosen])
    terms = network(2, backward=True, slots=320)
    close(lines_a, lines_b, terms=terms, dtype=torch.float32, name="metrics")
    wrong = sum(x != y for x, y in zip(*counted, strict=True))
    assert wrong <= 1, f"the choices of {wrong} lines of {len(lines_a)} differ"
