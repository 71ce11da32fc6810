"""Attention in parts, so that no mask and no scores of the size of a whole row exist.

transformers builds a dense mask for sliding windows, and its eager attention dense scores for each
head: both grow with the square of the row. Here the mask is a rule (transformers' own mask
function), evaluated for one part at a time, and the family's own attention function computes the
part. A part is a chunk of queries of one long document, or a whole document of a pack. A query's
output depends on no other query, so the results are those of the plain forward up to rounding; both
are compared with it before they are used, and where a family raises, that comparison fails.

Documents of a pack may also attend in one kernel, flash attention of documents of many lengths. The
proof of a GPU chooses by time: many small kernels may cost more than a dense mask.

Shapes: B rows, T slots of a row, q queries and k keys of a part, h heads, d head size.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spec_data.capture.mask_forms import PER_DOCUMENT, VARLEN, additive, view_of
from spec_data.models.devices import sent
from spec_data.models.reading import text_config

LONG_ROW = 2048
"""Documents with more tokens attend in chunks, unless plain causal attention needs no mask."""
QUERIES = 256  # most queries of a chunk
_SCORES = 1 << 25  # most scores (queries x keys x heads) of a chunk
_PREFIX = "spec_data_parts_"

Spans = Sequence[Sequence[tuple[int, int]]]
"""Per row of a batch, the slots [start, stop) of each document."""

_spans: ContextVar[Spans | None] = ContextVar("spans of packed documents", default=None)


@dataclass(frozen=True, kw_only=True)
class RuleMask:
    """A mask as a rule, which the models of transformers hand on to the attention function."""

    rule: Callable[..., Tensor]  # whether a query sees a key, of (batch, head, query, key) indices
    reach: int | None  # a query sees none of the keys this far behind it; None: no limit
    spans: Spans | None  # the documents of packed rows; None: one long document, in chunks
    always: bool  # every part needs a mask; else only a document that is longer than `reach`
    # Masks of documents, which are the same for every layer of a kind.
    made: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    layouts: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layout(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the slots b * T + t of the N tokens of documents, int64 [N], and where each of the
        D documents begins among them, int32 [D + 1].
        """
        if device not in self.layouts:
            rows = enumerate(self.spans or ())
            slots = [torch.arange(a, b) + row * length for row, spans in rows for a, b in spans]
            bounds = torch.tensor([0, *map(len, slots)]).cumsum(0).int()
            self.layouts[device] = sent(torch.cat(slots), device), sent(bounds, device)
        return self.layouts[device]

    def parts(self, length: int, heads: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield row, first query, the slot after the last query, and first key of each part.

        Its keys end with its queries, as every rule is causal.
        """
        if self.spans is not None:
            for row, spans in enumerate(self.spans):
                yield from ((row, start, stop, start) for start, stop in spans)
            return
        size = max(16, min(QUERIES, _SCORES // (heads * length)))
        for start in range(0, length, size):
            first = 0 if self.reach is None else max(0, start - self.reach + 1)
            yield 0, start, min(start + size, length), first

    def of(
        self, row: int, start: int, stop: int, first: int, device: torch.device
    ) -> Tensor | None:
        """Return the mask of a part, bool [1, 1, q, k]; None: causal attention is enough.

        It is made on the device of the queries: the blocks of a target may lie on several.
        """
        if not self.always and (self.reach is None or self.reach >= stop - start):
            return None
        if (mask := self.made.get((row, start))) is not None:
            return mask
        batch = torch.full((1, 1, 1, 1), row, device=device)
        queries = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        keys = torch.arange(first, stop, device=device).view(1, 1, 1, -1)
        seen = self.rule(batch, torch.zeros_like(batch), queries, keys)
        mask = seen.expand(1, 1, stop - start, stop - first)
        if self.spans is not None:
            self.made[row, start] = mask
        return mask


def needs_chunks(config: Any, attn: str) -> bool:
    """Whether a long row would need T x T memory: with eager attention, or where sdpa does.

    sdpa's causal kernels need none, but a window needs a mask, and the CPU has no kernel for values
    of another head size than the keys'.
    """
    uneven = getattr(text_config(config), "v_head_dim", None) is not None
    return attn == "eager" or (attn == "sdpa" and (uneven or view_of(config) is not None))


def spans_of(document_ids: Tensor) -> list[list[tuple[int, int]]]:
    """Return the slots of every document; `document_ids` int64 [B, T], -1 in padding."""
    rows = []
    for row in document_ids.cpu():
        ids, counts = torch.unique_consecutive(row, return_counts=True)
        stops = counts.cumsum(0).tolist()
        spans = zip(ids.tolist(), [0, *stops[:-1]], stops, strict=True)
        rows.append([(start, stop) for number, start, stop in spans if number >= 0])
    return rows


@contextmanager
def attention_in_parts(
    model: Any, attn: str, document_ids: Tensor | None = None, form: str = PER_DOCUMENT
) -> Iterator[None]:
    """Let forwards without a mask argument attend in parts.

    Args:
        model: the target. attn: its attention implementation, "sdpa" or "eager".
        form: PER_DOCUMENT, or VARLEN: all documents in one kernel.
        document_ids: of packed rows, int64 [B, T], -1 in padding, whose states mean nothing: each
            document attends on its own. None: one unpadded document attends in chunks.
    """
    config = text_config(model.config)  # the one that decoder blocks read
    token = _spans.set(None if document_ids is None else spans_of(document_ids))
    config._attn_implementation = _PREFIX + (VARLEN if form == VARLEN else attn)
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
    **_options: Any,
) -> RuleMask:
    """Return the mask that transformers asks for (see `masking_utils.sdpa_mask`) as a rule."""
    spans = _spans.get()
    rows = 1 if spans is None else len(spans)
    if batch_size != rows or q_length != kv_length or attention_mask is not None or use_vmap:
        raise NotImplementedError("this family's masks do not allow attention in parts")
    return RuleMask(rule=mask_function, reach=local_size, spans=spans, always=always)


def _make_sdpa_mask(**options: Any) -> RuleMask | None:
    """The same; None: for a long document, sdpa's own causal attention is enough."""
    if _spans.get() is not None:
        return _make_mask(**options, always=False)
    reach, skippable = options.get("local_size"), options.get("allow_is_causal_skip", True)
    within = reach is None or reach > options["q_length"]
    if skippable and within and getattr(options.get("config"), "v_head_dim", None) is None:
        return None
    return _make_mask(**options)


def _attend(
    function: Callable[..., Any],
    additive_mask: bool,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers: heads [B, T, h, d] of queries [B, h, T, d].

    `function` is the plain one of the family, which takes masks as numbers if `additive_mask`.
    """
    if not isinstance(attention_mask, RuleMask):
        if _spans.get() is None:
            return function(module, query, key, value, attention_mask, **options)
        raise NotImplementedError("this family's attention makes masks of its own")
    if key.shape[2] != query.shape[2] or options.get("position_bias") is not None:
        raise NotImplementedError("this family's attention does not run in parts")
    joined: Tensor | None = None
    for row, start, stop, first in attention_mask.parts(query.shape[2], query.shape[1]):
        mask = attention_mask.of(row, start, stop, first, query.device)
        if mask is not None and additive_mask:
            mask = additive(mask, query.dtype)
        keys, values = (x[row : row + 1, :, first:stop] for x in (key, value))
        heads, _ = function(
            module, query[row : row + 1, :, start:stop], keys, values, mask, **options
        )
        if joined is None:  # zeros where no document is
            joined = heads.new_zeros(query.shape[0], query.shape[2], *heads.shape[2:])
        joined[row, start:stop] = heads[0]
    if joined is None:
        raise NotImplementedError("a batch without documents")
    return joined, None


def _attend_eager(module: Any, *heads: Any, **options: Any) -> tuple[Tensor, None]:
    """The eager attention of a family is in the module of its classes."""
    function = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if function is None:
        raise NotImplementedError(f"{type(module).__name__} has no eager attention function")
    return _attend(function, True, module, *heads, **options)


def _attend_varlen(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend inside all documents of a pack in one kernel; key heads are not repeated."""
    from torch.nn.attention.varlen import varlen_attn

    if not isinstance(attention_mask, RuleMask) or attention_mask.spans is None:
        raise NotImplementedError("this family's attention makes masks of its own")
    if softcap or s_aux is not None or options.get("position_bias") is not None:
        raise NotImplementedError("flash attention has no caps, sinks or biases")
    rows, heads, length, _ = query.shape
    slots, bounds = attention_mask.layout(length, query.device)
    q, k, v = (x.transpose(1, 2).flatten(0, 1)[slots] for x in (query, key, value))  # [N, h, d]
    longest = max(b - a for spans in attention_mask.spans for a, b in spans)
    behind = -1 if attention_mask.reach is None else attention_mask.reach - 1
    options = {"scale": scaling, "window_size": (behind, 0), "enable_gqa": heads != key.shape[1]}
    out = cast(Tensor, varlen_attn(q, k, v, bounds, bounds, longest, longest, **options))
    joined = out.new_zeros(rows * length, *out.shape[1:])  # zeros where no document is
    joined[slots] = out
    return joined.unflatten(0, (rows, length)), None


ALL_ATTENTION_FUNCTIONS.register(_PREFIX + VARLEN, _attend_varlen)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + VARLEN, _make_mask)
ALL_ATTENTION_FUNCTIONS.register(_PREFIX + "sdpa", partial(_attend, sdpa_attention_forward, False))
ALL_ATTENTION_FUNCTIONS.register(_PREFIX + "eager", _attend_eager)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + "sdpa", _make_sdpa_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + "eager", _make_mask)
