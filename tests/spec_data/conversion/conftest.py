"""One target and its samples for all tests of conversions, and what it computes for them."""

import pytest
import torch

from spec_data.conversion import proof
from tests.spec_data.conversion import layouts


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return layouts.tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def samples(target):
    return layouts.make_samples(target)


@pytest.fixture(scope="session")
def walks():
    """What `walk` returned, by the ids of its documents."""
    return {}


@pytest.fixture
def cached_walk(walks, monkeypatch):
    """Run the target only once for the same documents."""
    walk = proof.walk

    def cached(path, documents, blocks, **given):
        key = (path, *(tuple(ids.tolist()) for ids in documents))
        if key not in walks:
            walks[key] = walk(path, documents, blocks, **given)
        assert all(o.final.shape[0] == len(i) for o, i in zip(walks[key], documents, strict=True))
        return walks[key]

    monkeypatch.setattr(proof, "walk", cached)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
