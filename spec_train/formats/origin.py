"""The target that a draft was fitted to: stored in its config.json, compared before it is used.

A draft of another target with the same shape loads and runs, but the target accepts none of its
tokens. Prompts rendered differently from the training data reduce acceptance without an error. So
the facts that reveal this are stored with the draft and not with its dataset: the embedding is one
of its weights anyway, and the identity of target and prompts (see `spec_data.shards.identity`) is
the `origin` in its config. Drafts of other trainers have none.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from spec_data.shards.errors import DraftError
from spec_data.shards.identity import compare
from spec_data.shards.schema import Manifest

_ROWS = 8192  # rows compared at a time: a difference of all rows would be as large as the embedding
_ROUNDED = 0.02  # bf16 rounding is 0.002
_ANOTHER_MODEL = 0.9  # two models that have nothing in common differ by 1 or more


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
            "its embedding's rows differ); use a dataset and a draft of the same target. Of a "
            "fine-tune, `eval --target` measures the draft there, and `fit --init-from` trains it"
        )


def require_same_tokens(
    stored: Tensor, other: Tensor, origin: Mapping[str, Any], manifest: Manifest, who: str
) -> list[str]:
    """Refuse a draft whose tokens are not the dataset's; return a line if its weights are others.

    `stored` [V, H] is the embedding of the draft `who`, of that `origin`, and `other` that of the
    dataset's target. A fine-tune moves an embedding a little. One that is unrelated says nothing of
    the tokens: the tokenizer must be the same, then.

    Raises:
        DraftError: another size, or nothing says that a token id means the same to both.
    """
    whose = str(Path(manifest.where).parent)
    if stored.shape != other.shape:
        require_same_embedding(stored, other, who, whose)
    share = differing_rows(stored, other)
    if not share:
        return []
    moved = difference(stored, other)
    by = f"its embedding differs by {moved:.2%} ({max(share, 1e-4):.2%} of the rows)"
    if moved <= _ANOTHER_MODEL:
        return [
            f"the target of {whose} is another checkpoint of the draft's own: {by}; the draft goes "
            "on with what it shares with this one"
        ]
    # a fine-tune may have other special tokens: the vocabulary alone, if it is recorded
    known = ("tokenizer.model", "tokenizer_hash")
    name = next((n for n in known if n in origin and n in manifest.identity), None)
    if name is None or origin[name] != manifest.identity[name]:
        raise DraftError(
            f"{who}: a draft of another target than that of {whose}: {by}, and "
            + ("nothing says that their tokens are the same" if name is None else "other tokens")
            + "; start a new draft, without --init-from"
        )
    return [
        f"the target of {whose} is another model than the draft's own, with the same tokens: {by}; "
        "the draft may be no better than a new one"
    ]


def difference(stored: Tensor, other: Tensor) -> float:
    """Return how large the difference of two embeddings [V, H] is, as a share of `stored`."""
    squares = [0.0, 0.0]  # of the difference, and of the first
    for a, b in zip(stored.detach().split(_ROWS), other.detach().split(_ROWS), strict=True):
        a = a.to(b.device).float()
        squares[0] += float((a - b.float()).square().sum())
        squares[1] += float(a.square().sum())
    return math.sqrt(squares[0] / squares[1]) if squares[1] else math.inf


def embedding_warnings(stored: Tensor, other: Tensor, *, trained: bool) -> list[str]:
    """Return a line if a draft's embedding [V, H] is not that of the target, `other`.

    A `trained` one is the target's, moved by the training.
    """
    moved = difference(stored, other)
    if moved <= (_ANOTHER_MODEL if trained else _ROUNDED):
        return []
    return [
        f"the draft's embedding differs from the target's by {moved:.0%}: the draft was "
        "fitted to another target or another version of it; expect low acceptance"
    ]


def origin_warnings(
    origin: dict[str, Any], manifest: Manifest, *, other_weights: bool = False
) -> list[str]:
    """Return a line for each fact in which the draft's target or prompts are not the dataset's.

    Facts that one of the two does not record are not compared. The embedding was compared before,
    so differences are those of another version of the target, or of its prompts; `other_weights`:
    a line has said already that its weights are others.
    """
    compared = compare(
        origin,
        manifest.identity,
        of_recorded="the draft was fitted with",
        of_current=f"{manifest.where} has",
    )
    told = {"weights_hash"} if other_weights else set()
    return [d.text for d in compared.differences if d.name not in told]
