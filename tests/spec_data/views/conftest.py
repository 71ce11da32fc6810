"""Tiny datasets, shared by the tests of views; they are never written to."""

import pytest

from tests.factory import random_documents, tiny_dataset, tiny_llama
from tests.spec_data.runs import run, save_target, write_corpus


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Twenty-four documents in three shards, bf16, every column at every token."""
    return tiny_dataset(tmp_path_factory.mktemp("views") / "set")


@pytest.fixture(scope="session")
def other(tmp_path_factory):
    """Other documents of the same target."""
    documents = random_documents(12, 64, 7)
    path = tmp_path_factory.mktemp("other") / "set"
    return tiny_dataset(path, seed=7, model=tiny_llama(64, seed=0), documents=documents)


@pytest.fixture(scope="session")
def captured(tmp_path_factory):
    """Captures of one target, by name: sparse and dense, of other documents, in other codecs."""
    folder = tmp_path_factory.mktemp("captured")
    target = save_target(folder / "target")
    corpus = write_corpus(folder / "all.jsonl", 24)
    rows = corpus.read_text().splitlines(keepends=True)
    first, second = folder / "first.jsonl", folder / "second.jsonl"
    first.write_text("".join(rows[:14]))
    second.write_text("".join(rows[10:]))  # four documents are in both
    sparse = {"final": "supervised", "max_shard_size": "20KB"}
    dense = {"final": "all", "teacher": "all", "max_shard_size": "20KB"}
    captures = {
        "sparse": (first, sparse),
        "dense": (second, dense),
        "default": (first, sparse | {"codec": "default"}),
        "fine": (second, sparse | {"codec": "fine"}),
        "layers": (first, sparse | {"layers": "1,3"}),
        "coded layers": (first, sparse | {"layers": "1,3", "codec": "fine"}),
    }
    for name, (file, options) in captures.items():
        run(target, file, folder / name, **options)
    return folder
