"""The target that a draft was fitted to: stored in its config.json, compared before it is used.

A draft of another target with the same shape loads and runs, but the target accepts none of its
tokens. Prompts rendered differently from the training data reduce acceptance without an error. So
the facts that reveal this are stored with the draft and not with its dataset: the embedding is one
of its weights anyway, and the identity of target and prompts (see `spec_data.shards.identity`) is
the `origin` in its config. Drafts of other trainers have none.
"""

import math
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.identity import compare
from spec_data.shards.schema import Manifest

_ROWS = 8192  # rows compared at a time: a difference of all rows would be as large as the embedding


def origin_of(manifest: Manifest) -> dict[str, Any]:
    """Return the origin of a draft of this dataset: its identity, fingerprint, head and names.

    The names say what to serve and to credit; they are never compared.
    """
    head = {k: v for k, v in structs.asdict(manifest.head).items() if v is not None}
    facts = {"dataset_fingerprint": manifest.fingerprint, "head": head}
    facts |= {"target_name": manifest.target.name}
    if manifest.target.revision:  # of a target on the Hub
        facts |= {"target_revision": manifest.target.revision}
    return manifest.identity | facts


def differing_rows(stored: Tensor, other: Tensor) -> float:
    """Return the share of rows that differ by more than rounding to the coarser dtype.

    Both tensors are [V, H], of any floating dtypes; the device of `other` computes.
    """
    eps = max(torch.finfo(stored.dtype).eps, torch.finfo(other.dtype).eps)
    smallest = 2.0**-24  # smallest positive float16
    count = 0
    for a, b in zip(stored.split(_ROWS), other.split(_ROWS), strict=True):
        a, b = a.to(b.device).float(), b.float()
        same = torch.isclose(a, b, rtol=eps, atol=smallest, equal_nan=True)
        count += int((~same).any(-1).sum())
    return count / len(stored)


def require_same_embedding(stored: Tensor, other: Tensor, who: str, whose: str) -> None:
    """Refuse a draft of another target, by its embedding.

    `stored` [V, H] is the embedding of the draft `who`, `other` that of the target of `whose`.

    Raises:
        DraftError: the embeddings differ by more than rounding.
    """
    share = differing_rows(stored, other) if stored.shape == other.shape else 1.0
    if share:
        raise DraftError(
            f"{who}: a draft of another target than that of {whose} ({max(share, 1e-4):.2%} of "
            "its embedding's rows differ); use a dataset and a draft of the same target"
        )


def embedding_warnings(stored: Tensor, other: Tensor, *, trained: bool) -> list[str]:
    """Return a line if a draft's embedding [V, H] is not that of the target, `other`.

    A `trained` one is the target's, moved by the training.
    """
    squares = [0.0, 0.0]  # of the difference, and of the draft's own
    for a, b in zip(stored.detach().split(_ROWS), other.detach().split(_ROWS), strict=True):
        a = a.to(b.device).float()
        squares[0] += float((a - b.float()).square().sum())
        squares[1] += float(a.square().sum())
    difference = math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf
    # bf16 rounding is 0.002; another model differs by about 1
    if difference <= (0.9 if trained else 0.02):
        return []
    return [
        f"the draft's embedding differs from the target's by {difference:.0%}: the draft was "
        "fitted to another target or another version of it; expect low acceptance"
    ]


def origin_warnings(origin: dict[str, Any], manifest: Manifest) -> list[str]:
    """Return a line for each fact in which the draft's target or prompts are not the dataset's.

    Facts that one of the two does not record are not compared. `require_same_embedding` has passed,
    so differences are those of another version of the target, or of its prompts.
    """
    return compare(
        origin,
        manifest.identity,
        of_recorded="the draft was fitted with",
        of_current=f"{manifest.where} has",
    ).texts
