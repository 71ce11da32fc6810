"""--split-seed decides the held-out documents, and a run keeps its own."""

import pytest

from spec_data.shards.errors import ConfigError
from spec_data.shards.reader import HiddenStatesDataset
from spec_train.training.setup import make_splits
from tests.spec_train.training import tools as trainer_tools
from tests.spec_train.training.tools import change, run

data, config = trainer_tools.data, trainer_tools.config


def test_a_run_records_its_split_and_takes_no_other(config):
    run(change(config, steps=2, split_seed=5))
    with pytest.raises(ConfigError, match="split_seed: 5 -> 0"):
        run(change(config, steps=2))


def test_seeds_are_compared_on_the_same_documents(config):
    """The held-out documents follow from --split-seed alone."""
    dataset = HiddenStatesDataset(config.data)
    found = [make_splits(dataset, change(config, seed=seed)) for seed in range(3)]
    assert len({tuple(splits.validation.rows) for splits in found}) == 1
    orders = {str(splits.train.batches(0)) for splits in found}
    assert len(orders) == 3
    other = make_splits(dataset, change(config, split_seed=1))
    assert set(other.validation.rows) != set(found[0].validation.rows)
