"""Prove, before the first shard, that packing changes no captured state and that the head is known.

Isolation: the proof documents are captured packed, in each candidate mask form, and alone. Every
captured column must agree per document, and in its first tokens, up to the rounding noise. A leak
or a lost sliding window changes states by tens of per cent; noise is 0.1 % to a few per cent,
depending on the dtype. If the difference is above the usual noise of the dtype, the noise of this
target is measured: the difference between two batch shapes of the plain forward. Families that
agree in no packed form (recurrent layers, missing kernels) are captured one document per row.

Head: the head described as data must return the model's own logits.

Shapes: T_d tokens of document d, C captured columns, H hidden size.
"""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from spec_data.capture.backend import ForwardBatch
from spec_data.capture.hooks import States
from spec_data.capture.mask_forms import (
    KERNELS,
    REQUESTS,
    ROWS,
    SINGLE,
    WITHOUT_MASK,
    mask_forms,
    view_of,
)
from spec_data.models.reading import text_config
from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.packing import pack_documents
from spec_data.shards.schema import PackingRecord
from spec_data.terminal.parts import part

logger = logging.getLogger(__name__)

# Largest plausible rounding difference of the states of one document, relative, by dtype.
FLOOR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_NOISE_FACTOR = 4.0
# Tokens of a document that are enough for a target without windows and rotary switches.
_PROOF_TOKENS = 2048
_BEYOND_SWITCH = 64
_ROWS_OF_A_FORWARD = 4
_FIRST = 8  # tokens of a document that are compared on their own
# The proof of chunks: its shortest and longest document, the tokens beyond the view of a window,
# and the last tokens, which are compared on their own.
_CHUNK_TOKENS, _MOST_CHUNK_TOKENS, _BEYOND_VIEW, _LAST = 1024, 8192, 512, 256
# The tokens that the head is proven on, and its largest error relative to the largest logit of a
# token: two roundings of the head's output.
_HEAD_TOKENS = 512
_HEAD_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# What the code of a family raises if it is given a mask that it does not know.
_NOT_ACCEPTED = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)


def proof_text(proof: PackingRecord) -> str:
    """Return a proof in words: the form, what it differs by, and the forms that failed."""
    worst, shared = proof.differences[proof.form], "forward" if proof.form == REQUESTS else "row"
    text = f"{proof.form} (several documents per {shared})"
    text = "one document per row" if proof.form in (ROWS, SINGLE) else text
    text += f"; states differ from documents run alone by at most {float(worst):.1e} "
    text += f"(allowed {proof.tolerance:.1e})"
    failed = {name: v for name, v in proof.differences.items() if name != proof.form}
    return text + (f"; failed the proof: {_listed(failed)}" if failed else "")


def _listed(differences: dict[str, float | str]) -> str:
    return ", ".join(
        f"{name}: {v if isinstance(v, str) else f'{v:.1e}'}" for name, v in differences.items()
    )


def proof_length(config: Any, pack_length: int) -> int:
    """Return how many tokens of a document the proof of isolation reads.

    A longer document than a pack never shares a row. Of the others, the proof must see twice a
    sliding window (a lost one then changes half of the tokens) and the length from which a rotary
    embedding switches its factors for the whole batch.
    """
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    switch, window = rope.get("original_max_position_embeddings") or 0, view_of(config) or 0
    beyond_window = 2 * window if window < pack_length else 0
    beyond_switch = switch + _BEYOND_SWITCH if switch < pack_length else 0
    return min(pack_length, max(_PROOF_TOKENS, beyond_window, beyond_switch))


def proof_documents(
    lengths: Sequence[int], pack_length: int, budget: int = 2048, limit: int | None = None
) -> list[int]:
    """Return the indices of the documents to prove with, ascending; at most 64.

    They are the longest one (it tests sliding windows), the eight shortest ones (they share a pack
    if any two documents can), and the first ones within a budget of max(budget, pack_length)
    tokens. With a `limit`, see `proof_length`, that many tokens of a document count.
    """
    if limit is not None:
        lengths, pack_length = [min(n, limit) for n in lengths], min(pack_length, 2 * limit)
    order = sorted(range(len(lengths)), key=lambda d: (lengths[d], d))
    chosen = {order[-1], *order[:8]}
    total = sum(lengths[d] for d in chosen)
    for index in range(len(lengths)):
        if len(chosen) >= 64:
            break
        if index not in chosen and total + lengths[index] <= max(budget, pack_length):
            chosen.add(index)
            total += lengths[index]
    return sorted(chosen)


_NOT_FINITE = (
    "the states of all documents that were tried are not finite: are the target's weights whole? "
    "Try --dtype float32 or bfloat16, or --attn eager"
)


def prove_isolation(
    target: Any, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
) -> PackingRecord:
    """Choose a mask form whose packed capture equals the capture of each document alone: the first
    one, or of several on a GPU the fastest.

    Args:
        target: a `model.Target`.
        documents: token ids, int64 [T_d] each; `proof_length` tokens of each are read.
        pack_length: tokens that a pack holds.
        packing: "auto" tries every form, "rows" only the unpacked ones; any other value is the name
            of a form, which is either proven or refused.

    Raises:
        TargetError: the named form does not isolate documents.
        RunError: no form agrees with documents alone, not even one document per row; or no
            document has finite states.
    """
    limit = proof_length(target.config, pack_length)
    documents = [ids[:limit] for ids in documents]
    pack_length = min(pack_length, 2 * limit)  # a narrow pack proves the same mask
    alone = _captured(target, documents, [[d] for d in range(len(documents))], SINGLE, 1)
    sound = [d for d, states in enumerate(alone) if states.isfinite().all()]
    if not sound:
        raise RunError(_NOT_FINITE)
    documents, alone = [documents[d] for d in sound], [alone[d] for d in sound]
    packs = pack_documents([len(ids) for ids in documents], pack_length)
    every = range(len(documents))
    floor = FLOOR.get(target.dtype, 3e-2)

    @cache  # measured at most once, and only if it is needed
    def noise() -> float:
        by_length = sorted(every, key=lambda d: (-len(documents[d]), d))
        return _largest(alone, _captured(target, documents, [[d] for d in by_length], ROWS))

    def difference(form: str) -> float | str:
        if form == SINGLE:
            return 0.0
        try:
            packed = None if form == ROWS else _captured(target, documents, packs, form)
            value = noise() if packed is None else _largest(alone, packed)
            return value if isfinite(value) else "not finite"
        except (TargetError, RunError):
            raise
        except Exception as error:
            if form in KERNELS:  # compiler, driver and kernel may raise anything
                reason = (str(error).splitlines() or [""])[0][:200]
                return f"no kernel here ({type(error).__name__}: {reason})"
            if not isinstance(error, _NOT_ACCEPTED):
                raise
            return f"the family does not accept it ({type(error).__name__})"

    candidates = mask_forms(target.config, target.attn, target.device.type)
    # Where no two documents share a pack, a packed form would prove nothing.
    if packing == "rows" or (packing == "auto" and all(len(pack) == 1 for pack in packs)):
        candidates = [ROWS, SINGLE]
    elif packing != "auto":
        candidates = [packing]
    differences: dict[str, float | str] = {}
    proven: dict[str, float] = {}  # tolerances
    for form in candidates:
        if proven and form in (ROWS, SINGLE):
            break
        value = differences[form] = difference(form)
        if isinstance(value, str):
            continue
        tolerance = floor
        if value > floor:
            tolerance = max(_NOISE_FACTOR * min(noise(), floor), floor)
        if value <= tolerance:
            proven[form] = tolerance
            if target.device.type == "cpu" or form not in WITHOUT_MASK:
                break
    if proven:
        form = _fastest(list(proven), lambda form: _captured(target, documents, packs, form))
        return PackingRecord(
            form=form,
            tolerance=proven[form],
            noise=noise() if noise.cache_info().currsize else None,
            differences={n: v for n, v in differences.items() if n == form or n not in proven},
            documents=len(documents),
            longest=max(map(len, documents)),
        )
    if candidates == [packing]:
        raise TargetError(
            f"--packing {packing} does not isolate documents ({_listed(differences)}); use auto"
        )
    raise RunError(
        f"no mask form isolates documents of this target ({_listed(differences)}, allowed "
        f"{floor:.1e}); try --dtype float32 or --attn eager"
    )


def _fastest(forms: list[str], run: Callable[[str], object]) -> str:
    """Return the form whose forwards take the least time; each has run before."""
    if len(forms) == 1:
        return forms[0]

    def once(form: str) -> float:
        start = perf_counter()
        run(form)  # its states are on the host in the end
        return perf_counter() - start

    seconds = {form: min(once(form) for _ in range(3)) for form in forms}
    logger.info(
        "packing: %s", ", ".join(f"{form} {1e3 * value:,.0f} ms" for form, value in seconds.items())
    )
    return min(seconds, key=lambda form: seconds[form])


def _captured(
    target: Any,
    documents: Sequence[Tensor],
    rows: Sequence[Sequence[int]],
    form: str,
    together: int = _ROWS_OF_A_FORWARD,
) -> list[Tensor]:
    """Capture documents, int64 [T_d] each, in rows of their indices, some rows together.

    Return all columns, float32 [T_d, C, H] per document on the CPU.
    """
    states: dict[int, Tensor] = {}
    for first in range(0, len(rows), together):
        part(f"packing ({form})", first, len(rows))
        batch = ForwardBatch.of(rows[first : first + together], documents.__getitem__)
        parts = columns_of(target.capture(batch, form)).split(batch.lengths)
        states.update(zip(batch.documents, parts, strict=True))
    return [states[d] for d in range(len(documents))]


def columns_of(states: States) -> Tensor:
    """Return all columns of a capture, float32 [..., C, H] on the CPU, layers ascending."""
    columns = [*(states.layers[k] for k in sorted(states.layers)), states.final]
    return torch.stack([column.float().cpu() for column in columns], dim=-2)


def largest_difference(reference: Tensor, other: Tensor) -> float:
    """Return the largest relative difference of a document's columns, float32 [T_d, C, H].

    That of a column is the mean over its tokens, which tolerates a single one for which rounding
    selects another expert; a leak or a lost window changes many. Infinite where anything is not
    finite.
    """
    relative = (reference - other).norm(dim=-1) / reference.norm(dim=-1).clamp_min(1e-30)
    value = float(relative.mean(dim=0).max())
    return value if value == value else float("inf")


def token_errors(actual: Tensor, expected: Tensor, unit: Tensor | None = None) -> Tensor:
    """Return the difference of each token's states [T, H], relative to `unit` or the expected ones.

    A token counts 2 at most, so that a massive activation does not decide.
    """
    unit = (expected if unit is None else unit).float()
    difference = (actual.float() - expected.float()).norm(dim=-1)
    return (difference / unit.norm(dim=-1).clamp_min(1e-30)).nan_to_num(2.0).clamp(max=2.0)


def _largest(reference: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference of a document, and of its first tokens on their own: what a
    convolution takes from the document before changes few others.
    """
    pairs = list(zip(reference, other, strict=True))
    return max(largest_difference(a[:n], b[:n]) for n in (None, _FIRST) for a, b in pairs)


def why_no_chunks(
    run: Callable[[Tensor, bool], States], ids: Tensor, config: Any, dtype: torch.dtype
) -> str | None:
    """Compare a forward that attends in chunks with a plain one; return why they cannot be used.

    `run` captures int64 [1, n], in chunks if its second argument is True. The first tokens of the
    document `ids`, int64 [1, T], are compared, beyond a sliding window. `dtype` decides how far
    rounding may go.
    """
    view = view_of(config) or 0
    beyond = view + _BEYOND_VIEW if view < ids.shape[1] else 0
    ids = ids[:, : min(max(_CHUNK_TOKENS, beyond), _MOST_CHUNK_TOKENS)]
    try:
        plain, chunked = (columns_of(run(ids, chunks))[0] for chunks in (False, True))  # [n, C, H]
    except (TargetError, *_NOT_ACCEPTED) as error:
        return f"the family does not accept it ({type(error).__name__})"
    parts = slice(None), slice(-_LAST, None)
    worst = max(largest_difference(plain[part], chunked[part]) for part in parts)
    allowed = FLOOR.get(dtype, 3e-2)
    return None if worst <= allowed else f"states differ by {worst:.1e}, allowed {allowed:.0e}"


def prove_head(
    error_of: Callable[[Tensor], float],
    documents: Sequence[Tensor],
    dtype: torch.dtype,
    whose: str = "the model's",
) -> float:
    """Return the largest error of the head as data on the first tokens of documents, int64 [T_d].

    `error_of` returns that of one, see `head_error`; `whose` says whose logits it is compared with.

    Raises:
        TargetError: they differ by more than rounding. The head then does something that its
            description cannot express, and final-hidden and top-k supervision would be wrong.
        RunError: no document has finite logits.
    """
    worst, left = None, _HEAD_TOKENS
    for number, ids in enumerate(documents):
        part("head", number, len(documents))
        # A document that is not finite is left out of the capture, and says nothing here.
        if left > 0 and isfinite(error := error_of(ids[:left])):
            worst = max(worst or 0.0, error)
            left -= len(ids)
    if worst is None:
        raise RunError(_NOT_FINITE)
    allowed = _HEAD_TOLERANCE.get(dtype, 2e-2)
    if not worst <= allowed:
        raise TargetError(
            f"head(final hidden) is not {whose} logits (relative error {worst:.1e}, allowed "
            f"{allowed:.0e}): the head does more than scale, bias and soft-cap. Use --supervision "
            "logits: it stores the target's own logits (2 bytes x vocabulary size per token), and "
            "`spec-train fit` learns from them"
        )
    return worst


def head_error(derived: Tensor, logits: Tensor | None) -> float:
    """Return the largest error of derived logits [..., V], relative to the largest |logit| of a
    token of the model's own.
    """
    if logits is None:
        raise TargetError("the target returned no logits; it is not a causal language model")
    derived, logits = derived.float(), logits.float()
    return float(((derived - logits).abs().amax(-1) / logits.abs().amax(-1)).max())
