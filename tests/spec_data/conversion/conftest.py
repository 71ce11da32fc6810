"""One target and its samples for all tests of conversions, and what it computes for them."""

import pytest

from spec_data.conversion import conventions
from tests import forked
from tests.spec_data.conversion import layouts

one_thread = forked.one_thread


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return layouts.tiny_target(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="session")
def samples(target):
    return layouts.make_samples(target)


@pytest.fixture(scope="session")
def computed():
    """What `target_states` returned, by the ids of its documents."""
    return {}


@pytest.fixture
def computed_once(computed, monkeypatch):
    """Run the target only once for the same documents."""
    compute = conventions.target_states

    def cached(path, documents, blocks, **given):
        key = (path, *(tuple(ids.tolist()) for ids in documents))
        if key not in computed:
            computed[key] = compute(path, documents, blocks, **given)
        return computed[key]

    monkeypatch.setattr(conventions, "target_states", cached)
