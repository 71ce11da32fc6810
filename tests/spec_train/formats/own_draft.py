"""Fixtures: a small EAGLE-3 draft in our own form, and its target as a model directory."""

from pathlib import Path

import pytest

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.losses.head import TargetHead
from tests.factory import tiny_llama
from tests.spec_train.drafts.eagle3.tools import build


@pytest.fixture
def own(dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path) -> Path:
    """The draft's directory."""
    build(dataset, head).save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target that `dataset` was made from, as a model directory."""
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_llama().save_pretrained(folder)
    return folder
