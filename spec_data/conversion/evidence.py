"""Are the stored states what the declared convention says? Measured, with every other convention.

Each stored chunk (a layer, or the last state) of a few documents is compared with every state that
the target itself computes for them: the embedding, the output of each block, the final state, at
the token itself and at its neighbours. The nearest one is what the chunk is. A declared convention
that is not the nearest is refused, together with the one that is.

The head is asked on more documents, without any block: how often its first choice is the next
supervised token, and the negative log-likelihood (NLL) of that token, under each convention.

Shapes: T tokens of a document, n stored layers, H hidden size, V vocabulary size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from spec_data.capture.proofs import FLOOR
from spec_data.capture.skeleton import embedded, load_skeleton, run_from
from spec_data.conversion.stored_samples import AFTER, BEFORE, Conventions, SampleStates
from spec_data.shards.errors import RunError
from spec_data.shards.layer_ids import EMBEDDING
from spec_data.terminal.progress import progress

# -- target walk -----------------------------------------------------------------------------------
# The states that the target itself computes for a few documents, one block at a time.
#
# The output of each block is the input of the next one, so the weights of the target are read from
# disk once, and it need not fit in memory. Everything is computed on the CPU.
#
# Shapes: T tokens of a document, H hidden size.


@dataclass(frozen=True, kw_only=True)
class OwnStates:
    """The states of a document: outputs of blocks [T, H] by layer id, and the final state [T, H].

    The final state is the one after the final norm, which enters the LM head.
    """

    layers: dict[int, Tensor]
    final: Tensor


def walk(
    path: Path, documents: Sequence[Tensor], blocks: int, *, dtype: str, trust: bool
) -> list[OwnStates]:
    """Compute the states of documents, int64 [T] each, one block after the other.

    Args:
        path: the model directory.
        documents: token ids.
        blocks: the number of decoder blocks.
        dtype: in which the target runs; "auto" is that of the checkpoint.
        trust: run code that comes with the model.

    Raises:
        MissingError, TargetError: the target cannot be loaded, or its blocks cannot be left out.
    """
    skeleton = load_skeleton(path, (), dtype=dtype, trust=trust)
    states = [{EMBEDDING: embedded(skeleton, ids)} for ids in documents]
    for k in progress(range(blocks), desc="run the target", unit="blocks", leave=False):
        model = load_skeleton(path, (k,), dtype=dtype, trust=trust)
        for ids, own in zip(documents, states, strict=True):
            own[k] = run_from(model, ids, k, own[k - 1], k)
    last = blocks - 1
    return [
        OwnStates(layers=own, final=run_from(skeleton, ids, last, own[last], None))
        for ids, own in zip(documents, states, strict=True)
    ]


# -- evidence --------------------------------------------------------------------------------------


FINAL_STATE = "final"
"""Name of the state after the final norm, beside the layer ids."""

SHIFTS = (0, -1, 1)
"""Row t of a chunk may be the state of token t + shift."""

# Relative differences. A dataset stores states in bf16: two that differ by less are the same there.
_SAME = torch.finfo(torch.bfloat16).eps / 2
# Two forwards in bf16, and the rounding to 8-bit floats with 3 bits behind the point.
_ROUNDING = FLOOR[torch.bfloat16] + torch.finfo(torch.float8_e4m3fn).eps / 2
_ALLOWED = 0.35  # an engine that runs quantised weights; a state of another target differs by 1
_MOST = 2.0  # what one token counts at most, so that a massive activation does not decide
_NATS, _SHARE = 0.5, 0.05  # by which a neighbour must be likelier to be named

Place = tuple[int | str, int]
"""A layer id or `FINAL_STATE`, and a shift."""

Pair = tuple[list[Tensor], list[Tensor]]
"""Stored states [T, H] of the documents, and computed ones that they may be."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """What a chunk is.

    Attributes:
        name: of the chunk, for messages.
        declared: what it is by the declared convention; error: its relative difference from that.
        nearest: what it is nearest to; smallest: the relative difference from that.
    """

    name: str
    declared: Place
    error: float
    nearest: Place
    smallest: float

    @property
    def fits(self) -> bool:
        """Whether the chunk is what the convention says."""
        return self.error <= _ALLOWED and self.declared == self.nearest

    @property
    def unknown(self) -> bool:
        """Whether the chunk is no state of this target at all."""
        return self.smallest > _ALLOWED


def fits_of(
    conventions: Conventions,
    stored: Sequence[SampleStates],
    normed: Sequence[Tensor],
    own: Sequence[OwnStates],
    blocks: int,
) -> list[Fit]:
    """Compare every chunk of some documents with every state of the target.

    The output of the last block is recognised by what the final norm makes of it, because its
    length does not matter.

    Args:
        conventions: the declared ones.
        stored: the stored states of the documents.
        normed: what the final norm makes of their last states, [T, H] each.
        own: what the target computes for them.
        blocks: the number of decoder blocks.
    """
    finals = [o.final for o in own]
    computed: dict[int | str, list[Tensor]] = {k: [o.layers[k] for o in own] for k in own[0].layers}
    computed[FINAL_STATE] = finals
    found = []
    for place, layer in enumerate(conventions.layers):
        chunks = [s.aux[:, place] for s in stored]
        pairs = {key: (chunks, states) for key, states in computed.items()}
        found.append(_fit(f"layer {place + 1}", (layer, 0), pairs))
    last = [s.last for s in stored]
    pairs = {key: (last, states) for key, states in computed.items()}
    pairs[blocks - 1] = (list(normed), finals)
    declared = FINAL_STATE if conventions.final_norm == AFTER else blocks - 1
    found.append(_fit("the last state", (declared, 0), pairs))
    return found


def _fit(name: str, declared: Place, pairs: dict[int | str, Pair]) -> Fit:
    """Return what a chunk is; `pairs` has what is compared for each state that it may be."""
    errors = {
        (key, shift): _difference(*pair, shift) for key, pair in pairs.items() for shift in SHIFTS
    }
    nearest = min(errors, key=lambda place: errors[place])
    noise = errors[declared] / 4
    if nearest[1] == declared[1] and _same(pairs[declared[0]], pairs[nearest[0]], noise):
        nearest = declared  # a norm of ones changes nothing that it has normed before
    return Fit(
        name=name,
        declared=declared,
        error=errors[declared],
        nearest=nearest,
        smallest=errors[nearest],
    )


def _same(one: Pair, other: Pair, noise: float) -> bool:
    """Whether two comparisons are the same one, up to the rounding of a dataset's states.

    What is stored may differ by more: the norm takes out the part of a codec's error, or of a
    quantised target's, that lies along the state. That is 1/sqrt(H) of the error, so an eighth of
    it for H = 64; `noise` is a quarter of it.
    """
    (chunks, states), (others, other_states) = one, other
    return (
        _difference(chunks, others, 0) <= max(_SAME, noise)
        and _difference(states, other_states, 0) <= _SAME
    )


def _difference(chunks: list[Tensor], expected: list[Tensor], shift: int) -> float:
    """Return the mean relative difference of row t from the state of token t + shift."""
    parts = []
    for chunk, state in zip(chunks, expected, strict=True):
        first, stop = max(0, -shift), len(chunk) - max(0, shift)
        a, b = chunk[first:stop].float(), state[first + shift : stop + shift].float()
        parts.append((a - b).norm(dim=-1) / b.norm(dim=-1).clamp_min(1e-30))
    return float(torch.cat(parts).nan_to_num(_MOST).clamp(max=_MOST).mean())


def check_fits(fits: Sequence[Fit], conventions: Conventions, tool: str, blocks: int) -> None:
    """Refuse a convention that the states contradict, with the one that fits them.

    Raises:
        RunError: see above.
    """
    if all(fit.fits for fit in fits):
        return
    lines = [
        f"{fit.name}: declared as {_named(fit.declared, blocks)} (difference {fit.error:.2g}), "
        f"nearest to {_named(fit.nearest, blocks)} ({fit.smallest:.2g})"
        for fit in fits
        if not fit.fits
    ]
    raise RunError(
        "the stored states are not what the declared convention says. Compared with what the "
        "target computes, relative:\n  " + "\n  ".join(lines) + "\n"
        f"{_advice(fits, conventions, tool, blocks)}. Nothing was written"
    )


def rounding_warning(fits: Sequence[Fit]) -> str | None:
    """Say if a chunk that fits differs from the target by more than rounding; None if none does."""
    worst = max(fits, key=lambda fit: fit.error)
    if worst.error <= _ROUNDING:
        return None
    return (
        f"{worst.name} differs from what the target computes by {worst.error:.2g}, and rounding to "
        f"bf16 or 8-bit floats by less than {_ROUNDING:.2g}. Either the states are of a quantised "
        "target, or of one with slightly different weights, such as another fine-tune: check "
        "--target and --revision"
    )


def _named(place: Place, blocks: int) -> str:
    key, shift = place
    text = {-1: "the embedding output", FINAL_STATE: "the state after the final norm"}.get(
        key, f"the output of block {key}"
    )
    if key == blocks - 1:
        text += " (the last one, before the final norm)"
    return text + (f" of the {'next' if shift > 0 else 'previous'} token" if shift else "")


def _advice(fits: Sequence[Fit], conventions: Conventions, tool: str, blocks: int) -> str:
    """Return what to do: the options that fit the data, if there are any."""
    if any(fit.unknown for fit in fits):
        return (
            "At least one is no state of this target: give the --target that was captured, with "
            "the same weights, or another --from"
        )
    shifts = {fit.nearest[1] for fit in fits} - {0}
    if shifts:
        return (
            "The states are shifted against the token ids, so each token has those of a "
            "neighbour. Write them again with the ids that the target was given"
        )
    *aux, last = fits
    layers = [fit.nearest[0] for fit in aux]
    norms = {FINAL_STATE: AFTER, blocks - 1: BEFORE}
    if FINAL_STATE in layers or len(set(layers)) < len(layers) or last.nearest[0] not in norms:
        return (
            "No order of layers fits: a layer is stored twice, or after the final norm, or the "
            "last state is that of another block. Capture again"
        )
    ids = conventions.in_their_counting([int(k) for k in layers])
    return (
        f"What fits is --stored-layers {','.join(map(str, ids))} (as {tool} counts: "
        f"{conventions.counting} of blocks) --final-norm {norms[last.nearest[0]]}"
    )


@dataclass(frozen=True, kw_only=True)
class HeadFigures:
    """What the head says of the next supervised tokens: share of first choices, NLL in nats."""

    tokens: int
    first_choice: float
    nll: float


@torch.no_grad()
def head_figures(
    documents: Sequence[tuple[Tensor, Tensor]],
    finals: Sequence[Tensor],
    logits_of: Callable[[Tensor], Tensor],
    shift: int,
) -> HeadFigures:
    """Measure the head on final states, where row t is taken for the state of token t + shift.

    Args:
        documents: token ids int64 [T] and loss mask [T] of each.
        finals: the final states [T, H] of each.
        logits_of: computes logits [m, V] of states [m, H].
        shift: see above.
    """
    hits = nll = 0.0
    tokens = 0
    for (ids, mask), final in zip(documents, finals, strict=True):
        at = mask.nonzero().flatten()  # the tokens that are predicted
        rows = at - 1 - shift
        kept = (rows >= 0) & (rows < len(ids)) & (at > 0)
        if not kept.any():
            continue
        logits, expected = logits_of(final[rows[kept]]).float(), ids[at[kept]]
        hits += float((logits.argmax(-1).cpu() == expected).sum())
        chosen = logits.log_softmax(-1).cpu().gather(-1, expected[:, None])
        nll -= float(chosen.sum())
        tokens += int(kept.sum())
    count = max(1, tokens)
    return HeadFigures(tokens=tokens, first_choice=hits / count, nll=nll / count)


def head_warning(figures: dict[tuple[str, int], HeadFigures], declared: str) -> str | None:
    """Say if the next tokens are clearly likelier under another norm or shift; None if not.

    This refuses nothing: where the states of the walked samples are those of the target, either
    others of the samples are wrong, or the target was never trained.

    Args:
        figures: by norm (`AFTER`: the stored state is taken as it is) and shift.
        declared: the declared norm.
    """
    own = figures[declared, 0]
    best = min(figures, key=lambda key: figures[key].nll)
    other = figures[best]
    if own.nll - other.nll <= _NATS or other.first_choice - own.first_choice <= _SHARE:
        return None
    norm, shift = best
    moved = {0: "", 1: ", each row taken for the next token", -1: ", for the previous token"}[shift]
    return (
        f"the last state, taken as {declared} the final norm, gives the next supervised tokens an "
        f"NLL of {own.nll:.2f} and {own.first_choice:.0%} first choices; taken as {norm} it"
        f"{moved}, {other.nll:.2f} and {other.first_choice:.0%}. Some samples may be shifted; "
        "compare more of them with --verify-target"
    )
