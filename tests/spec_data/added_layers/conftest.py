"""A tiny target, a dataset of it, and the same dataset with two more layers; never written to."""

import pytest

from spec_data.added_layers.run import add_layers
from spec_data.options.layer_options import AddLayersConfig
from tests.spec_data.runs import run, save_target, write_corpus


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("layers-target"))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("layers-corpus") / "chats.jsonl", 20)


@pytest.fixture(scope="session")
def plain(target, corpus, tmp_path_factory):
    """bf16, several shards, layers 0 and 4 of six blocks."""
    out = tmp_path_factory.mktemp("layers-plain") / "data"
    run(target, corpus, out, layers="0,4", max_shard_size="30KB")
    return out


@pytest.fixture(scope="session")
def coded(target, corpus, tmp_path_factory):
    """The same with small codecs, and final states only where the next token is supervised."""
    out = tmp_path_factory.mktemp("layers-coded") / "data"
    given = {"codec": "aux=lm4c,final=int8c", "final": "supervised"}
    run(target, corpus, out, layers="0,4", max_shard_size="20KB", **given)
    return out


@pytest.fixture(scope="session")
def wide(plain, target, tmp_path_factory):
    """The plain dataset with the layers 1 and 3, in another directory."""
    out = tmp_path_factory.mktemp("layers-wide") / "data"
    add_layers(
        AddLayersConfig(
            data=str(plain), target=str(target), layers="1,3", out=str(out), device="cpu"
        )
    )
    return out
