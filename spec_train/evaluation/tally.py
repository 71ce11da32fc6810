"""What is counted over the responses of an evaluation, and the metrics that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from spec_train.decoding.chains import Generation, VerificationStep
from spec_train.evaluation.speed_model import Times
from spec_train.simulation.breakdown import by_position, position_range, positions_of
from spec_train.simulation.intervals import length_interval
from spec_train.simulation.samples import RESPONSE_TOKENS, context_part

# -- response sample -------------------------------------------------------------------------------
# A response of real decoding with its rounds, for the acceptance viewer (`simulation.samples`).


def response_sample(name: str, prompt: Sequence[int], generation: Generation) -> dict[str, Any]:
    """Return the sample of a response of real decoding.

    Args:
        name: of the prompt. prompt: its token ids. generation: the response with its rounds.
    """
    tokens = generation.tokens
    parts: list[dict[str, Any]] = [context_part(list(prompt))]
    parts.append({"kind": "first", "tokens": tokens[:1]})
    done = 1
    for one in generation.rounds:
        if done >= RESPONSE_TOKENS:
            break
        emitted = tokens[done : done + one.emitted]
        parts.append(
            {
                "kind": "round",
                "drafted": list(one.tokens),
                "accepted": one.accepted,
                "emitted": emitted,
                "choice": emitted[one.accepted] if one.accepted < len(emitted) else None,
            }
        )
        done += one.emitted
    return {"name": name, "source": "", "parts": parts}


# -- prompt sums -----------------------------------------------------------------------------------
# Acceptance by set of prompts.


@dataclass
class Counts:
    """Counts of some rounds. `tried` and `accepted` have an entry for each depth that occurs."""

    rounds: int = 0
    emitted: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, one: VerificationStep) -> None:
        """Count a round."""
        self.rounds += 1
        self.emitted += one.emitted
        missing = one.tried - len(self.tried)
        self.tried += [0] * missing
        self.accepted += [0] * missing
        for depth in range(one.tried):
            self.tried[depth] += 1
            self.accepted[depth] += depth < one.accepted

    def figures(self) -> dict[str, Any]:
        """Return the acceptance length and the share accepted at each depth, of those tried."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return {
            "acceptance_length": self.emitted / self.rounds if self.rounds else None,
            "accept_rate": [a / t for a, t in pairs],
            "rounds": self.rounds,
            "emitted": self.emitted,
        }


def by_set(
    sets: Mapping[str, Counts], prompts: Sequence[tuple[str, int, int]]
) -> list[dict[str, Any]]:
    """Return the figures of each set of prompts, in the order in which they were read.

    Args:
        sets: counts by name.
        prompts: of each prompt the name of its set, its verifications and their tokens.
    """
    found = []
    for name, counts in sets.items():
        own = np.array([line[1:] for line in prompts if line[0] == name], dtype=np.int64)
        interval = length_interval(own.reshape(-1, 2))
        found.append(
            {"set": name, "prompts": len(own)}
            | counts.figures()
            | {"interval": None if interval is None else list(interval)}
        )
    return found


# -- tally -----------------------------------------------------------------------------------------


@dataclass
class PromptCounts:
    """What the responses to one prompt add up to; `prompt` is a digest of its first token ids."""

    prompt: str
    rounds: int = 0
    emitted: int = 0


@dataclass(kw_only=True)
class Tally:
    """Counts over all responses. Lists over depths have K entries."""

    tried: list[int]
    accepted: list[int]
    responses: int = 0
    identical: int = 0
    ties: int = 0
    stopped: int = 0
    rounds: int = 0
    emitted: int = 0
    drafted: int = 0
    draft_passes: int = 0
    tokens: int = 0
    seconds: float = 0.0  # of the responses that were decoded one by one
    tokens_alone: int = 0  # their tokens
    timed_pairs: int = 0
    timed_tokens: int = 0  # with the draft, of the pairs
    timed_seconds: float = 0.0
    plain_tokens: int = 0
    plain_seconds: float = 0.0
    too_long: list[str] = field(default_factory=list)
    failed_turns: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    prompts: dict[str, PromptCounts] = field(default_factory=dict)  # by place in --prompts
    sampled: frozenset[str] = frozenset()  # places of the prompts whose drafted tokens are kept
    samples: list[dict[str, Any]] = field(default_factory=list)
    ranges: dict[int, list[int]] = field(default_factory=dict)  # by range of positions
    contexts: dict[int, list[int]] = field(default_factory=dict)  # by range of tokens before it
    groups: Mapping[str, str] = field(default_factory=dict)  # place -> set of prompts
    sets: dict[str, Counts] = field(default_factory=dict)  # by name of the set
    times: Times = field(default_factory=Times)

    def add_pair(self, plain: Generation, speculative: Generation) -> None:
        """Count the times of a response that was decoded both ways."""
        self.timed_pairs += 1
        self.timed_tokens += len(speculative.tokens)
        self.timed_seconds += speculative.seconds
        self.plain_tokens += len(plain.tokens)
        self.plain_seconds += plain.seconds
        self.times.add(plain, speculative)

    def add(
        self, speculative: Generation, where: str, ids: Sequence[int], *, alone: bool = True
    ) -> None:
        """Count one response with the draft to the prompt at `where`, which has the tokens `ids`.

        `alone`: no other response shared its forwards.
        """
        self.responses += 1
        counts = self.prompts.setdefault(where, PromptCounts(prompt_digest(ids)))
        counts.rounds += len(speculative.rounds)
        counts.emitted += sum(r.emitted for r in speculative.rounds)
        self.stopped += speculative.stopped
        self.tokens += len(speculative.tokens)
        if alone:
            self.tokens_alone += len(speculative.tokens)
            self.seconds += speculative.seconds
        self.draft_passes += speculative.draft_passes
        if where in self.sampled:
            self.samples.append(response_sample(where, ids, speculative))
        of_set = self.sets.setdefault(self.groups.get(where, ""), Counts())
        positions = positions_of(r.emitted for r in speculative.rounds)
        for r, position in zip(speculative.rounds, positions, strict=True):
            _count_range(self.ranges, position, r.emitted)
            _count_range(self.contexts, len(ids) + position, r.emitted)
            of_set.add(r)
            self.rounds += 1
            self.emitted += r.emitted
            self.drafted += r.drafted
            for depth in range(r.tried):
                self.tried[depth] += 1
            for depth in range(r.accepted):
                self.accepted[depth] += 1

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification of the target; None before the first verification."""
        return self.emitted / self.rounds if self.rounds else None


def _count_range(ranges: dict[int, list[int]], position: int, emitted: int) -> None:
    """Count a round to the range of a position."""
    own = ranges.setdefault(position_range(position), [0, 0])
    own[0], own[1] = own[0] + 1, own[1] + emitted


def prompt_digest(ids: Sequence[int]) -> str:
    """Return a short digest of token ids, the same on every machine."""
    return xxh3_64_hexdigest(np.asarray(ids, dtype="<i8").tobytes())


def figures(tally: Tally, depth: int, temperature: float) -> dict[str, Any]:
    """Return the metrics of --json."""
    speed = tally.tokens_alone / tally.seconds if tally.seconds else 0.0
    paired = tally.timed_tokens / tally.timed_seconds if tally.timed_seconds else 0.0
    plain = tally.plain_tokens / tally.plain_seconds if tally.plain_seconds else 0.0
    pairs = zip(tally.accepted, tally.tried, strict=True)
    greedy = temperature == 0
    interval = length_interval(_counts(tally))
    return {
        "acceptance_length": tally.acceptance_length,
        "interval": None if interval is None else list(interval),
        "accept_rate": [a / t if t else None for a, t in pairs],
        "accepted_per_depth": tally.accepted,
        "tried_per_depth": tally.tried,
        "draft_tokens": depth,
        "drafted": tally.drafted,
        "draft_passes": tally.draft_passes,
        "accepted": sum(tally.accepted),
        "rounds": tally.rounds,
        "emitted": tally.emitted,
        "responses": tally.responses,
        "tokens": tally.tokens,
        "stopped": tally.stopped,
        "tokens_per_second": speed,
        "plain_tokens_per_second": plain,
        "speedup": paired / plain if plain else None,
        "timed_pairs": tally.timed_pairs,
        "speed": tally.times.figures(),
        "temperature": temperature,
        "identical": tally.identical if greedy else None,
        "ties": tally.ties if greedy else None,
        "different": tally.differences if greedy else None,
        "too_long": tally.too_long,
        "failed_turns": tally.failed_turns,
        "by_set": by_set(tally.sets, _prompts_of_sets(tally)),
        "per_prompt": [vars(counts) for counts in _by_prompt(tally)],
        "by_position": by_position(tally.ranges),
        "by_context": by_position(tally.contexts),
        "samples": tally.samples,
    }


def _by_prompt(tally: Tally) -> list[PromptCounts]:
    """Return the counts of all prompts in an order that no batch changes."""
    return [tally.prompts[where] for where in sorted(tally.prompts)]


def _prompts_of_sets(tally: Tally) -> list[tuple[str, int, int]]:
    """Return the set, the verifications and their tokens of each prompt."""
    places = sorted(tally.prompts)
    counts = [tally.prompts[where] for where in places]
    names = [tally.groups.get(where, "") for where in places]
    return [(name, one.rounds, one.emitted) for name, one in zip(names, counts, strict=True)]


def _counts(tally: Tally) -> np.ndarray:
    """Return verifications and tokens by prompt, int64 [N, 2]."""
    counts = [(one.rounds, one.emitted) for one in _by_prompt(tally)]
    return np.array(counts, dtype=np.int64).reshape(-1, 2)
