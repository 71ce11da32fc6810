"""Drafts in our own form, their target as a model directory, and what others publish of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spec_data.shards.reader import HiddenStatesDataset
from spec_train.formats.target_facts import TargetFacts
from spec_train.losses.head import TargetHead
from tests.factory import tiny_llama
from tests.spec_train.drafts.any_draft import build_draft


@pytest.fixture
def own(dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path) -> Path:
    """The directory of a small EAGLE-3."""
    build_draft("eagle3", dataset, head).save_pretrained(tmp_path / "own")
    return tmp_path / "own"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target that `dataset` was made from, as a model directory."""
    folder = tmp_path_factory.mktemp("target") / "model"
    tiny_llama().save_pretrained(folder)
    return folder


@pytest.fixture
def saved(dataset: HiddenStatesDataset, head: TargetHead, tmp_path: Path) -> Any:
    """A function that saves a small draft of a kind, not with fresh weights."""

    def save(kind: str, **options: Any) -> Path:
        draft = build_draft(kind, dataset, head, **options)
        with torch.no_grad():
            for value in draft.trainable_parameters():
                value.add_(torch.randn_like(value) / 8)
        draft.save_pretrained(tmp_path / "own")
        return tmp_path / "own"

    return save


@pytest.fixture
def facts(head: TargetHead) -> TargetFacts:
    return TargetFacts(
        name="target", num_layers=4, embedding=head.embed_weight, head=head.head_weight
    )


def read(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config and the tensors of a draft directory."""
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
