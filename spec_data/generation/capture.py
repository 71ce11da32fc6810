"""Capture one unit: run its documents through the target, check the states, encode the columns.

States are gathered at real tokens only, checked and encoded on the device, and copied into the
arrays of the unit while the next forward runs (see `transfers`). So no [B, T, V] logits and no
second copy of a column exist (unless full logits are stored).

Shapes: B rows of a batch, T slots of a row, N real tokens of a batch or of a unit, H hidden size, V
vocabulary size. A row of a batch is a pack, or one document in the unpacked forms.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from spec_data.capture.backend import ForwardBatch, TargetBackend
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE
from spec_data.generation.plan import Plan
from spec_data.generation.transfers import Arrival, CopyStream, encode_columns, store
from spec_data.models.devices import is_memory_error, sent
from spec_data.shards.codecs import Tables
from spec_data.shards.errors import RunError
from spec_data.shards.likelihood import SUMS, document_sums
from spec_data.shards.packing import cut_units, pack_documents
from spec_data.shards.schema import (
    FINAL,
    TEACHERS,
    Column,
    largest,
    layer_column,
    predicts_supervised,
)
from spec_data.shards.writer import UnitData

# -- logits ----------------------------------------------------------------------------------------
# The head is the widest matrix of a target, so it runs only on the tokens that are asked for, some
# at a time: no logits [N, V] exist unless the target returned them.
#
# Shapes: n tokens, m of them with a supervised next token, H hidden size, V vocabulary size.

NOT_SUPERVISED = -1
_LARGEST_NLL = 1e4  # nats, where a target masks part of its vocabulary


def supervised_next(ids: np.ndarray, predicting: np.ndarray) -> np.ndarray:
    """Return the next token of each token where it is supervised, else -1: int64 [N].

    `ids` [N] are those of documents one after another; `predicting`, bool [N]: which tokens have a
    supervised next token in their document.
    """
    following = np.full(len(ids), NOT_SUPERVISED, np.int64)
    following[:-1] = ids[1:]
    following[~predicting] = NOT_SUPERVISED
    return following


def token_figures(
    logits: Tensor,
    exponentials: Tensor,
    logsumexp: Tensor,
    argmax: Tensor,
    following: Tensor,
    temperature: float,
) -> Tensor:
    """Return the `FIGURES` of tokens with a supervised next token, float32 [m, 4].

    Args:
        logits, exponentials: float32 [m, V]; the second is exp(logits - largest).
        logsumexp, argmax: of the logits, float32 and int64 [m].
        following: the next token, int64 [m].
        temperature: the one of the target's samples; 0 is greedy.
    """
    chosen = logits.gather(-1, following[:, None])[:, 0]  # [m]
    largest = logits.gather(-1, argmax[:, None])[:, 0]  # [m]
    if temperature == 0:
        sampled_logit, sampled_first = largest, torch.ones_like(largest)
    elif temperature == 1:
        sampled_first = (largest - logsumexp).exp()
        sampled_logit = _expectation(exponentials, logits) * sampled_first
    else:
        probabilities = torch.softmax(logits / temperature, -1)
        sampled_first = probabilities.gather(-1, argmax[:, None])[:, 0]
        sampled_logit = _expectation(probabilities, logits)
    nll = (logsumexp - chosen).clamp(max=_LARGEST_NLL)
    first = (argmax == following).float()
    return torch.stack([first, nll, logsumexp - sampled_logit, sampled_first], -1)


def _expectation(probabilities: Tensor, logits: Tensor) -> Tensor:
    """Return the sum of p * z over the vocabulary, [m]; a logit of -inf has no share in it.

    `probabilities` [m, V] may lack a common factor.
    """
    if logits.device.type == "cpu":  # elsewhere, this question would wait for the device
        total = torch.einsum("mv,mv->m", probabilities, logits)
        if bool(total.isfinite().all()):
            return total
    return (probabilities * logits.clamp_min(-_LARGEST_NLL)).sum(-1)


def logit_columns(
    target: TargetBackend,
    final: Tensor,
    logits: Tensor | None,
    names: Mapping[str, Column],
    following: np.ndarray,
    temperature: float,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return argmax, logsumexp and, if `names` has them, top-k or full logits; and the figures.

    Args:
        final: final states [n, H].
        logits: the target's own logits [n, V]; None: computed from `final`, in blocks of tokens.
        following: the next token of each token, -1 where it is not supervised, int64 [n], on the
            host, so that nothing waits for the device.
        temperature: see `token_figures`.

    Returns:
        The columns [n] or [n, W], and float32 [m, 4].
    """
    parts: list[dict[str, Tensor]] = []
    figures = [torch.zeros(0, 4, device=final.device)]
    top_k = (names["topk_ids"].width or 1) if "topk_ids" in names else 0
    for part in target.logit_chunks(len(final)) or [slice(0)]:
        if logits is not None:
            block = logits[part]  # [k, V]
        else:
            block = target.logits_of(final[part]) if len(final) else final.new_zeros(0, top_k or 1)
        wide = block.float()
        peak, argmax = largest(wide)  # [k]
        # They cost more than all other steps together, so they are computed once. The sum is not
        # finite if the largest logit is not.
        exponentials = (wide - peak[:, None]).exp_()
        logsumexp = exponentials.sum(-1).log_() + peak
        parts.append({"target_argmax": argmax, "target_logsumexp": logsumexp})
        if top_k:
            top = wide.topk(top_k, dim=-1)
            parts[-1] |= {"topk_ids": top.indices, "topk_logits": top.values}
        asked = np.flatnonzero(following[part] >= 0)
        if len(asked) == 0:
            continue
        chosen = sent(torch.from_numpy(following[part][asked]), final.device)
        if len(asked) < len(wide):
            rows = sent(torch.from_numpy(asked), final.device)
            wide, exponentials = wide[rows], exponentials[rows]
            logsumexp, argmax = logsumexp[rows], argmax[rows]
        figures.append(token_figures(wide, exponentials, logsumexp, argmax, chosen, temperature))
    out = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if logits is not None:
        out["logits"] = logits
    return out, torch.cat(figures)


# -- capture ---------------------------------------------------------------------------------------

_FIGURES = "figures"  # moved to the host with the columns


@dataclass(frozen=True, kw_only=True)
class CaptureSettings:
    """How units are captured; the same for every unit of a run.

    Attributes:
        form: the proven mask form.
        batch_tokens: tokens per target forward.
        tables: the codec tables of each lossy column, by column name.
        temperature: at which the target's samples are imagined, see `shards.likelihood`.
        stream: copies the result of a forward to the host, one batch late; None: at once.
    """

    columns: tuple[Column, ...]
    form: str
    batch_tokens: int
    tables: Mapping[str, Tables] = field(default_factory=dict)
    temperature: float = 1.0
    stream: CopyStream | None = None


@dataclass
class CapturedUnit:
    """The arrays of a unit, ready to write, and what a `UnitRecord` says beside its shard."""

    data: UnitData
    figures: np.ndarray
    dropped: dict[str, int] = field(default_factory=dict)
    left_out: list[int] = field(default_factory=list)


@dataclass
class _UnitUnderWay:
    """A unit of which not all forwards are stored yet."""

    unit: int
    data: UnitData
    figures: np.ndarray
    broken: dict[int, str] = field(default_factory=dict)
    waiting: int = 0  # forwards that were started and are not stored
    all_started: bool = False


# A forward that is not stored: its unit and inputs, the next tokens, and what it computed.
_Forward = tuple[_UnitUnderWay, ForwardBatch, np.ndarray, dict[str, Tensor], Arrival]


def capture_units(
    target: TargetBackend,
    plan: Plan,
    units: Iterable[int],
    settings: CaptureSettings,
    on_tokens: Callable[[int], None] = lambda tokens: None,
) -> Iterator[tuple[int, CapturedUnit]]:
    """Run the documents of units through the target; yield each unit with its columns filled.

    With a `stream`, the next unit is asked for, and its first forward started, before the last
    forward of a unit is stored: units of one forward would otherwise leave the device idle.

    Documents with a non-finite, all-zero or constant state vector, also where they are captured
    again without a pack, are left out and counted.
    `on_tokens` is called with the number of tokens after each forward.

    Raises:
        RunError: more than 1 % of a unit's documents (and more than one) have such states, so
            the capture itself is broken.
    """
    columns, stream = settings.columns, settings.stream
    tables = {name: table.to(target.device) for name, table in settings.tables.items()}
    queue: deque[_Forward] = deque()

    def forward(unit: _UnitUnderWay, batch: ForwardBatch, asked: np.ndarray, form: str) -> _Forward:
        given = (form, columns, asked, settings.temperature)
        try:
            values, measured = forward_columns(target, batch, *given)
            moved = encode_columns(values, columns, tables) | {_FIGURES: measured}
            return unit, batch, asked, values, Arrival(moved, stream)
        except RuntimeError as error:
            if is_memory_error(error):
                rows, slots = batch.input_ids.shape
                error.add_note(f"in a forward of {rows} x {slots:,} tokens, unit {unit.unit}")
            raise

    def store_states(begun: _Forward) -> None:
        unit, batch, asked, values, arrival = begun
        store(arrival, values, batch, columns, unit.data, unit.broken)
        add_figures(arrival.arrays()[_FIGURES], asked, batch, unit.figures)

    def store_first() -> _UnitUnderWay:
        first = queue.popleft()
        store_states(first)
        first[0].waiting -= 1
        return first[0]

    def finished(begun: _UnitUnderWay) -> Iterator[tuple[int, CapturedUnit]]:
        if not begun.all_started or begun.waiting:
            return
        if begun.broken and settings.form not in (ROWS, SINGLE, REQUESTS):
            # under a mask, what is not finite is multiplied by 0 in all other documents of a pack
            packed, begun.broken = begun.broken, {}
            for batch, asked in unit_forwards(plan, begun.unit, SINGLE, settings.batch_tokens):
                if batch.documents[0] in packed:
                    store_states(forward(begun, batch, asked, SINGLE))
        yield begun.unit, _finished(begun, plan, columns)

    for unit in units:
        data = plan.unit_documents(unit, columns)
        begun = _UnitUnderWay(unit, data, np.zeros((len(data.doc_ids), SUMS)))
        for batch, asked in unit_forwards(plan, unit, settings.form, settings.batch_tokens):
            queue.append(forward(begun, batch, asked, settings.form))
            begun.waiting += 1
            on_tokens(batch.tokens)
            if stream is None or len(queue) > 1:
                yield from finished(store_first())
        begun.all_started = True
        yield from finished(begun)
    while queue:
        yield from finished(store_first())


def unit_forwards(
    plan: Plan, unit: int, form: str, batch_tokens: int
) -> Iterator[tuple[ForwardBatch, np.ndarray]]:
    """Yield the forwards of a unit, whose documents count from 0, in the order of capture.

    With each comes the next token of each of its N real tokens where it is supervised, else -1,
    int64 [N].
    """
    first, last = plan.units[unit]
    offsets = plan.documents.offsets[first : last + 1] - plan.documents.offsets[first]
    source = plan.unit_tokens(unit)
    ids = source["input_ids"]
    following = supervised_next(ids, predicts_supervised(source["loss_mask"], offsets))
    images = plan.documents.images_of(range(first, last))
    given = (form, plan.pack_length, batch_tokens, images)
    for batch in forward_batches(offsets, ids, *given):
        yield batch, following[batch.token_index(offsets)]


def unit_batches(
    lengths: list[int],
    form: str,
    pack_length: int,
    batch_tokens: int,
    pictured: Collection[int] = (),
) -> list[list[list[int]]]:
    """Return the forwards of one unit: a list of batches, each a list of rows.

    A row is a list of document indices in the unit: a pack, filled by best fit. In the form "rows"
    it is one document; documents are sorted by length, so that there is little padding. In the form
    "single", and for a document that is longer than a pack or `pictured` (it has images), a batch
    is one document, which needs neither padding nor a mask. In the form "requests" a row is one
    document, and the rows of a batch have `batch_tokens` tokens together.
    """
    if form == SINGLE:
        return [[[d]] for d in range(len(lengths))]
    if form == REQUESTS:
        return [[[d] for d in range(a, b)] for a, b in cut_units(lengths, batch_tokens)]
    apart = {d for d, length in enumerate(lengths) if length > pack_length} | set(pictured)
    short = [d for d in range(len(lengths)) if d not in apart]
    alone = [[[d]] for d in sorted(apart)]
    if form == ROWS:
        batches: list[list[list[int]]] = []
        for d in sorted(short, key=lambda d: (-lengths[d], d)):
            widest = lengths[batches[-1][0][0]] if batches else 0
            if batches and widest * (len(batches[-1]) + 1) <= batch_tokens:
                batches[-1].append([d])
            else:
                batches.append([[d]])
        return batches + alone
    packs = [
        [short[i] for i in pack]
        for pack in pack_documents([lengths[d] for d in short], pack_length)
    ]
    step = max(1, batch_tokens // pack_length)
    return [packs[i : i + step] for i in range(0, len(packs), step)] + alone


def forward_batches(
    offsets: np.ndarray,
    ids: np.ndarray,
    form: str,
    pack_length: int,
    batch_tokens: int,
    images: Mapping[int, Callable[[], tuple[bytes, ...]]] = MappingProxyType({}),
) -> Iterator[ForwardBatch]:
    """Yield the forwards of D documents, as `unit_batches` has them; T is their longest row.

    Document d has the tokens `ids[offsets[d] : offsets[d + 1]]`: integers [N], int64 [D + 1].
    `images` reads those of the documents that have some.
    """

    def tokens(d: int) -> Tensor:
        return torch.from_numpy(ids[offsets[d] : offsets[d + 1]].astype(np.int64))

    lengths = np.diff(offsets).tolist()
    for rows in unit_batches(lengths, form, pack_length, batch_tokens, images):
        batch = ForwardBatch.of(rows, tokens)
        if (first := batch.documents[0]) in images:
            batch.images = images[first]()
        yield batch


@torch.inference_mode()
def forward_columns(
    target: TargetBackend,
    batch: ForwardBatch,
    form: str,
    columns: tuple[Column, ...],
    following: np.ndarray,
    temperature: float = 1.0,
) -> tuple[dict[str, Tensor], Tensor]:
    """Run one forward and return every column but the loss mask, at the tokens that it stores.

    `following` is the next token of each of the N real tokens where it is supervised, else -1,
    int64 [N]; sparse columns store the m tokens that have one.

    Returns:
        Tensors on the device of the target, in the order of `batch.documents`, with n = N rows, or
        n = m in a sparse column: `input_ids` and `target_argmax` int64 [n], `target_logsumexp`
        float32 [n], `hidden.*` [n, H], `topk_ids` int64 [n, K] and `topk_logits` float32 [n, K],
        `logits` [n, V]. States and logits have the dtype of the target. And the figures of the m
        tokens, float32 [m, 4], see `token_figures`.

    Raises:
        RunError, TargetError: the target does not produce the states.
    """
    names = {c.name: c for c in columns}
    states = target.capture(batch, form, full_logits="logits" in names)
    values = {layer_column(k): states.layers[k] for k in target.layers}  # [N, H] each
    values["input_ids"] = sent(batch.input_ids[batch.document_ids >= 0], target.device)  # [N]
    asked = np.flatnonzero(following >= 0)  # [m], known without waiting for the device
    some = sent(torch.from_numpy(asked), target.device)
    final, logits = states.final, states.logits
    if FINAL in names:
        values[FINAL] = final[some] if names[FINAL].sparse else final
    if not any(c.name in TEACHERS and not c.sparse for c in columns):
        final, following = final[some], following[asked]
        logits = logits[some] if logits is not None else None
    derived, figures = logit_columns(target, final, logits, names, following, temperature)
    return values | derived, figures


def add_figures(
    measured: np.ndarray, following: np.ndarray, batch: ForwardBatch, figures: np.ndarray
) -> None:
    """Add the figures of a batch, float32 [m, 4], to those of its documents.

    `following` is int64 [N], -1 where the next token is not supervised. The sums of a document are
    float64 and in token order, so they do not depend on the other documents of the batch.
    """
    values = measured.astype(np.float64)  # [m, 4]
    bounds = np.concatenate([[0], np.cumsum(following >= 0)])  # [N + 1]
    start = 0
    for d, length in zip(batch.documents, batch.lengths, strict=True):
        figures[d] = document_sums(values[bounds[start] : bounds[start + length]])
        start += length


def _finished(begun: _UnitUnderWay, plan: Plan, columns: tuple[Column, ...]) -> CapturedUnit:
    """Return the unit without its broken documents."""
    unit, data, figures, broken = begun.unit, begun.data, begun.figures, begun.broken
    if not np.array_equal(data.tokens["input_ids"], plan.unit_tokens(unit)["input_ids"]):
        raise RunError(f"unit {unit}: stored token ids are not those of the plan; this is a bug")
    if not broken:
        return CapturedUnit(data, figures)
    count = len(data.doc_ids)
    reasons = dict(sorted(Counter(broken.values()).items()))
    if len(broken) == count or len(broken) > max(1, count // 100):
        first = min(broken)
        raise RunError(
            f"unit {unit}: {len(broken)} of {count} documents have unusable states ({reasons}; "
            f"first: document {data.doc_ids[first]}). With so many, the states are broken, and "
            "not the corpus. If the target runs here, try --dtype float32 or --attn eager; if "
            "another tool stored them, write them again"
        )
    sound = [d for d in range(count) if d not in broken]
    return CapturedUnit(data.select(sound, columns), figures[sound], reasons, sorted(broken))
