"""What a user gave: it stays whatever its value, and only the rest is filled."""

import copy
import dataclasses
import json
import pickle

import numpy as np
import pytest
import torch

from spec_data.generation.options import CaptureOptions
from spec_data.shards.errors import ConfigError
from spec_data.terminal.config import to_dict
from spec_data.terminal.given import Options, changed, decided, free
from spec_train.drafts.eagle3.options import Eagle3Options


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(Options):
    epochs: int | None = 3
    rate: float | None = None
    names: str = "all"

    def validate(self):
        if self.epochs == 13:
            raise ConfigError("epochs 13: not on a Friday")


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(Training):
    size: int = 1


@pytest.mark.parametrize("kind", [Training, More])
def test_a_value_is_given_if_it_is_named_whatever_it_is(kind):
    assert kind().given == frozenset() and kind().epochs == 3
    assert kind(epochs=3).given == {"epochs"}
    assert kind(epochs=None, rate=None).given == frozenset()  # as of a function that passes on
    assert kind(epochs=None).epochs == 3


def test_only_what_nobody_gave_is_filled():
    options = More(epochs=3, names="all")
    filled = decided(options, epochs=20, size=4, rate=0.1, unknown=1)
    assert filled == More(epochs=3, names="all", size=4, rate=0.1)
    assert filled.given == {"epochs", "names"} and options.size == 1
    assert decided(filled, size=9).size == 9
    assert free(options, {"epochs": 1, "size": 2, "no": 3}) == {"size": 2}
    assert options.given_values() == {"epochs": 3, "names": "all"}
    with pytest.raises(ConfigError):
        changed(options, epochs=13)


def test_a_copy_knows_it_too():
    options = decided(More(epochs=3), size=4)
    for same in (pickle.loads(pickle.dumps(options)), copy.copy(options), copy.deepcopy(options)):
        assert same == options and same.given == {"epochs"}
        assert dataclasses.replace(same, size=5).given == {"epochs", "size"}
    other = dataclasses.replace(options, rate=0.5)
    assert other.given == {"epochs", "rate"} and other.size == 4
    assert dataclasses.replace(other, rate=None).given == {"epochs"}
    assert "made_of" not in dataclasses.asdict(options) and "made_of" not in repr(options)


def test_arrays_are_values_of_options():
    options = Eagle3Options(ttt_steps=np.int64(3), layers=np.array([0, 2]))
    assert (options.layers, options.ttt_steps) == ("0,2", 3) and options.given >= {"layers"}
    assert Eagle3Options(layers=torch.tensor([0, 2])).layers == "0,2"
    assert Eagle3Options(layers=range(2)).layers == "0,1"
    assert json.loads(json.dumps(to_dict(options)))["ttt_steps"] == 3
    captured = CaptureOptions(layers=np.array([1, 3]), max_length=np.int32(9))
    assert (captured.layers, captured.max_length) == ([1, 3], 9)
