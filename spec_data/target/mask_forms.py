"""How a packed row is told to a model: the candidate forms of its attention mask.

No form is right for every family (one 4-D mask removes the sliding window of some, position ids
alone leak in others), so each is a candidate that `isolation.py` proves or rejects on real packs.
"""

from typing import Any

import torch
from torch import Tensor

from spec_data.shards.packing import block_causal_mask
from spec_data.target.hooks import text_config

ROWS = "rows"
SINGLE = "single"
_WINDOWED = {"sliding_attention"}
_PLAIN = {"full_attention"}


def mask_forms(config: Any, attn: str) -> list[str]:
    """Candidate forms for a model, most specific first; one document per row comes last."""
    text = text_config(config)
    forms = []
    if attn in ("sdpa", "eager"):
        types = set(getattr(text, "layer_types", None) or ())
        if types and types <= _WINDOWED | _PLAIN:
            forms.append("mask-per-layer-type")
        if getattr(text, "sliding_window", None):
            forms.append("block-causal-window")
        forms.append("block-causal")
    return [*forms, "position-ids", ROWS, SINGLE]


def packed_mask(
    form: str, config: Any, attn: str, document_ids: Tensor, dtype: torch.dtype
) -> dict[str, Any]:
    """The `attention_mask` argument of a packed forward in this form.

    `document_ids` is [B, T] on the model's device. sdpa takes booleans, eager takes additive masks.
    """
    text = text_config(config)
    window = getattr(text, "sliding_window", None)

    def mask(span: int | None) -> Tensor:
        seen = block_causal_mask(document_ids, span)
        if attn == "sdpa":
            return seen
        blocked = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
        return blocked.masked_fill_(~seen, torch.finfo(dtype).min)

    if form == "mask-per-layer-type":
        spans = {t: (window if t in _WINDOWED else None) for t in set(text.layer_types)}
        return {"attention_mask": {t: mask(span) for t, span in sorted(spans.items())}}
    if form == "block-causal-window":
        return {"attention_mask": mask(window)}
    if form == "block-causal":
        return {"attention_mask": mask(None)}
    if form == "position-ids":
        return {"attention_mask": None}
    raise ValueError(f"{form!r} is not a packed mask form")
