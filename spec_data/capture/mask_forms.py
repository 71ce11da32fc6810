"""The forms of attention mask that can keep the documents of a pack apart.

No form is right for every family: one 4-D mask for all layers removes the sliding window of some
families, and with position ids alone others let documents see each other. So each form is only a
candidate, which `proofs.py` accepts or rejects on real packs.

    per-document          no mask of the pack: attention runs inside each document, one by one
    varlen                the same in one kernel, flash attention of documents of many lengths (GPU)
    flex                  the same in one kernel of flex_attention, which skips blocks (GPU)
    mask-per-layer-type   one block-causal mask per attention type, with its sliding window
    block-causal-window   one block-causal mask with the sliding window for all layers
    block-causal          one block-causal mask without a window
    position-ids          no mask; position ids restart at each document
    rows                  no packing: one document per row, several right-padded rows per batch
    single                no packing: one document per batch
    requests              several documents per forward, which an engine packs as its requests
"""

from typing import Any

import torch
from torch import Tensor

from spec_data.models.reading import text_config
from spec_data.shards.packing import block_causal_mask

PER_DOCUMENT = "per-document"
VARLEN = "varlen"
FLEX = "flex"
KERNELS = (VARLEN, FLEX)
"""Forms that a GPU runs in one kernel."""
WITHOUT_MASK = (PER_DOCUMENT, *KERNELS)
"""Forms of `attention_in_parts`."""
ROWS = "rows"
SINGLE = "single"
REQUESTS = "requests"
_WINDOWED, _PLAIN = "sliding_attention", "full_attention"  # types of layers


def view_of(config: Any) -> int | None:
    """Return how many tokens the layers with the shortest view see; None: all see everything.

    `config` is the transformers configuration.
    """
    text = text_config(config)
    window = getattr(text, "sliding_window", None) or getattr(text, "attention_chunk_size", None)
    return window or None


def mask_forms(config: Any, attn: str, device: str = "cpu") -> list[str]:
    """Return the candidate forms for a model, the most specific first, unpacked forms last.

    On a CPU the first one that is proven is taken, elsewhere the fastest of `WITHOUT_MASK` and of
    the first other one.

    `config` is the transformers configuration, `attn` the attention implementation, `device` the
    type of device that the model runs on.
    """
    text = text_config(config)
    forms = []
    if attn in ("sdpa", "eager"):
        forms += [PER_DOCUMENT] if device == "cpu" else [*KERNELS, PER_DOCUMENT]
        types = set(getattr(text, "layer_types", None) or ())
        if types and types <= {_WINDOWED, _PLAIN}:
            forms.append("mask-per-layer-type")
        if getattr(text, "sliding_window", None):
            forms.append("block-causal-window")
        forms.append("block-causal")
    return [*forms, "position-ids", ROWS, SINGLE]


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as eager attention takes it: zero, or the least number where False."""
    blocked = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(~mask, torch.finfo(dtype).min)


def packed_mask(form: str, config: Any, attn: str, document_ids: Tensor, dtype: torch.dtype) -> Any:
    """Return the `attention_mask` of a packed forward in this form.

    Args:
        form: one of the packed forms.
        config: the transformers configuration.
        attn: "sdpa" receives bool masks (True: may attend), others additive masks in `dtype`.
        document_ids: int64 [B, T] on the device of the model, -1 in padding.
        dtype: dtype of the model.

    Returns:
        A mask [B, 1, T, T]; a dict of such masks by attention type; or None for position ids alone
        and for attention per document.
    """
    text = text_config(config)
    window = getattr(text, "sliding_window", None)

    def mask(span: int | None) -> Tensor:
        seen = block_causal_mask(document_ids, span)  # bool [B, 1, T, T]
        return seen if attn == "sdpa" else additive(seen, dtype)

    if form == "mask-per-layer-type":
        types = sorted(set(text.layer_types))
        return {kind: mask(window if kind == _WINDOWED else None) for kind in types}
    if form in (*WITHOUT_MASK, "position-ids"):
        return None
    return mask({"block-causal-window": window, "block-causal": None}[form])
