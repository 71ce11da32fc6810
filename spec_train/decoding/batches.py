"""Decoding several prompts per forward of the target, plain or with a draft.

Each sequence is drafted, verified and counted by the rules of `chains`: it emits the tokens and has
the rounds that it has alone. A prompt is computed alone and joins the batch as soon as there is
room, and a sequence that has ended leaves, so the batch stays full. Sequences accept different
numbers of tokens (see `BatchSession`).

Rounding may differ from that of decoding one by one, as it does between any two batch shapes, so
another token may win a tie.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.chains import (
    Generation,
    GrowingResponse,
    Request,
    TargetSession,
    decoder_config,
)
from spec_train.drafts.drafting import (
    Drafter,
    DraftRequest,
    left_padded,
    new_positions,
    real_slots,
)

# -- batch session ---------------------------------------------------------------------------------
# Several sequences in the target at once: one KV cache, padded on the left.
#
# Every sequence has its own number of cached tokens, and they end at the last slot of the cache. So
# slots and positions of a sequence differ by a constant, and the windows that transformers counts
# in slots are right. New tokens follow, padded on the right. After a verification each sequence
# keeps a number of its new tokens of its own, and the cache is aligned again.
#
# A sequence joins after its prompt was computed alone (`TargetSession`), and leaves when it has
# ended. `why_alone` compares a small batch with its sequences alone, because models do not declare
# whether they support padding in their cache.
#
# Shapes: B sequences, Q new tokens of the longest one, T slots, V vocabulary, A captured layers
# times the target's hidden size.


_SWITCHING = ("dynamic", "longrope")  # rope types whose frequencies depend on the longest row

_BOUND = "original_max_position_embeddings"


class BatchSession(TargetSession):
    """Sequences that are verified together; `arrange` says which, and what each one keeps."""

    def __init__(self, model: Any, columns: Sequence[str] = ()) -> None:
        """Start without sequences; see TargetSession."""
        super().__init__(model, columns)
        self._lengths: list[int] = []  # cached tokens of each sequence
        self._new = 0  # slots that the last verification added
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters

    @property
    def device(self) -> torch.device:
        """Where ids must be."""
        return self._model.device

    def verify(self, tokens: Sequence[Tensor]) -> tuple[Tensor, Any]:
        """Append new tokens, at least one for each sequence: ids, int64 [1 to Q] each.

        Returns:
            Logits [B, Q, V] and states [B, Q, A], both in the model's dtype, meaningless after the
            tokens of a sequence; the states are None without columns.
        """
        device = self.device
        counts = torch.tensor([len(part) for part in tokens])
        cached = torch.tensor(self._lengths)
        self._new = int(counts.max())
        ids = torch.zeros(len(tokens), self._new, dtype=torch.long, device=device)
        for row, part in enumerate(tokens):
            ids[row, : len(part)] = part
        layout: dict[str, Any] = {}
        width = max(self._lengths)
        if min(self._lengths) < width:
            real = real_slots(cached + self._new, width + self._new)
            layout["attention_mask"] = real.long().to(device)
        if self._takes_positions:
            layout["position_ids"] = new_positions(cached, counts).to(device)
        return self._run(ids, {}, layout)

    def arrange(
        self, kept: Sequence[tuple[int, int]], added: Sequence[tuple[TargetSession, int]] = ()
    ) -> None:
        """Choose the sequences of the next verification.

        Args:
            kept: sequences of the last one, and how many of its tokens each one keeps.
            added: sessions of further sequences, and their cached tokens. They are used up.
        """
        width = max(self._lengths, default=0)
        bounds = [(row, width - self._lengths[row], width + count) for row, count in kept]
        lengths = [stop - start for _, start, stop in bounds] + [count for _, count in added]
        unchanged = (
            not added
            and [row for row, _ in kept] == list(range(len(self._lengths)))
            and all(count == self._new for _, count in kept)
        )
        if not self._lengths and added:
            own = added[0][0]._cache.layers
            self._cache = added[0][0]._cache
        else:
            own = self._cache.layers
        if not unchanged and lengths:
            others = [session._cache.layers for session, _ in added]
            for number, layer in enumerate(own):
                if not layer.is_initialized:  # in some models several layers share one cache
                    continue
                for name in ("keys", "values"):
                    parts = [getattr(layer, name)[row : row + 1, :, a:b] for row, a, b in bounds]
                    parts += [getattr(layers[number], name) for layers in others]
                    setattr(layer, name, left_padded(parts))
        self._lengths, self._new = lengths, 0


def why_alone(model: Any, longest: int | None) -> str | None:
    """Return why sequences of this target cannot share a batch; None: they can.

    Two sequences of different lengths are verified twice in a batch, keep different numbers of
    tokens, and must have the logits that they have alone. One of them is longer than a sliding
    window if any sequence of this run may be.

    Args:
        model: the loaded target.
        longest: tokens of the longest sequence, response included; None: not known.
    """
    config = decoder_config(model)
    switch = _rope_switch(model)
    if switch is not None and (longest is None or longest > switch):
        return "its rope depends on the longest sequence of a batch"
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    length = 12
    if window and (longest is None or longest > window):
        length = window + 12
    try:
        error = _difference(model, length)
    except (TypeError, ValueError, RuntimeError, AttributeError, KeyError, IndexError) as problem:
        return f"it does not accept a padded cache ({type(problem).__name__})"
    allowed = max(1e-3, 16 * torch.finfo(model.dtype).eps)
    if error <= allowed:  # not a number never is
        return None
    return (
        f"a padded cache changes its logits by {error:.1e} of their spread (allowed {allowed:.0e})"
    )


def _rope_switch(model: Any) -> int | None:
    """Return from how many tokens on a longer row changes the rope of all rows; None: never."""
    kinds: set[Any] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds |= set(kind.values()) if isinstance(kind, dict) else {kind}
    if not kinds & set(_SWITCHING):
        return None
    config = decoder_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    ropes = [rope, *(value for value in rope.values() if isinstance(value, dict))]
    bounds = [r[_BOUND] for r in ropes if r.get(_BOUND)]
    return min(bounds or [getattr(config, "max_position_embeddings", 0)])


@torch.inference_mode()
def _difference(model: Any, length: int) -> float:
    """Return how far logits of a batch are off, as a share of their spread, root mean square.

    `length` is that of the longer prompt.
    """
    vocab = model.get_output_embeddings().weight.shape[0]
    rows = [[(7 * i + 3 * i * i) % vocab for i in range(length)], [5 % vocab, 2 % vocab, 9 % vocab]]
    rounds = [([4, 8, 1, 6], 2), ([3, 5], 2)], [([7, 2], 1), ([9, 1, 2, 6], 4)]
    batch, alone = BatchSession(model), [TargetSession(model) for _ in rows]
    started = [TargetSession(model) for _ in rows]
    for ids, *sessions in zip(rows, alone, started, strict=True):
        for session in sessions:
            session.forward(ids, last_only=True)
    batch.arrange([], [(s, len(ids)) for s, ids in zip(started, rows, strict=True)])
    worst = 0.0
    for number in range(len(rounds[0])):
        asked = [rounds[row][number] for row in range(len(rows))]
        ids = [torch.tensor([i % vocab for i in tokens]) for tokens, _ in asked]
        logits, _ = batch.verify([part.to(model.device) for part in ids])
        for row, (session, (tokens, kept)) in enumerate(zip(alone, asked, strict=True)):
            expected, _ = session.forward(ids[row])
            session.rollback(len(tokens) - kept)
            error = (logits[row, : len(tokens)].float() - expected.float()).pow(2).mean().sqrt()
            share = float(error / expected.float().std())
            worst = share if not share <= worst else worst
        batch.arrange([(row, kept) for row, (_, kept) in enumerate(asked)])
    return worst


# -- batches ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How responses are drafted: `make` starts a sequence; `columns` are the states that it reads.

    `draft_tokens` is K, the most drafted tokens per round.
    """

    make: Callable[[], Drafter]
    columns: Sequence[str]
    draft_tokens: int


@dataclass
class _Sequence:
    number: int  # of its request
    response: GrowingResponse
    drafter: Drafter | None

    def generation(self) -> Generation:
        passes = self.drafter.passes if self.drafter else 0
        found = self.response.generation(passes)
        if self.drafter is None:
            found.rounds.clear()
        return found


@torch.inference_mode()
def decode_batch(
    model: Any,
    requests: Sequence[Request],
    width: int,
    drafting: Drafting | None = None,
    done: Callable[[int, Generation], None] = lambda number, generation: None,
) -> list[Generation]:
    """Decode all requests, at most `width` at a time, in the order in which they are given.

    Args:
        model: the target; `why_alone` must have found nothing against batches.
        requests: prompts with their limits and samplers.
        width: sequences per forward, at least 1.
        drafting: None: the target alone.
        done: is called with the number of each request that has ended, and its response.

    Returns:
        The responses in the order of the requests. `seconds` stays 0: a batch has no time per
        response.
    """
    session = BatchSession(model, drafting.columns if drafting else ())
    found: dict[int, Generation] = {}
    active: list[_Sequence] = []
    waiting = iter(range(len(requests)))

    def end(sequence: _Sequence) -> None:
        found[sequence.number] = generation = sequence.generation()
        done(sequence.number, generation)

    def join(room: int) -> list[tuple[_Sequence, TargetSession]]:
        joined: list[tuple[_Sequence, TargetSession]] = []
        while len(joined) < room and (number := next(waiting, None)) is not None:
            sequence, own = _start(model, number, requests[number], drafting)
            if sequence.response.ended:
                end(sequence)
            else:
                joined.append((sequence, own))
        return joined

    kept: list[tuple[int, int]] = []
    while True:
        joined = join(width - len(active))
        added = [(own, len(s.response.request.prompt)) for s, own in joined]
        session.arrange(kept, added)
        active += [s for s, _ in joined]
        if not active:
            break
        kept, still = [], []
        counts = _round(session, active, drafting)
        for row, (sequence, count) in enumerate(zip(active, counts, strict=True)):
            if sequence.response.ended:
                end(sequence)
            else:
                kept.append((row, count))
                still.append(sequence)
        active = still
    return [found[number] for number in range(len(requests))]


def _start(
    model: Any, number: int, request: Request, drafting: Drafting | None
) -> tuple[_Sequence, TargetSession]:
    """Compute a prompt alone; return the sequence and its session."""
    own = TargetSession(model, drafting.columns if drafting else ())
    logits, states = own.forward(request.prompt, last_only=True)
    response = GrowingResponse(request, logits, states)
    return _Sequence(number, response, drafting.make() if drafting else None), own


def _round(
    session: BatchSession, active: Sequence[_Sequence], drafting: Drafting | None
) -> list[int]:
    """Draft and verify once; return how many new tokens of each sequence stay in the cache."""
    drafted = _propose(active, drafting.draft_tokens if drafting else 0, session.device)
    new = []
    for sequence, (ids, _) in zip(active, drafted, strict=True):
        new.append(torch.cat([ids.new_tensor(sequence.response.tokens[-1:]), ids]))
    logits, states = session.verify(new)
    counts = []
    for row, (sequence, (ids, q)) in enumerate(zip(active, drafted, strict=True)):
        own = None if states is None else states[row : row + 1]
        counts.append(sequence.response.verify(ids, q, logits[row, : len(ids) + 1], own))
    return counts


def _propose(
    active: Sequence[_Sequence], draft_tokens: int, device: torch.device
) -> list[tuple[Tensor, list[Any]]]:
    """Return drafted ids, int64 [k], and their distributions, of each sequence."""
    empty = torch.empty(0, dtype=torch.long, device=device)
    found: list[tuple[Tensor, list[Any]]] = [(empty, []) for _ in active]
    rows, drafters, requests = [], [], []
    for row, sequence in enumerate(active):
        response = sequence.response
        count = response.wanted(draft_tokens)
        if sequence.drafter is None or not count:
            continue
        rows.append(row)
        drafters.append(sequence.drafter)
        sampler = response.request.sampler
        requests.append(DraftRequest(response.known, response.states, count, sampler))
    for row, proposed in zip(rows, propose_all(drafters, requests), strict=True):
        found[row] = proposed
    return found


def propose_all(
    drafters: Sequence[Drafter], requests: Sequence[DraftRequest]
) -> list[tuple[Tensor, list[Any]]]:
    """Answer one request per drafter, in as few forward passes as their class can."""
    if len(drafters) > 1:
        return type(drafters[0]).propose_batch(drafters, requests)
    pairs = zip(drafters, requests, strict=True)
    return [d.propose(r.tokens, r.states, r.count, r.sampler) for d, r in pairs]
