"""Attention of a long document in chunks of queries, so that no T x T mask or score matrix exists.

transformers builds a dense mask for sliding windows, and its eager attention a dense matrix of
scores per head. Both grow with the square of the row. Here the mask is a rule (transformers' own
mask function), which is evaluated for one chunk of queries at a time, and the family's own
attention function computes this chunk. A query's output depends on no other query, so the result is
the same up to rounding. `Target` compares it with the plain forward before it is first used.

Shapes: T tokens of the row, q queries of a chunk, k keys that they can see, h heads.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spec_data.capture.mask_forms import view_of
from spec_data.models.reading import text_config
from spec_data.shards.errors import TargetError

LONG_ROW = 2048
"""Documents with more tokens attend in chunks, unless plain causal attention needs no mask."""
QUERIES = 256  # most queries of a chunk
_SCORES = 1 << 25  # most scores (queries x keys x heads) of a chunk
_PREFIX = "spec_data_chunks_"


@dataclass(frozen=True, kw_only=True)
class ChunkedMask:
    """The keys that queries see, as a rule; the models of transformers hand it on as a mask."""

    rule: Callable[..., Tensor]  # of (batch, head, query, key) indices, broadcast
    reach: int | None  # a query sees none of the keys this far behind it; None: no limit

    def part(self, start: int, stop: int, device: torch.device) -> tuple[int, Tensor]:
        """Return the first key that queries start..stop - 1 may see, and their mask.

        The mask is bool [1, 1, q, k]; its keys end with key stop - 1, as the rule is causal. It is
        made on `device`, that of the queries: the blocks of a target may lie on several.
        """
        first = 0 if self.reach is None else max(0, start - self.reach + 1)
        one = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
        queries = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        keys = torch.arange(first, stop, device=device).view(1, 1, 1, -1)
        seen = self.rule(one, one, queries, keys)
        return first, seen.expand(1, 1, stop - start, stop - first)


def needs_chunks(config: Any, attn: str) -> bool:
    """Whether a long row would need T x T memory: with eager attention, or where sdpa does.

    sdpa's causal kernels need none, but a window needs a mask, and the CPU has no kernel for values
    of another head size than the keys'.
    """
    if attn == "sdpa":
        return view_of(config) is not None or _uneven(text_config(config))
    return attn == "eager"


def _uneven(text: Any) -> bool:
    """Whether values have a head size of their own (multi-head latent attention)."""
    return getattr(text, "v_head_dim", None) is not None


@contextmanager
def attention_in_chunks(model: Any, attn: str) -> Iterator[None]:
    """Let forwards of one document, unpadded and without a mask argument, attend in chunks.

    `attn` is the attention implementation of the model, "sdpa" or "eager".
    """
    config = text_config(model.config)  # the one that decoder blocks read
    config._attn_implementation = _PREFIX + attn
    try:
        yield
    finally:
        config._attn_implementation = attn


def _make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **options: Any,
) -> ChunkedMask:
    """Return the mask that transformers asks for (see `masking_utils.sdpa_mask`) as a rule."""
    if batch_size != 1 or q_length != kv_length or attention_mask is not None or use_vmap:
        raise TargetError("only one unpadded document at a time attends in chunks")
    return ChunkedMask(rule=mask_function, reach=local_size)


def _make_sdpa_mask(**options: Any) -> ChunkedMask | None:
    """The same, or None where sdpa's own causal attention is enough."""
    reach, skippable = options.get("local_size"), options.get("allow_is_causal_skip", True)
    within = reach is None or reach > options["q_length"]
    if skippable and within and not _uneven(options.get("config")):
        return None
    return _make_mask(**options)


def _chunked(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    function: Callable[..., Any],
    additive_mask: bool,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: heads [1, T, h, d] of queries [1, h, T, d]."""
    if not isinstance(attention_mask, ChunkedMask):
        return function(module, query, key, value, attention_mask, **options)
    length, heads = query.shape[2], query.shape[1]
    if key.shape[2] != length or options.get("position_bias") is not None:
        raise TargetError("this family's attention does not run in chunks")
    size = max(16, min(QUERIES, _SCORES // (heads * length)))
    parts = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first, mask = attention_mask.part(start, stop, query.device)
        if additive_mask:
            mask = additive(mask, query.dtype)
        keys, values = key[:, :, first:stop], value[:, :, first:stop]
        heads_of = function(module, query[:, :, start:stop], keys, values, mask, **options)
        parts.append(heads_of[0])  # [1, q, h, d]
    return torch.cat(parts, dim=1), None


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bool mask as eager attention takes it: zero, or the least number where False."""
    blocked = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return blocked.masked_fill_(~mask, torch.finfo(dtype).min)


def _own_eager_attention(module: Any) -> Callable[..., Any]:
    """Return the eager attention of a family, which is in the module of its classes.

    Raises:
        NotImplementedError: it has none, so the proof of this form or of chunks fails.
    """
    own = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if own is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention function")
    return own


def register_attention(
    prefix: str,
    attend: Callable[..., tuple[Tensor, None]],
    make_sdpa_mask: Callable[..., Any],
    make_eager_mask: Callable[..., Any],
) -> None:
    """Register an attention with transformers as `prefix` + "sdpa" and `prefix` + "eager".

    Args:
        prefix: of both names.
        attend: an attention function of transformers. It also takes `function`, the plain one of
            the family, and `additive_mask`, whether that one takes masks as `additive` makes them.
        make_sdpa_mask, make_eager_mask: return the masks that `attend` receives.
    """

    def eager(module: Any, *heads: Any, **options: Any) -> tuple[Tensor, None]:
        own = _own_eager_attention(module)
        return attend(module, *heads, function=own, additive_mask=True, **options)

    sdpa = partial(attend, function=sdpa_attention_forward, additive_mask=False)
    ALL_ATTENTION_FUNCTIONS.register(prefix + "sdpa", sdpa)
    ALL_ATTENTION_FUNCTIONS.register(prefix + "eager", eager)
    ALL_MASK_ATTENTION_FUNCTIONS.register(prefix + "sdpa", make_sdpa_mask)
    ALL_MASK_ATTENTION_FUNCTIONS.register(prefix + "eager", make_eager_mask)


register_attention(_PREFIX, _chunked, _make_sdpa_mask, _make_mask)


# -- document attention ----------------------------------------------------------------------------
# Attention of each document of a pack on its own: no mask and no scores across documents.
#
# With a mask, a pack of T tokens costs T x T scores, of which most are blocked. Here the family's
# own attention function is called once per document, with the queries, keys and values of its
# tokens. A document needs a mask only where a layer has a window that is shorter than the document,
# or where eager attention reads the causal rule from a mask. The rule is transformers' own (see
# `long_rows`). As every form of `mask_forms`, this one is compared with documents alone before it
# is used. A family whose attention cannot run here raises NotImplementedError, and that proof
# fails.
#
# It is a form for CPUs. On a GPU many small kernels would cost more than they save.
#
# Shapes: B rows, T slots of a row, n tokens of a document, h heads, d head size.


_ONE_DOCUMENT = "spec_data_documents_"

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
    config._attn_implementation = _ONE_DOCUMENT + attn
    try:
        yield
    finally:
        config._attn_implementation = attn
        _spans.reset(token)


def _make_document_mask(
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


def _make_document_sdpa_mask(**options: Any) -> DocumentMask:
    """The same; sdpa knows that attention is causal."""
    return _make_document_mask(**options, always=False)


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


register_attention(_ONE_DOCUMENT, _per_document, _make_document_sdpa_mask, _make_document_mask)
