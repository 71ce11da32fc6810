"""A tiny target and its chats, made once for all tests of generation."""

import pytest

from tests.spec_data.runs import save_target, write_corpus


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus") / "chats.jsonl")


@pytest.fixture(scope="session")
def source(target, corpus):
    return target, corpus
