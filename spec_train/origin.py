"""Whom a draft was fitted to: kept in its config.json, compared before it is used.

A draft of another target of the same shape loads, runs and is never accepted, and prompts rendered
unlike the training data cost acceptance silently. What tells them apart must therefore travel with
the draft, not with the path of its dataset: the embedding does anyway, hashes and template kwargs
are the config's `origin`. Drafts of older releases have an empty one.
"""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.schema import Manifest

_ROWS = 8192  # compared at a time: a whole difference would be as large as the embedding


def origin_of(manifest: Manifest) -> dict[str, Any]:
    """The origin of a draft for a dataset: as much as its manifest says."""
    names = ("chat_template_hash", "chat_template_kwargs")
    found = {name: manifest.raw["tokenizer"].get(name) for name in names}
    found["weights_hash"] = manifest.target.get("weights_hash")
    found["head"] = {k: v for k, v in asdict(manifest.head).items() if v is not None}
    return {name: value for name, value in found.items() if value is not None}


def differing_rows(own: Tensor, other: Tensor) -> float:
    """Share of rows that differ by more than rounding to the coarser dtype; both [V, H].

    Computed on the device of `other`.
    """
    eps = max(torch.finfo(own.dtype).eps, torch.finfo(other.dtype).eps)
    smallest = 2.0**-24  # of float16, below which it keeps nothing
    count = 0
    for a, b in zip(own.split(_ROWS), other.split(_ROWS), strict=True):
        b = b.float()
        gap = (a.to(b.device).float() - b).abs()
        count += int((~(gap <= eps * b.abs() + smallest)).any(-1).sum())
    return count / len(own)


def require_same_embedding(own: Tensor, other: Tensor, who: str, whose: str) -> None:
    """Refuse a draft of another target.

    Raises:
        DraftError: `who`'s embedding [V, H] is not that of the target of `whose`.
    """
    share = differing_rows(own, other) if own.shape == other.shape else 1.0
    if share:
        raise DraftError(
            f"{who}: a draft of another target than that of {whose} ({max(share, 1e-4):.2%} of "
            "its embedding's rows differ); use a dataset and a draft of the same target"
        )


def weights_warning(origin: dict[str, Any], manifest: Manifest) -> list[str]:
    """A warning where a draft's target has the dataset's embedding, but other weights."""
    own, other = origin.get("weights_hash"), manifest.target.get("weights_hash")
    if own is None or other is None or own == other:
        return []
    return [
        f"the target of {manifest.where} has other weights than the one the draft was fitted to "
        "(the same embedding): another version of it, or the same one in other files"
    ]
