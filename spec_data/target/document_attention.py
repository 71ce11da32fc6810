"""Attention of each document of a pack on its own: no mask and no scores across documents.

With a mask, a pack of T tokens costs T x T scores, of which most are blocked. Here the family's own
attention function is called once per document, with the queries, keys and values of its tokens. A
document needs a mask only where a layer has a window that is shorter than the document, or where
eager attention reads the causal rule from a mask. The rule is transformers' own (see `long_rows`).
As every form of `mask_forms`, this one is compared with documents alone before it is used. A family
whose attention cannot run here raises NotImplementedError, and that proof fails.

It is a form for CPUs. On a GPU many small kernels would cost more than they save.

Shapes: B rows, T slots of a row, n tokens of a document, h heads, d head size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from spec_data.models.reading import text_config
from spec_data.target.long_rows import additive, register_attention

_PREFIX = "spec_data_documents_"

Spans = Sequence[Sequence[tuple[int, int]]]
"""Per row of a batch, the slots [start, stop) of each document."""

_spans: ContextVar[Spans | None] = ContextVar("spans of documents", default=None)


@dataclass(frozen=True, kw_only=True)
class DocumentMask:
    """Which slots belong together, and transformers' rule; models hand it on as a mask.

    Attributes:
        spans: of the batch.
        rule: whether a query sees a key, of (batch, head, query, key) indices, broadcast.
        reach: a query sees none of the keys this far behind it; None: no limit.
        always: whether every document needs a mask; else only one that is longer than `reach`.
    """

    spans: Spans
    rule: Callable[..., Tensor]
    reach: int | None
    always: bool
    made: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def of(self, row: int, start: int, stop: int, device: torch.device) -> Tensor | None:
        """Return the mask of a document, bool [1, 1, n, n]; None: causal attention is enough."""
        if not self.always and (self.reach is None or self.reach >= stop - start):
            return None
        if (row, start) not in self.made:  # the same for every layer of this kind
            slots = torch.arange(start, stop, device=device)
            batch = torch.full((1, 1, 1, 1), row, device=device)
            queries, keys = slots.view(1, 1, -1, 1), slots.view(1, 1, 1, -1)
            seen = self.rule(batch, torch.zeros_like(batch), queries, keys)
            self.made[row, start] = seen.expand(1, 1, stop - start, stop - start)
        return self.made[row, start]


def spans_of(document_ids: Tensor) -> list[list[tuple[int, int]]]:
    """Return the slots of every document; `document_ids` int64 [B, T], -1 in padding."""
    found = []
    for row in document_ids.cpu():
        ids, counts = torch.unique_consecutive(row, return_counts=True)
        stops = counts.cumsum(0).tolist()
        spans = zip(ids.tolist(), [0, *stops[:-1]], stops, strict=True)
        found.append([(start, stop) for number, start, stop in spans if number >= 0])
    return found


@contextmanager
def attention_per_document(model: Any, attn: str, document_ids: Tensor) -> Iterator[None]:
    """Let a forward without a mask argument attend inside the documents of its rows.

    `attn` is the attention implementation of the model, "sdpa" or "eager"; `document_ids` are int64
    [B, T], -1 in padding, whose states mean nothing.
    """
    config = text_config(model.config)  # the one that decoder blocks read
    token = _spans.set(spans_of(document_ids))
    config._attn_implementation = _PREFIX + attn
    try:
        yield
    finally:
        config._attn_implementation = attn
        _spans.reset(token)


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    always: bool = True,
    **options: Any,
) -> DocumentMask:
    """Return the mask that transformers asks for (see `masking_utils.sdpa_mask`) as a rule."""
    spans = _spans.get()
    fits = spans is not None and len(spans) == batch_size and q_length == kv_length
    if spans is None or not fits or attention_mask is not None or use_vmap:
        raise NotImplementedError("this family's masks do not allow attention per document")
    return DocumentMask(spans=spans, rule=mask_function, reach=local_size, always=always)


def _make_sdpa_mask(**options: Any) -> DocumentMask:
    """The same; sdpa knows that attention is causal."""
    return _make_mask(**options, always=False)


def _per_document(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    function: Callable[..., Any],
    additive_mask: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: heads [B, T, h, d] of queries [B, h, T, d]."""
    if not isinstance(attention_mask, DocumentMask):
        raise NotImplementedError("this family's attention makes masks of its own")
    if key.shape[2] != query.shape[2] or options.get("position_bias") is not None:
        raise NotImplementedError("this family's attention does not run per document")
    joined: Tensor | None = None
    for row, spans in enumerate(attention_mask.spans):
        for start, stop in spans:
            mask = attention_mask.of(row, start, stop, query.device)
            if mask is not None and additive_mask:
                mask = additive(mask, query.dtype)
            part = slice(row, row + 1), slice(None), slice(start, stop)
            heads, _ = function(module, query[part], key[part], value[part], mask, **options)
            if joined is None:  # zeros where no document is
                joined = heads.new_zeros(query.shape[0], query.shape[2], *heads.shape[2:])
            joined[row, start:stop] = heads[0]
    if joined is None:
        raise NotImplementedError("a batch without documents")
    return joined, None


register_attention(_PREFIX, _per_document, _make_sdpa_mask, _make_mask)
