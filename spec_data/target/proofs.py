"""Proofs that run before the first shard: packing changes no captured state, and the head is known.

Isolation: for each candidate mask form the proof documents are captured packed and alone. Every
captured column must agree, per document, up to the noise of the arithmetic, which is measured as
the difference between two batch shapes of the plain forward. A leak or a lost sliding window
changes states by tens of per cent; noise is a thousandth to a few per cent, depending on the dtype.
Families that agree in no packed form (recurrent layers, missing kernels) are captured one document
per row.

Head: the head described as data must return the model's own logits.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_data.shards.errors import RunError, TargetError
from spec_data.shards.packing import pack_documents, row_layout
from spec_data.target.hooks import Captured
from spec_data.target.mask_forms import ROWS, SINGLE, mask_forms

# Largest believable rounding difference of one document's states, relative, by dtype.
_FLOOR = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
_NOISE_FACTOR = 4.0
# Largest error of the head as data, relative to the largest logit of a token: two roundings of the
# head's output.
_HEAD_TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


class Capturer(Protocol):
    """What the proofs need of a target; `spec_data.target.model.Target` is one."""

    model: Any
    config: Any
    attn: str
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
        """Run one forward: captured states, and the model's own logits where asked for."""

    def logits_of(self, final: Tensor, ids: Tensor | None = None) -> Tensor:
        """Compute logits [..., V] of final hidden states [..., H] through the head as data."""


@dataclass(frozen=True, kw_only=True)
class IsolationProof:
    """Which form was chosen, and the largest relative difference of a document per candidate."""

    form: str
    tolerance: float
    noise: float
    differences: dict[str, float | str] = field(default_factory=dict)
    documents: int = 0
    longest: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values for the manifest."""
        return asdict(self)


def proof_documents(lengths: Sequence[int], pack_length: int, budget: int = 4096) -> list[int]:
    """Documents to prove with: the longest one (it tests sliding windows), the shortest ones (they
    share rows wherever any two documents can), and the first ones that still fit the budget.
    """
    order = sorted(range(len(lengths)), key=lambda d: (lengths[d], d))
    chosen = {order[-1], *order[:8]}
    total = sum(lengths[d] for d in chosen)
    for index in range(len(lengths)):
        if len(chosen) >= 64:
            break
        if index not in chosen and total + lengths[index] <= max(budget, 2 * pack_length):
            chosen.add(index)
            total += lengths[index]
    return sorted(chosen)


def prove_isolation(
    target: Capturer, documents: Sequence[Tensor], pack_length: int, packing: str = "auto"
) -> IsolationProof:
    """Choose the first mask form whose packed capture equals the capture of each document alone.

    `documents` are int64 token ids [T_d]. `packing` "auto" tries every form; "rows" skips the
    packed ones; another value must be a form's name and is proven or refused.

    Raises:
        TargetError: a named form that does not isolate documents.
        RunError: not even rows of one document agree with documents alone.
    """
    alone = [_capture_rows(target, [ids], None)[0] for ids in documents]
    noise = _largest(alone, _in_padded_rows(target, documents))
    floor = _FLOOR.get(target.dtype, 3e-2)
    tolerance = max(_NOISE_FACTOR * min(noise, floor), floor)
    candidates = mask_forms(target.config, target.attn)
    if packing == "auto" and not _shares_rows(documents, pack_length):
        packing = "rows"  # no two of the shortest fit a row: a packed form would prove nothing
    if packing == "rows":
        candidates = [ROWS, SINGLE]
    elif packing != "auto":
        candidates = [packing]
    differences: dict[str, float | str] = {}
    for form in candidates:
        difference = _difference(target, documents, alone, form, pack_length, noise)
        differences[form] = difference
        if not isinstance(difference, str) and difference <= tolerance:
            return IsolationProof(
                form=form,
                tolerance=tolerance,
                noise=noise,
                differences=differences,
                documents=len(documents),
                longest=max(map(len, documents)),
            )
    told = ", ".join(f"{k}: {v}" for k, v in differences.items())
    if packing not in ("auto", "rows"):
        raise TargetError(f"--packing {packing} does not isolate documents ({told}); use auto")
    raise RunError(f"no way to capture documents apart was found ({told}, allowed {tolerance:.1e})")


def _shares_rows(documents: Sequence[Tensor], pack_length: int) -> bool:
    rows = pack_documents([len(ids) for ids in documents], pack_length)
    return any(len(row) > 1 for row in rows)


def _difference(
    target: Capturer,
    documents: Sequence[Tensor],
    alone: list[Tensor],
    form: str,
    pack_length: int,
    noise: float,
) -> float | str:
    """Largest relative difference of a document in this form, or why it cannot run."""
    if form == SINGLE:
        return 0.0
    if form == ROWS:
        return noise
    try:
        return _largest(alone, _packed(target, documents, form, pack_length))
    except (TargetError, RunError):
        raise
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        return f"the family does not take it ({type(error).__name__})"


def _capture_rows(target: Capturer, rows: Sequence[Tensor], form: str | None) -> list[Tensor]:
    """States [T_d, columns*H] of documents, one per right-padded row."""
    lengths = [[len(ids)] for ids in rows]
    width = max(len(ids) for ids in rows)
    input_ids = torch.zeros(len(rows), width, dtype=torch.long)
    for b, ids in enumerate(rows):
        input_ids[b, : len(ids)] = ids
    stacked = _stacked(target, input_ids, *row_layout(lengths, width), form)
    return [stacked[b, : len(ids)] for b, ids in enumerate(rows)]


def _in_padded_rows(target: Capturer, documents: Sequence[Tensor]) -> list[Tensor]:
    """The plain forward in another batch shape: neighbours in length share a padded batch."""
    order = sorted(range(len(documents)), key=lambda d: (-len(documents[d]), d))
    states: dict[int, Tensor] = {}
    for first in range(0, len(order), 4):
        group = order[first : first + 4]
        for d, captured in zip(
            group, _capture_rows(target, [documents[d] for d in group], None), strict=True
        ):
            states[d] = captured
    return [states[d] for d in range(len(documents))]


def _packed(
    target: Capturer, documents: Sequence[Tensor], form: str, pack_length: int
) -> list[Tensor]:
    """States of documents captured in packs with this mask form, four rows to a forward."""
    states: dict[int, Tensor] = {}
    rows = pack_documents([len(ids) for ids in documents], pack_length)
    for first in range(0, len(rows), 4):
        group = rows[first : first + 4]
        lengths = [[len(documents[d]) for d in row] for row in group]
        width = max(map(sum, lengths))
        input_ids = torch.zeros(len(group), width, dtype=torch.long)
        for b, row in enumerate(group):
            tokens = torch.cat([documents[d] for d in row])
            input_ids[b, : len(tokens)] = tokens
        stacked = _stacked(target, input_ids, *row_layout(lengths, width), form)
        for b, row in enumerate(group):
            states.update(
                zip(row, stacked[b].split([*lengths[b], width - sum(lengths[b])]), strict=False)
            )
    return [states[d] for d in range(len(documents))]


def _stacked(
    target: Capturer, input_ids: Tensor, document_ids: Tensor, positions: Tensor, form: str | None
) -> Tensor:
    """All captured columns of a forward, float32 [B, T, C, H] on the CPU."""
    captured, _ = target.capture(input_ids, document_ids, positions, form)
    columns = [captured.layers[k] for k in target.layers]
    if captured.final is not None:
        columns.append(captured.final)
    return torch.stack([c.float().cpu() for c in columns], dim=2)


def _largest(reference: list[Tensor], other: list[Tensor]) -> float:
    """Largest relative difference over documents and columns: mean over the tokens of a document.

    The mean forgives the odd token whose expert flips under rounding; a leak moves every token
    after the first document, a lost window every token beyond it.
    """
    worst = 0.0
    for a, b in zip(reference, other, strict=True):
        relative = (a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-30)
        value = float(relative.mean(dim=0).max())
        worst = max(worst, value if value == value else float("inf"))
    return worst


def prove_head(target: Capturer, documents: Sequence[Tensor], tokens: int = 512) -> float:
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
    allowed = _HEAD_TOLERANCE.get(target.dtype, 2e-2)
    if not worst <= allowed:
        raise TargetError(
            f"head(final hidden) is not the model's logits (relative error {worst:.1e}, allowed "
            f"{allowed:.0e}): the head of {type(target.model).__name__} does more than scale, "
            "bias and soft-cap. Use --supervision logits: it stores the model's own (2 bytes x "
            "vocabulary per token), and `spec-train fit` learns from them"
        )
    return worst
