"""Attention in parts, so that no mask and no scores of the size of a whole row exist.

transformers builds a dense mask for sliding windows, and its eager attention dense scores for each
head: both grow with the square of the row. Here the mask is a rule (transformers' own mask
function), evaluated for one part at a time, and the family's own attention function computes the
part. A part is a chunk of queries of one long document, or a whole document of a pack. A query's
output depends on no other query, so the results are those of the plain forward up to rounding; both
are compared with it before they are used, and where a family raises, that comparison fails.

Documents of a pack may also attend in one kernel: flash attention of documents of many lengths, or
flex_attention of the blocks that hold a pair of query and key. The proof of a GPU chooses by time:
many small kernels may cost more than a dense mask.

The slots of a row may also lie on several processes (--context-parallel): each has the queries of
its share, and gathers the keys and values of all.

Shapes: B rows, T slots of a row, q queries and k keys of a part, h heads, d head size.
"""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from spec_data.capture.mask_forms import FLEX, KERNELS, PER_DOCUMENT, VARLEN, additive, view_of
from spec_data.models.devices import sent
from spec_data.models.reading import text_config
from spec_data.shards.errors import RunError

LONG_ROW = 2048
"""Documents with more tokens attend in chunks, unless plain causal attention needs no mask."""
QUERIES = 256  # most queries of a chunk
_SCORES = 1 << 25  # most scores (queries x keys x heads) of a chunk
# The same of a share, whose chunks have all keys before them: more queries, as each chunk repeats
# the keys for all heads; sdpa has no scores in memory, so these are the elements of a mask.
_SHARE_QUERIES, _SHARE_SCORES = 1024, 1 << 27
_PREFIX = "spec_data_parts_"
_BLOCK = 128  # queries, and keys, of a block of flex_attention
UNCOMPILED = ("cpu",)
"""Devices on which flex_attention is computed plainly, with the scores of all pairs."""
_GRAPHS = 64  # of flex_attention in a process: by batch, static and dynamic sizes, kinds of masks

Spans = Sequence[Sequence[tuple[int, int]]]
"""Per row of a batch, the slots [start, stop) of each document."""


@dataclass(frozen=True, kw_only=True)
class Share:
    """The slots of a row that a process has: one piece from its begin and one from its end.

    Of 2n equal pieces, process r of n has r and 2n - 1 - r, so under a causal mask all processes
    have equally many keys to attend to.
    """

    rank: int
    processes: int
    length: int  # slots of the row: a multiple of 2 * processes

    @property
    def pieces(self) -> list[tuple[int, int, int]]:
        """Of each piece its first slot here, and its slots [start, stop) of the row."""
        size = self.length // (2 * self.processes)
        starts = self.rank * size, (2 * self.processes - 1 - self.rank) * size
        return [(i * size, start, start + size) for i, start in enumerate(starts)]

    def of(self, row: Tensor) -> Tensor:
        """Return this share of rows [B, T]."""
        return torch.cat([row[:, start:stop] for _, start, stop in self.pieces], 1)

    @staticmethod
    def joined(shares: Sequence[Tensor], dim: int) -> Tensor:
        """Return the rows of which these are the shares of all processes, along axis `dim`."""
        pairs = [share.chunk(2, dim) for share in shares]
        return torch.cat([*(first for first, _ in pairs), *(last for _, last in pairs[::-1])], dim)

    def gathered(self, heads: Tensor) -> Tensor:
        """Return [B, h, T, d] of the [B, h, S, d] of each process; all must call it together."""
        shares = list(heads.new_empty((self.processes, *heads.shape)).unbind())
        dist.all_gather(shares, heads.contiguous())
        return self.joined(shares, 2)


_spans: ContextVar[Spans | None] = ContextVar("spans of packed documents", default=None)
_share: ContextVar[Share | None] = ContextVar("the slots of this process", default=None)


@dataclass(frozen=True, kw_only=True)
class RuleMask:
    """A mask as a rule, which the models of transformers hand on to the attention function."""

    rule: Callable[..., Tensor]  # whether a query sees a key, of (batch, head, query, key) indices
    reach: int | None  # a query sees none of the keys this far behind it; None: no limit
    spans: Spans | None  # the documents of packed rows; None: one long document, in chunks
    always: bool  # every part needs a mask; else only a document that is longer than `reach`
    share: Share | None = None  # the slots of the queries, where keys and values are gathered
    # Masks of documents, which are the same for every layer of a kind.
    made: dict[tuple[int, int, int, torch.device], Tensor] = field(default_factory=dict)
    layouts: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)
    blocks: dict[torch.device, Any] = field(default_factory=dict)

    def __getitem__(self, index: Any) -> "RuleMask":
        """Return the mask where a model takes all of it: Gemma 4, whose layers share their keys."""
        if all(part in (slice(None), slice(0, None)) for part in index):
            return self
        raise NotImplementedError("this family takes a part of its mask")

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

    def block_mask(self, length: int, device: torch.device) -> Any:
        """Return the blocks of keys that each block of queries sees, and which it sees wholly.

        They come from the first key of each slot, which never falls along a row; the last one is
        the slot itself. So a block of queries sees every block from its first key's to its own.
        """
        if device not in self.blocks:
            from torch.nn.attention.flex_attention import BlockMask

            slots = torch.arange(length)
            first = slots.repeat(len(self.spans or ()), 1)  # [B, T]; padding sees itself
            for row, spans in enumerate(self.spans or ()):
                for start, stop in spans:
                    first[row, start:stop] = start
            if self.reach is not None:
                first = torch.maximum(first, slots - self.reach + 1)
            count = max(2, -(-length // _BLOCK))  # a size of one would be compiled by itself
            edges = pad(first, (0, count * _BLOCK - length), value=count * _BLOCK)
            edges = edges.view(len(first), 1, count, _BLOCK)  # no block is whole to a cut one
            keys = torch.arange(count)
            queries = keys[:, None]
            seen = (keys >= edges[..., :1] // _BLOCK) & (keys <= queries)  # [B, 1, R, R]
            whole = (keys * _BLOCK >= edges[..., -1:]) & (keys < queries)
            at = sent(first, device)

            def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
                """Return how many blocks each row has, and which: they come first in a row."""
                order = blocks.int().argsort(dim=-1, descending=True, stable=True)
                return sent(blocks.sum(-1).int(), device), sent(order.int(), device)

            self.blocks[device] = BlockMask.from_kv_blocks(
                *ordered(seen & ~whole),
                *ordered(seen & whole),
                BLOCK_SIZE=_BLOCK,
                mask_mod=lambda pack, head, query, key: (key <= query) & (key >= at[pack, query]),
                seq_lengths=(length, length),
                compute_q_blocks=False,  # they are for gradients
            )
        return self.blocks[device]

    def parts(self, length: int, heads: int) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield row, first query, the slot after the last query, and first key of each part of rows
        of `length` slots; and which slot here is the first query.

        Its keys end with its queries, as every rule is causal.
        """
        pieces = [(0, 0, length)] if self.share is None else self.share.pieces
        for row, spans in enumerate(self.spans or [[(0, length)]]):
            for first, last in spans:
                for here, low, high in pieces:
                    start, stop = max(first, low), min(last, high)
                    size = self._part_size(start == first, stop - start, length, heads)
                    for a in range(start, stop, size):
                        key = first if self.reach is None else max(first, a - self.reach + 1)
                        yield row, a, min(a + size, stop), key, here + a - low

    def _part_size(self, square: bool, queries: int, length: int, heads: int) -> int:
        """Return how many of so many queries attend together; `square`: no key is before them."""
        if self.share is None:
            chunk = max(16, min(QUERIES, _SCORES // (heads * length)))
            return chunk if self.spans is None else max(1, queries)
        if square and not self._masked(queries):
            return max(1, queries)
        limit = _SCORES // heads if self.always else _SHARE_SCORES
        return max(16, min(_SHARE_QUERIES, limit // length))

    def _masked(self, queries: int) -> bool:
        """Whether a square part needs more than causal attention."""
        return self.always or (self.reach is not None and self.reach < queries)

    def of(
        self, row: int, start: int, stop: int, first: int, device: torch.device
    ) -> Tensor | None:
        """Return the mask of a part, bool [1, 1, q, k]; None: causal attention is enough.

        It is made on the device of the queries: the blocks of a target may lie on several.
        """
        if start == first and not self._masked(stop - start):
            return None
        part = row, start, stop, device
        if (mask := self.made.get(part)) is not None:
            return mask
        batch = torch.full((1, 1, 1, 1), row, device=device)
        queries = torch.arange(start, stop, device=device).view(1, 1, -1, 1)
        keys = torch.arange(first, stop, device=device).view(1, 1, 1, -1)
        seen = self.rule(batch, torch.zeros_like(batch), queries, keys)
        mask = seen.expand(1, 1, stop - start, stop - first)
        if self.spans is not None and start == first:
            self.made[part] = mask
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
    model: Any,
    attn: str,
    document_ids: Tensor | None = None,
    form: str = PER_DOCUMENT,
    share: Share | None = None,
) -> Iterator[None]:
    """Let forwards without a mask argument attend in parts.

    Args:
        model: the target. attn: its attention implementation, "sdpa" or "eager".
        form: PER_DOCUMENT, or one of KERNELS: all documents in one kernel.
        document_ids: of packed rows, int64 [B, T], -1 in padding, whose states mean nothing: each
            document attends on its own. None: one unpadded document attends in chunks.
        share: the slots of the rows that the model is given, of all those of `document_ids`.
    """
    config = text_config(model.config)  # the one that decoder blocks read
    token = _spans.set(None if document_ids is None else spans_of(document_ids))
    of_share = _share.set(share)
    config._attn_implementation = _PREFIX + (form if form in KERNELS else attn)
    try:
        yield
    finally:
        config._attn_implementation = attn
        _spans.reset(token)
        _share.reset(of_share)


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
    spans, share = _spans.get(), _share.get()
    rows = 1 if spans is None else len(spans)
    if batch_size != rows or q_length != kv_length or attention_mask is not None or use_vmap:
        raise NotImplementedError("this family's masks do not allow attention in parts")
    if share is not None:  # the rule counts the slots of this process, and takes gaps for documents
        window = None if local_size is None else sliding_window_causal_mask_function(local_size)
        mask_function = window or causal_mask_function
    return RuleMask(rule=mask_function, reach=local_size, spans=spans, always=always, share=share)


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
    joined: Tensor | None = None  # heads; zeros where no document is
    share = attention_mask.share
    if share is not None:
        key, value = share.gathered(key), share.gathered(value)
    for row, start, stop, first, here in attention_mask.parts(key.shape[2], query.shape[1]):
        mask = attention_mask.of(row, start, stop, first, query.device)
        if mask is not None and additive_mask:
            mask = additive(mask, query.dtype)
        queries = query[row : row + 1, :, here : here + stop - start]
        keys, values = (x[row : row + 1, :, first:stop] for x in (key, value))
        heads, _ = function(module, queries, keys, values, mask, **options)
        if joined is None:
            joined = heads.new_zeros(query.shape[0], query.shape[2], *heads.shape[2:])
        joined[row, here : here + stop - start] = heads[0]
    if joined is None:  # padding alone
        joined = query.new_zeros(*query.transpose(1, 2).shape[:3], value.shape[-1])
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


def _attend_flex(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
) -> tuple[Tensor, None]:
    """The same by transformers' flex_attention, which has caps and sinks; compiled on a GPU."""
    from torch._dynamo import config
    from torch._dynamo.exc import FailOnRecompileLimitHit
    from transformers.integrations.flex_attention import flex_attention_forward

    if not isinstance(attention_mask, RuleMask) or attention_mask.spans is None:
        raise NotImplementedError("this family's attention makes masks of its own")
    if options.get("position_bias") is not None:
        raise NotImplementedError("a bias of all pairs has the size of a whole row")
    blocks = attention_mask.block_mask(query.shape[2], query.device)
    mode = config.patch(recompile_limit=_GRAPHS, fail_on_recompile_limit_hit=True)
    if query.device.type in UNCOMPILED:
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")
        mode = torch.compiler.set_stance("force_eager")
    try:
        with mode:  # never without being compiled, in the memory of all pairs
            out, _ = flex_attention_forward(module, query, key, value, blocks, **options)
    except FailOnRecompileLimitHit as problem:
        raise RunError(
            f"flex_attention was compiled {_GRAPHS} times in this process, and tensors of another "
            f"kind came: {list(query.shape)}, {query.dtype}; use --packing {PER_DOCUMENT}"
        ) from problem
    return out, None


for _name, _function in {VARLEN: _attend_varlen, FLEX: _attend_flex}.items():
    ALL_ATTENTION_FUNCTIONS.register(_PREFIX + _name, _function)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + _name, _make_mask)
ALL_ATTENTION_FUNCTIONS.register(_PREFIX + "sdpa", partial(_attend, sdpa_attention_forward, False))
ALL_ATTENTION_FUNCTIONS.register(_PREFIX + "eager", _attend_eager)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + "sdpa", _make_sdpa_mask)
ALL_MASK_ATTENTION_FUNCTIONS.register(_PREFIX + "eager", _make_mask)
