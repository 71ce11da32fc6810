"""What a column of a document holds: which tokens, and how far from the captured states."""

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spec_data.shards.reader import HiddenStatesDataset
from spec_data.shards.schema import FINAL, SUPERVISED, predicts_supervised


def stored_tokens(dataset: HiddenStatesDataset, name: str, row: dict[str, Any]) -> Tensor:
    """Tokens of a document that have a state in a column, bool [T]."""
    mask = row["loss_mask"].numpy()
    if name == FINAL and dataset.final == SUPERVISED:
        return torch.from_numpy(predicts_supervised(mask, np.array([0, len(mask)])))
    return torch.ones(len(mask), dtype=torch.bool)


def declared_error(dataset: HiddenStatesDataset, name: str, figure: str) -> float:
    """Declared relative error of a column's states: root of a channel-normalised MSE."""
    entry = next(c for c in dataset.manifest.raw["columns"] if c["name"] == name)
    return math.sqrt(entry.get("error", {}).get(figure, 0.0))
