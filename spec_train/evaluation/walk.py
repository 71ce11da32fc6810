"""Acceptance as serving would have it, from drafted chains and stored documents; no target.

In: for every slot of a document, the S tokens a greedy chain drafts there from its own tokens and
states. Out: sums that add up over documents, and figures. Slot t knows token x_{t+1}; depth d
drafts x_{t+1+d} and is a hit when that is the target's choice, `target_argmax[t + d]`.

Documents need not be the target's own words. A chain's depth is knowable while all its earlier
drafts equal the document: when an accepted draft does not, the stored states no longer belong to
what serving would have seen, and the chain is *censored* there (neither hit nor miss beyond). Rates
are therefore product-limit estimates (Kaplan and Meier 1958): r_d = hits at d / chains at risk at
d, chance to reach depth d = r_1 ... r_d. Two averages:

- slots: every supervised slot starts one chain, as in training curves;
- walk: rounds as decoding plays them. The first starts at the first supervised token, each next
  one where the last ended. Decoding skips the slots that a chain gets right and starts again where
  one failed, so it meets hard slots more often than their share; only the walk predicts its
  acceptance length. On greedy responses of the target nothing is censored, and the walk *is* the
  decoding: same rounds, same tokens.

In other documents the walk goes on with the document: its token takes the place of the target's at
the end of a round, and of the accepted draft where a chain is censored. A censored round counts the
drafts known to be accepted plus what the product-limit estimate expects after them. Measured with a
tiny target on human answers, 69 % of whose tokens were its own choice, for a real length of 1.84:
walk 1.79, slots 2.00; a walk that counts only rounds begun at the target's own choice 1.90, since
the easy tokens are those it agrees on. So every round counts.

Shapes: T tokens of a document, S draft depths. Counting is decode.py's: the end of a supervised
span cuts the last round as a stop token or the limit does.
"""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Outcomes:
    """What became of the chain at every slot of one document."""

    at_risk: np.ndarray  # bool [T, S]: knowable, all earlier drafts accepted
    hit: np.ndarray  # bool [T, S]: at risk, and accepted
    accepted: np.ndarray  # int64 [T]: accepted drafts that are known
    censored: np.ndarray  # bool [T]: the last of them left the document


@dataclass(frozen=True)
class Figures:
    """Acceptance length and, per depth, the rate given that all earlier depths were accepted.

    None: there was no round, or no chain that got so far.
    """

    acceptance_length: float | None
    accept_rate: list[float | None]
    rounds: int  # chains started
    censored: float  # share of them that left the document


@dataclass(kw_only=True)
class ServingSums:
    """Counts over documents; `+=` adds. Arrays are int64 [S]."""

    slot_risk: np.ndarray
    slot_hits: np.ndarray
    walk_risk: np.ndarray
    walk_hits: np.ndarray
    walk_censored: np.ndarray  # rounds censored after depth d
    slots: int = 0
    slots_censored: int = 0
    rounds: int = 0
    emitted: int = 0  # tokens of all rounds; censored ones count what is known, plus one
    tokens: int = 0  # supervised tokens with a predecessor
    on_policy: int = 0  # those that are the target's own choice
    spans: int = field(default=0)  # responses walked

    @classmethod
    def zero(cls, depths: int) -> "ServingSums":
        """No documents yet."""
        a, b, c, d, e = np.zeros((5, depths), dtype=np.int64)
        return cls(slot_risk=a, slot_hits=b, walk_risk=c, walk_hits=d, walk_censored=e)

    def __iadd__(self, other: "ServingSums") -> "ServingSums":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self

    def slot_figures(self) -> Figures:
        """Average over every supervised slot."""
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
        expected_more = np.array([np.cumprod(rates[d:]).sum() for d in range(1, len(rates) + 1)])
        tokens = self.emitted + float((self.walk_censored * expected_more).sum())
        return Figures(
            acceptance_length=tokens / self.rounds if self.rounds else None,
            accept_rate=_known(rates, self.walk_risk),
            rounds=self.rounds,
            censored=int(self.walk_censored.sum()) / max(self.rounds, 1),
        )


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    return np.where(denominator > 0, numerator / np.maximum(denominator, 1), 0.0)


def _known(rates: np.ndarray, at_risk: np.ndarray) -> list[float | None]:
    return [rate if some else None for rate, some in zip(rates.tolist(), at_risk, strict=True)]


def supervised_spans(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Half-open ranges of consecutive supervised tokens of one document's mask [T]."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    return [(int(a), int(b)) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def judge_chains(
    drafted: np.ndarray, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> Outcomes:
    """Judge the greedy chains of one document.

    Args:
        drafted: target ids int64 [T, S]; `drafted[t, d - 1]` is drafted for token t + 1 + d.
        input_ids, target_argmax: int64 [T], token frame. loss_mask: bool [T].
    """
    length, depths = drafted.shape
    ends = np.zeros(length + 1, dtype=np.int64)  # ends[t]: where the span that holds t ends
    for start, end in supervised_spans(loss_mask):
        ends[start:end] = end
    slots, depth = np.arange(length)[:, None], np.arange(1, depths + 1)[None]
    drafted_token = slots + 1 + depth
    inside = drafted_token < ends[1:, None]
    right = drafted == target_argmax[np.minimum(slots + depth, length - 1)]
    same = drafted == input_ids[np.minimum(drafted_token, length - 1)]
    alive = np.ones((length, depths), dtype=bool)
    alive[:, 1:] = np.logical_and.accumulate(right & same & inside, axis=1)[:, :-1]
    at_risk = alive & inside
    hit = at_risk & right
    return Outcomes(at_risk, hit, hit.sum(1), (hit & ~same).any(1))


def walk_rounds(outcomes: Outcomes, spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Play the rounds of one document: (slot, tokens emitted as far as known) of each, in order."""
    rounds = []
    for start, end in spans:
        slot = max(start - 1, 0)
        while (left := end - slot - 2) > 0:  # tokens of the span after the known one
            accepted = int(outcomes.accepted[slot])
            rounds.append((slot, min(accepted + 1, left)))
            slot += accepted if outcomes.censored[slot] else accepted + 1
    return rounds


def document_sums(
    drafted: np.ndarray, input_ids: np.ndarray, target_argmax: np.ndarray, loss_mask: np.ndarray
) -> ServingSums:
    """Sums of one document; arguments as for `judge_chains`."""
    outcomes = judge_chains(drafted, input_ids, target_argmax, loss_mask)
    spans = supervised_spans(loss_mask)
    sums = ServingSums.zero(drafted.shape[1])
    started = outcomes.at_risk[:, 0]
    sums.slot_risk, sums.slot_hits = outcomes.at_risk.sum(0), outcomes.hit.sum(0)
    sums.slots, sums.slots_censored = int(started.sum()), int(outcomes.censored.sum())
    rounds = walk_rounds(outcomes, spans)
    slots = np.array([slot for slot, _ in rounds], dtype=np.int64)
    sums.walk_risk, sums.walk_hits = outcomes.at_risk[slots].sum(0), outcomes.hit[slots].sum(0)
    open_ended = [  # more could have been accepted, and still been emitted
        int(outcomes.accepted[slot]) - 1
        for slot, tokens in rounds
        if outcomes.censored[slot] and loss_mask[slot + 1 : slot + 2 + tokens].all()
    ]
    sums.walk_censored = np.bincount(open_ended, minlength=drafted.shape[1])
    sums.rounds, sums.emitted = len(rounds), sum(tokens for _, tokens in rounds)
    predicted = loss_mask[1:]
    sums.tokens = int(predicted.sum())
    sums.on_policy = int((target_argmax[:-1] == input_ids[1:])[predicted].sum())
    sums.spans = len(spans)
    return sums
