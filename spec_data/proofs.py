"""Prove that the head, described as data, gives the model's own logits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_data.shards.errors import TargetError
from spec_data.target import Target

# Relative to the largest logit of a token: one rounding of the head's output, doubled.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def prove_head(target: Target, documents: Sequence[Tensor], tokens: int = 512) -> float:
    """Compare `head(final hidden)` with the model's logits on real documents, each int64 [T_d].

    Gives the largest error relative to the token's largest |logit|.

    Raises:
        TargetError: they differ by more than rounding: the head does something the description
            cannot say, so final-hidden and top-k supervision would be wrong.
    """
    worst, seen = 0.0, 0
    for ids in documents:
        ids = ids[: tokens - seen][None]
        layout = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]
        captured, logits = target.capture(ids, *layout, None, full_logits=True)
        if logits is None or captured.final is None:
            raise TargetError("the target returned no logits; it is not a causal language model")
        derived = target.logits_of(captured.final).float()
        error = (derived - logits.float()).abs().amax(-1) / logits.float().abs().amax(-1)
        worst = max(worst, float(error.max()))
        seen += ids.shape[1]
        if seen >= tokens:
            break
    allowed = _TOLERANCE.get(target.dtype, 2e-2)
    if not worst <= allowed:
        raise TargetError(
            f"head(final hidden) is not the model's logits (relative error {worst:.1e}, allowed "
            f"{allowed:.0e}): the head of {type(target.model).__name__} does more than scale, "
            "bias and soft-cap. Use --supervision logits: it stores the model's own (2 bytes x "
            "vocabulary per token), and `spec-train fit` learns from them"
        )
    return worst
