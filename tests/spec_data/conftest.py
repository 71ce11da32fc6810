"""A tiny target and its chats, and one that knows its answers: made once, never written to."""

import pytest

from tests.spec_data.generation.trained import TrainedTarget
from tests.spec_data.runs import run, save_target, write_corpus


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl")


@pytest.fixture(scope="session")
def source(target, corpus):
    return target, corpus


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> TrainedTarget:
    """The target that knows its answers."""
    return TrainedTarget(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def reference(target, corpus, tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("reference") / "data"
    run(target, corpus, out)
    return out
