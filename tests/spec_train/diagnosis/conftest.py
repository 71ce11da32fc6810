"""One trained target, its data, and one sound draft per kind, for all modules of this folder."""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from spec_train.drafts import Draft
from tests.spec_train.diagnosis.trained import make_data, train_draft, train_target


@pytest.fixture(scope="session")
def target() -> PreTrainedModel:
    return train_target()


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="session")
def data(target, folder) -> Path:
    return make_data(target, folder / "data")


@pytest.fixture(scope="session")
def narrow(target, folder) -> Path:
    """The same data with the layers of the drafts alone."""
    return make_data(target, folder / "narrow", layers=(1, 3))


@pytest.fixture(scope="session")
def target_dir(target, folder) -> Path:
    target.save_pretrained(folder / "target")
    return folder / "target"


@pytest.fixture(scope="session")
def sound(data) -> Callable[[str], Draft]:
    """Return a function that returns the trained draft of a kind; do not change it."""
    return functools.cache(lambda kind: train_draft(kind, data))


@pytest.fixture(scope="session")
def sound_dir(sound, folder) -> Callable[[str], Path]:
    """Return a function that returns the directory of the trained draft of a kind."""

    @functools.cache
    def saved(kind: str) -> Path:
        sound(kind).save_pretrained(folder / kind, torch.float32)
        return folder / kind

    return saved
