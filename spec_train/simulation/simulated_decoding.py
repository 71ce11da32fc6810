"""Acceptance as in serving, computed from drafted chains and stored documents, without the target.

Input: for every slot of a document, the S tokens that a greedy chain drafts there from its own
tokens and states. Output: sums that add up over documents, and metrics. Slot t knows token x_{t+1};
depth d drafts x_{t+1+d}, a hit if it equals the target's choice, `target_argmax[t + d]`.

Documents may be text that the target did not write. The result at a depth is known while all
earlier drafts of the chain equal the document. After an accepted draft that differs from the
document, the stored states are not the ones that serving would see, and the chain is *censored*:
neither hit nor miss at later depths. Rates are therefore product-limit estimates (Kaplan and Meier
1958): r_d = hits at d / chains at risk at d; P(depth d is reached) = r_1 ... r_d. Two averages:

- slots: every supervised slot starts one chain, as in training curves;
- walk: the rounds of decoding. The first starts at the first supervised token, each next one where
  the round before ended. Decoding skips slots that a chain drafts correctly and restarts where a
  chain failed, so it meets difficult slots more often than their share. Only the walk predicts its
  acceptance length. On greedy responses of the target nothing is censored, and the walk equals the
  decoding: the same rounds and the same tokens.

On other documents the walk follows the document: the document's token replaces the target's token
at the end of a round, and the accepted draft where a chain is censored. A censored round counts the
drafts known to be accepted plus the expected number after them by the product-limit estimate.
Measured with a tiny target on human answers (69 % of the tokens were its own choice), for a real
length of 1.84: walk 1.79, slots 2.00. A walk that counts only rounds starting at the target's own
choice measures 1.90, because the target agrees with easy tokens. So every round counts.

Shapes: T tokens of a document, S draft depths, R rounds. Counting equals chains.py: the end of a
supervised span cuts the last round, like a stop token or the limit.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from spec_train.data.batch import DraftBatch

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
"""Drafted chains, tokens, choices and loss mask of a document: the arguments of `judge_chains`."""


@dataclass(frozen=True)
class Outcomes:
    """The result of the chain at every slot of one document."""

    at_risk: np.ndarray  # bool [T, S]: the result is known, and all earlier drafts were accepted
    hit: np.ndarray  # bool [T, S]: at risk, and accepted
    accepted: np.ndarray  # int64 [T]: number of drafts known to be accepted
    censored: np.ndarray  # bool [T]: the last accepted draft differs from the document


@dataclass(frozen=True)
class Figures:
    """Acceptance length and, per depth, the rate given that all earlier depths were accepted.

    None: there was no round, or no chain reached that depth.
    """

    acceptance_length: float | None
    accept_rate: list[float | None]
    rounds: int  # chains started
    censored: float  # share of the chains that were censored


@dataclass(kw_only=True)
class ServingSums:
    """Counts over documents; `+=` adds. Arrays are int64 [S], one entry per depth."""

    slot_risk: np.ndarray
    slot_hits: np.ndarray
    walk_risk: np.ndarray
    walk_hits: np.ndarray
    walk_censored: np.ndarray  # rounds censored after depth d
    slots: int = 0
    slots_censored: int = 0
    rounds: int = 0
    emitted: int = 0  # tokens of all rounds; a censored round counts its known drafts plus one
    tokens: int = 0  # supervised tokens with a predecessor
    on_policy: int = 0  # those of them that are the target's own choice
    spans: int = 0  # supervised spans (responses)

    @classmethod
    def zero(cls, depths: int) -> "ServingSums":
        """Return the sums of no documents."""
        a, b, c, d, e = np.zeros((5, depths), dtype=np.int64)
        return cls(slot_risk=a, slot_hits=b, walk_risk=c, walk_hits=d, walk_censored=e)

    def __iadd__(self, other: "ServingSums") -> "ServingSums":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def as_array(self) -> np.ndarray:
        """Return all counts, int64 [5 S + 7], to add those of several processes."""
        return np.concatenate([np.atleast_1d(value) for value in vars(self).values()])

    @classmethod
    def from_array(cls, counts: np.ndarray) -> "ServingSums":
        """Return the sums whose `as_array` has these counts."""
        sums = cls.zero((len(counts) - len(cls.zero(0).as_array())) // 5)
        start = 0
        for name, value in vars(sums).items():
            own = counts[start : start + np.size(value)]
            setattr(sums, name, own.astype(np.int64) if np.ndim(value) else int(own[0]))
            start += np.size(value)
        return sums

    def slot_figures(self) -> Figures:
        """Average over all supervised slots."""
        risk = self.slot_risk
        rates = _ratio(self.slot_hits, risk)
        return Figures(
            acceptance_length=1.0 + float(np.cumprod(rates).sum()) if risk.any() else None,
            accept_rate=_known(rates, risk),
            rounds=self.slots,
            censored=self.slots_censored / max(self.slots, 1),
        )

    def walk_figures(self) -> Figures:
        """Average over the rounds of the walk: tokens per target verification."""
        rates = _ratio(self.walk_hits, self.walk_risk)
        return Figures(
            acceptance_length=float(walk_lengths(self.as_array()[None])[0])
            if self.rounds
            else None,
            accept_rate=_known(rates, self.walk_risk),
            rounds=self.rounds,
            censored=int(self.walk_censored.sum()) / max(self.rounds, 1),
        )


def walk_lengths(counts: np.ndarray) -> np.ndarray:
    """Return the acceptance length of the walk [B] of sums as arrays [B, 5 S + 7], see `as_array`.

    Not a number where there is no round.
    """
    depths = (counts.shape[1] - 7) // 5
    _, _, risk, hits, censored = (counts[:, i * depths : (i + 1) * depths] for i in range(5))
    rounds, emitted = counts[:, 5 * depths + 2], counts[:, 5 * depths + 3]
    rates = _ratio(hits, risk)
    more = np.zeros(len(counts))  # expected tokens after depth d, from the last one back
    tokens = emitted.astype(np.float64)
    for d in range(depths - 2, -1, -1):
        more = rates[:, d + 1] * (1.0 + more)
        tokens += censored[:, d] * more
    with np.errstate(invalid="ignore", divide="ignore"):
        return tokens / rounds


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.maximum(denominator, 1), 0.0)


def _known(rates: np.ndarray, at_risk: np.ndarray) -> list[float | None]:
    return [rate if some else None for rate, some in zip(rates.tolist(), at_risk, strict=True)]


def supervised_spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Return half-open ranges of consecutive supervised tokens of one mask, bool or uint8 [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def judge_chains(
    drafted: np.ndarray, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> Outcomes:
    """Compare the greedy chains of one document with the target's choices.

    Args:
        drafted: target ids int64 [T, S]; `drafted[t, d - 1]` is drafted for token t + 1 + d.
        input_ids: int64 [T], token frame.
        target_argmax: int64 [T]; entry t is the target's choice for token t + 1.
        loss_mask: bool [T], token frame.
    """
    length, depths = drafted.shape
    ends = np.zeros(length + 1, dtype=np.int64)  # ends[t]: the end of the span that contains t
    for start, end in supervised_spans(loss_mask):
        ends[start:end] = end
    slots, depth = np.arange(length)[:, None], np.arange(1, depths + 1)[None]  # [T, 1], [1, S]
    drafted_token = slots + 1 + depth  # [T, S]: index of the token that is drafted
    inside = drafted_token < ends[1:, None]  # [T, S]
    right = drafted == target_argmax[np.minimum(slots + depth, length - 1)]
    same = drafted == input_ids[np.minimum(drafted_token, length - 1)]
    alive = np.ones((length, depths), dtype=bool)  # all earlier depths were hits in the document
    alive[:, 1:] = np.logical_and.accumulate(right & same & inside, axis=1)[:, :-1]
    at_risk = alive & inside
    hit = at_risk & right
    return Outcomes(at_risk, hit, hit.sum(1), (hit & ~same).any(1))


def walk_rounds(outcomes: Outcomes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Walk the rounds of one document, in order.

    Returns:
        (slot, number of tokens known to be emitted) of each round.
    """
    rounds = []
    for start, end in spans:
        slot = max(start - 1, 0)
        while (left := end - slot - 2) > 0:  # tokens of the span after the known token
            accepted = int(outcomes.accepted[slot])
            rounds.append((slot, min(accepted + 1, left)))
            slot += accepted if outcomes.censored[slot] else accepted + 1
    return rounds


@dataclass(frozen=True)
class Walk:
    """One document walked: the result at every slot, its supervised spans, and its rounds."""

    outcomes: Outcomes
    spans: list[tuple[int, int]]
    rounds: list[tuple[int, int]]


def walk_document(
    drafted: np.ndarray, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> Walk:
    """Judge the chains of one document and walk its rounds; arguments as for `judge_chains`."""
    outcomes = judge_chains(drafted, input_ids, target_argmax, loss_mask)
    spans = supervised_spans(loss_mask)
    return Walk(outcomes, spans, walk_rounds(outcomes, spans))


def round_sums(
    outcomes: Outcomes, rounds: list[tuple[int, int]], loss_mask: np.ndarray
) -> ServingSums:
    """Return the sums of some rounds of one document: only those that `walk_figures` reads.

    Args:
        outcomes: of the document. rounds: some of its rounds, as from `walk_rounds`.
        loss_mask: bool [T], token frame.
    """
    slots = np.array([slot for slot, _ in rounds], dtype=np.int64)  # [R]
    open_ended = [  # later drafts could have been accepted, and emitted inside the span
        int(outcomes.accepted[slot]) - 1
        for slot, tokens in rounds
        if outcomes.censored[slot] and loss_mask[slot + 1 : slot + 2 + tokens].all()
    ]
    depths = outcomes.at_risk.shape[1]
    sums = ServingSums.zero(depths)
    sums.walk_risk = outcomes.at_risk[slots].sum(0)
    sums.walk_hits = outcomes.hit[slots].sum(0)
    sums.walk_censored = np.bincount(open_ended, minlength=depths)
    sums.rounds, sums.emitted = len(rounds), sum(tokens for _, tokens in rounds)
    return sums


def document_sums(
    drafted: np.ndarray, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> ServingSums:
    """Return the sums of one document; arguments as for `judge_chains`."""
    walk = walk_document(drafted, input_ids, target_argmax, loss_mask)
    return walk_sums(walk, input_ids, target_argmax, loss_mask)


def walk_sums(
    walk: Walk, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> ServingSums:
    """Return the sums of one document that was walked; arguments as for `judge_chains`."""
    outcomes, predicted = walk.outcomes, loss_mask[1:]
    sums = round_sums(outcomes, walk.rounds, loss_mask)
    sums.slot_risk, sums.slot_hits = outcomes.at_risk.sum(0), outcomes.hit.sum(0)
    sums.slots = int(outcomes.at_risk[:, 0].sum())
    sums.slots_censored = int(outcomes.censored.sum())
    sums.tokens = int(predicted.sum())
    sums.on_policy = int((target_argmax[:-1] == input_ids[1:])[predicted].sum())
    sums.spans = len(walk.spans)
    return sums


# -- batch walk ------------------------------------------------------------------------------------
# The documents of a batch, walked with the chains that a draft proposes at their slots.


def documents_of(batch: DraftBatch, chains: Tensor) -> Iterator[tuple[int, Arrays]]:
    """Yield the number of each document of a batch, and its arrays for `judge_chains`.

    `chains` are target ids, int64 [B, T, S], as from `Draft.chains`.
    """
    ids, mask, best, documents = (
        t.cpu().numpy()
        for t in (batch.input_ids, batch.loss_mask, batch.target_argmax, batch.document_ids)
    )
    drafted = chains.cpu().numpy()
    for b in range(len(ids)):
        for document in range(documents[b].max() + 1):
            own = documents[b] == document
            yield (
                batch.rows[b][document],
                (drafted[b, own], ids[b, own], best[b, own], mask[b, own]),
            )


def serving_sums(batch: DraftBatch, chains: Tensor) -> ServingSums:
    """Sum over the documents of a batch; arguments as for `documents_of`."""
    total = ServingSums.zero(chains.shape[-1])
    for _, arrays in documents_of(batch, chains):
        total += document_sums(*arrays)
    return total
