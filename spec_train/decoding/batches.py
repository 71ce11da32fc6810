"""Decoding several prompts per forward of the target, plain or with a draft.

Each sequence is drafted, verified and counted by the rules of `chains`: it emits the tokens and has
the rounds that it has alone. A prompt is computed alone and joins the batch as soon as there is
room, and a sequence that has ended leaves, so the batch stays full. Sequences accept different
numbers of tokens (see `BatchSession`).

Rounding may differ from that of decoding one by one, as it does between any two batch shapes, so
another token may win a tie.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spec_train.decoding.batch_session import BatchSession
from spec_train.decoding.chains import Generation, GrowingResponse, Request, TargetSession
from spec_train.drafts.protocol import Ask, Drafter


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
    rows, drafters, asks = [], [], []
    for row, sequence in enumerate(active):
        response = sequence.response
        count = response.wanted(draft_tokens)
        if sequence.drafter is None or not count:
            continue
        rows.append(row)
        drafters.append(sequence.drafter)
        asks.append(Ask(response.known, response.states, count, response.request.sampler))
    for row, proposed in zip(rows, propose_all(drafters, asks), strict=True):
        found[row] = proposed
    return found


def propose_all(drafters: Sequence[Drafter], asks: Sequence[Ask]) -> list[tuple[Tensor, list[Any]]]:
    """Answer one `Ask` per drafter, together where their class can (see `protocol.Drafter`)."""
    together = getattr(type(drafters[0]), "propose_together", None) if drafters else None
    if together is not None and len(drafters) > 1:
        return together(drafters, asks)
    return [
        drafter.propose(ask.tokens, ask.states, ask.count, ask.sampler)
        for drafter, ask in zip(drafters, asks, strict=True)
    ]
