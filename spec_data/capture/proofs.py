"""Prove, before the first shard, that packing changes no captured state and that the head is known.

Isolation: the proof documents are captured packed, in each candidate mask form, and alone. Every
captured column must agree per document up to the rounding noise. A leak or a lost sliding window
changes states by tens of per cent; noise is 0.1 % to a few per cent, depending on the dtype. If
the difference is above the usual noise of the dtype, the noise of this target is measured: the
difference between two batch shapes of the plain forward. Families that agree in no packed form
(recurrent layers, missing kernels) are captured one document per row.

Cost: about 2,048 tokens alone, and the same in packs; twice more only where noise is measured.

Head: the head described as data must return the model's own logits.

Shapes: T_d tokens of document d, B rows, T slots of a row, C captured columns, H hidden size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_data.capture.hooks import Captured
from spec_data.capture.mask_forms import REQUESTS, ROWS, SINGLE, mask_forms, view_of
from spec_data.models.reading import text_config
from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.packing import pack_documents, row_layout

# Largest plausible rounding difference of the states of one document, relative, by dtype.
FLOOR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_NOISE_FACTOR = 4.0
# Tokens of a document that are enough for a target without windows and rotary switches.
_PROOF_TOKENS = 2048
_BEYOND_SWITCH = 64
# The proof of chunks: its shortest and longest document, the tokens beyond the view of a window,
# and the last tokens, which are compared on their own.
_CHUNK_TOKENS, _MOST_CHUNK_TOKENS, _BEYOND_VIEW, _LAST = 1024, 8192, 512, 256
# Largest error of the head as data, relative to the largest logit of a token: two roundings of the
# head's output.
HEAD_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


# What the code of a family raises if it is given a mask that it does not know.
_NOT_ACCEPTED = (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError)


class Capturer(Protocol):
    """The part of a target that the proofs need; `spec_data.capture.model.Target` has it."""

    model: Any
    config: Any
    attn: str
    device: torch.device
    dtype: torch.dtype
    layers: tuple[int, ...]

    def capture(
        self,
        input_ids: Tensor,
        document_ids: Tensor,
        position_ids: Tensor,
        form: str | None,
        *,
        full_logits: bool = False,
    ) -> tuple[Captured, Tensor | None]:
        """Run one forward; return the captured states [B, T, H] and the model's own logits
        [B, T, V] (None unless `full_logits`). All inputs are int64 [B, T].
        """

    def logits_of(self, final: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., H] through the head as data."""


@dataclass(frozen=True, kw_only=True)
class IsolationProof:
    """The chosen mask form, and the measurements that it was chosen by.

    Attributes:
        form: the chosen form.
        tolerance: largest allowed relative difference.
        noise: measured relative difference between two batch shapes of the plain forward; None: the
            usual noise of the dtype was enough.
        differences: per candidate, the largest relative difference of a document, or the reason
            why the form could not run.
        documents: number of proof documents; longest: tokens of the longest one.
    """

    form: str
    tolerance: float
    noise: float | None
    differences: dict[str, float | str] = field(default_factory=dict)
    documents: int = 0
    longest: int = 0

    def __str__(self) -> str:
        """The outcome in words: the form, what it differs by, and the forms that failed."""
        found = self.differences[self.form]
        packed = self.form not in (ROWS, SINGLE)
        shared = "forward" if self.form == REQUESTS else "row"
        text = f"{self.form} (several documents per {shared})" if packed else "one document per row"
        if not isinstance(found, str):
            text += (
                f"; states differ from documents run alone by at most {found:.1e} "
                f"(allowed {self.tolerance:.1e})"
            )
        failed = {name: v for name, v in self.differences.items() if name != self.form}
        words = [f"{n}: {v if isinstance(v, str) else f'{v:.1e}'}" for n, v in failed.items()]
        return text + (f"; failed the proof: {', '.join(words)}" if words else "")


def proof_length(config: Any, pack_length: int) -> int:
    """Return how many tokens of a document the proof of isolation reads.

    A longer document than a pack never shares a row. Of the others, the proof must see twice a
    sliding window (a lost one then changes half of the tokens) and the length from which a rotary
    embedding switches its factors for the whole batch.
    """
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    switch, window = rope.get("original_max_position_embeddings") or 0, view_of(config) or 0
    needed = [_PROOF_TOKENS]
    if window < pack_length:
        needed.append(2 * window)
    if switch < pack_length:
        needed.append(switch + _BEYOND_SWITCH)
    return min(pack_length, max(needed))


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


def prove_isolation(
    target: Capturer, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
) -> IsolationProof:
    """Choose the first mask form whose packed capture equals the capture of each document alone.

    Args:
        target: the model under hooks.
        documents: token ids, int64 [T_d] each; `proof_length` tokens of each are read.
        pack_length: tokens that a pack holds.
        packing: "auto" tries every form, "rows" only the unpacked ones; any other value is the name
            of a form, which is either proven or refused.

    Raises:
        TargetError: the named form does not isolate documents.
        RunError: no form agrees with documents alone, not even one document per row.
    """
    limit = proof_length(target.config, pack_length)
    documents = [ids[:limit] for ids in documents]
    pack_length = min(pack_length, 2 * limit)  # a narrow pack proves the same mask
    alone = [_unpacked(target, [ids])[0] for ids in documents]
    floor = FLOOR.get(target.dtype, 3e-2)
    measured: list[float] = []

    def noise() -> float:  # measured at most once, and only if it is needed
        if not measured:
            measured.append(_largest(alone, _in_padded_rows(target, documents)))
        return measured[0]

    candidates = mask_forms(target.config, target.attn, target.device.type)
    if packing == "auto" and not _shares_packs(documents, pack_length):
        packing = "rows"  # no two documents share a pack, so a packed form would prove nothing
    if packing == "rows":
        candidates = [ROWS, SINGLE]
    elif packing != "auto":
        candidates = [packing]
    differences: dict[str, float | str] = {}
    for form in candidates:
        difference = _difference(target, documents, alone, form, pack_length, noise)
        differences[form], tolerance = difference, floor
        if isinstance(difference, str):
            continue
        if not difference <= floor:
            tolerance = max(_NOISE_FACTOR * min(noise(), floor), floor)
        if difference <= tolerance:
            return IsolationProof(
                form=form,
                tolerance=tolerance,
                noise=measured[0] if measured else None,
                differences=differences,
                documents=len(documents),
                longest=max(map(len, documents)),
            )
    found = ", ".join(f"{k}: {v}" for k, v in differences.items())
    if packing not in ("auto", "rows"):
        raise TargetError(f"--packing {packing} does not isolate documents ({found}); use auto")
    raise RunError(
        f"no mask form isolates documents of this target ({found}, allowed {floor:.1e}); try "
        "--dtype float32 or --attn eager"
    )


def _shares_packs(documents: Sequence[Tensor], pack_length: int) -> bool:
    """Return whether any pack holds more than one document."""
    packs = pack_documents([len(ids) for ids in documents], pack_length)
    return any(len(pack) > 1 for pack in packs)


def _difference(
    target: Capturer,
    documents: Sequence[Tensor],
    alone: list[Tensor],
    form: str,
    pack_length: int,
    noise: Callable[[], float],
) -> float | str:
    """Return the largest relative difference of a document in this form, or why it cannot run.

    `alone` holds the states of each document alone, float32 [T_d, C, H].
    """
    if form == SINGLE:
        return 0.0
    if form == ROWS:
        return noise()
    try:
        return _largest(alone, _packed(target, documents, form, pack_length))
    except (TargetError, RunError):
        raise
    except _NOT_ACCEPTED as error:
        return f"the family does not accept it ({type(error).__name__})"


def _unpacked(target: Capturer, documents: Sequence[Tensor]) -> list[Tensor]:
    """Capture documents (int64 [T_d]) in right-padded rows; return float32 [T_d, C, H] each."""
    lengths = [[len(ids)] for ids in documents]
    width = max(len(ids) for ids in documents)
    input_ids = torch.zeros(len(documents), width, dtype=torch.long)  # [B, T]
    for b, ids in enumerate(documents):
        input_ids[b, : len(ids)] = ids
    stacked = _stacked(target, input_ids, *row_layout(lengths, width), None)
    return [stacked[b, : len(ids)] for b, ids in enumerate(documents)]


def _in_padded_rows(target: Capturer, documents: Sequence[Tensor]) -> list[Tensor]:
    """Capture documents in another batch shape: four of similar length share a padded batch.

    Return float32 [T_d, C, H] per document.
    """
    order = sorted(range(len(documents)), key=lambda d: (-len(documents[d]), d))
    states: dict[int, Tensor] = {}
    for first in range(0, len(order), 4):
        group = order[first : first + 4]
        states.update(zip(group, _unpacked(target, [documents[d] for d in group]), strict=True))
    return [states[d] for d in range(len(documents))]


def _packed(
    target: Capturer, documents: Sequence[Tensor], form: str, pack_length: int
) -> list[Tensor]:
    """Capture documents in packs with this mask form, four packs to a forward.

    Return float32 [T_d, C, H] per document.
    """
    states: dict[int, Tensor] = {}
    packs = pack_documents([len(ids) for ids in documents], pack_length)
    for first in range(0, len(packs), 4):
        group = packs[first : first + 4]
        lengths = [[len(documents[d]) for d in pack] for pack in group]
        width = max(map(sum, lengths))
        input_ids = torch.zeros(len(group), width, dtype=torch.long)  # [B, T]
        for b, pack in enumerate(group):
            tokens = torch.cat([documents[d] for d in pack])
            input_ids[b, : len(tokens)] = tokens
        stacked = _stacked(target, input_ids, *row_layout(lengths, width), form)
        for b, pack in enumerate(group):
            # One part [T_d, C, H] per document of the pack, then the padding, which zip drops.
            parts = stacked[b].split([*lengths[b], width - sum(lengths[b])])
            states.update(zip(pack, parts, strict=False))
    return [states[d] for d in range(len(documents))]


def _stacked(
    target: Capturer, input_ids: Tensor, document_ids: Tensor, positions: Tensor, form: str | None
) -> Tensor:
    """Run a forward of int64 [B, T] inputs; return all columns, float32 [B, T, C, H] on the CPU."""
    captured, _ = target.capture(input_ids, document_ids, positions, form)
    return _columns(captured)


def _largest(reference: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest relative difference over documents and columns, each float32 [T_d, C, H].

    The difference of a document is the mean over its tokens. The mean tolerates a single token for
    which rounding selects another expert; a leak changes every token after the first document, and
    a lost window every token beyond the window.
    """
    worst = 0.0
    for a, b in zip(reference, other, strict=True):
        relative = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30)  # [T_d, C]
        value = float(relative.mean(dim=0).max())
        worst = max(worst, value if value == value else float("inf"))  # NaN never passes
    return worst


def why_no_chunks(
    run: Callable[[Tensor, bool], Captured], ids: Tensor, config: Any, dtype: torch.dtype
) -> str | None:
    """Compare a forward that attends in chunks with a plain one; return why they cannot be used.

    Args:
        run: captures int64 [1, n], in chunks if the second argument is True.
        ids: a document, int64 [1, T]; its first tokens are compared, beyond a sliding window.
        config: of the model.
        dtype: of the model; it decides how far rounding may go.

    Returns:
        None: the states agree.
    """
    view = view_of(config) or 0
    beyond = view + _BEYOND_VIEW if view < ids.shape[1] else 0
    ids = ids[:, : min(max(_CHUNK_TOKENS, beyond), _MOST_CHUNK_TOKENS)]
    try:
        plain, chunked = (_columns(run(ids, chunks)) for chunks in (False, True))  # [1, n, C, H]
    except (TargetError, *_NOT_ACCEPTED) as error:
        return f"the family does not accept it ({type(error).__name__})"
    worst = max(
        _largest([plain[0, part]], [chunked[0, part]])
        for part in (slice(None), slice(-_LAST, None))
    )
    allowed = FLOOR.get(dtype, 3e-2)
    return None if worst <= allowed else f"states differ by {worst:.1e}, allowed {allowed:.0e}"


def _columns(captured: Captured) -> Tensor:
    """Return all columns of a capture, float32 [B, T, C, H] on the CPU, layers ascending."""
    columns = [captured.layers[k] for k in sorted(captured.layers)]
    if captured.final is not None:
        columns.append(captured.final)
    return torch.stack([c.float().cpu() for c in columns], dim=2)


def prove_head(target: Capturer, documents: Sequence[Tensor], tokens: int = 512) -> float:
    """Compare `head(final hidden)` with the model's logits on the first `tokens` tokens.

    `documents` are int64 [T_d]. Return the largest error, relative to the largest |logit| of its
    token.

    Raises:
        TargetError: they differ by more than rounding. The head then does something that its
            description cannot express, and final-hidden and top-k supervision would be wrong.
    """
    worst, seen = 0.0, 0
    for ids in documents:
        ids = ids[: tokens - seen][None]  # [1, T]
        layout = torch.zeros_like(ids), torch.arange(ids.shape[1])[None]  # [1, T] each
        captured, logits = target.capture(ids, *layout, None, full_logits=True)
        if logits is None or captured.final is None:
            raise TargetError("the target returned no logits; it is not a causal language model")
        derived = target.logits_of(captured.final).float()  # [1, T, V]
        error = (derived - logits.float()).abs().amax(-1) / logits.float().abs().amax(-1)  # [1, T]
        worst = max(worst, float(error.max()))
        seen += ids.shape[1]
        if seen >= tokens:
            break
    allowed = HEAD_TOLERANCE.get(target.dtype, 2e-2)
    if not worst <= allowed:
        raise TargetError(
            f"head(final hidden) is not the model's logits (relative error {worst:.1e}, allowed "
            f"{allowed:.0e}): the head of {type(target.model).__name__} does more than scale, "
            "bias and soft-cap. Use --supervision logits: it stores the model's own logits (2 "
            "bytes x vocabulary size per token), and `spec-train fit` learns from them"
        )
    return worst
