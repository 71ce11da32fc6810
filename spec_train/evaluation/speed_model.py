"""Where the time of speculative decoding goes, and what speed-up follows from given costs.

A round costs one verification and the passes of the draft, and emits `length` tokens on average;
the target alone needs one pass for each token. So with the times of both in passes of the target

    speed-up = length / (verification + passes * cost_ratio)

which is Theorem 3.8 of Leviathan et al., Fast Inference from Transformers via Speculative Decoding
(2023), with the measured length instead of one that follows from a constant acceptance rate. The
prefill, which is the same with and without a draft, is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spec_train.decoding.chains import Generation


@dataclass
class Times:
    """Seconds of the responses that were decoded both ways, and what they were spent on."""

    draft: float = 0.0
    verify: float = 0.0
    prefill: float = 0.0  # with the draft
    speculative: float = 0.0  # all of it
    rounds: int = 0
    passes: int = 0
    plain: float = 0.0  # of the target alone, without its prefill
    plain_passes: int = 0

    def add(self, plain: Generation, speculative: Generation) -> None:
        """Count a response that was decoded both ways."""
        self.draft += speculative.draft_seconds
        self.verify += speculative.verify_seconds
        self.prefill += speculative.prefill_seconds
        self.speculative += speculative.seconds
        self.rounds += len(speculative.rounds)
        self.passes += speculative.draft_passes
        self.plain += plain.seconds - plain.prefill_seconds
        self.plain_passes += len(plain.tokens) - 1

    def figures(self) -> dict[str, Any]:
        """Return the shares of the time, and the costs in passes of the target; None: unknown."""
        rest = self.speculative - self.draft - self.verify - self.prefill
        parts = {"draft": self.draft, "verify": self.verify, "prefill": self.prefill, "other": rest}
        shares = {name: _ratio(part, self.speculative) for name, part in parts.items()}
        target = _ratio(self.plain, self.plain_passes)
        draft, verify = _ratio(self.draft, self.passes), _ratio(self.verify, self.rounds)
        return {
            "shares": shares,
            "target_pass_seconds": target,
            "draft_pass_seconds": draft,
            "verification_seconds": verify,
            "cost_ratio": _ratio(draft, target),
            "verification_ratio": _ratio(verify, target),
        }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def modelled_speedup(
    length: float, passes: float, cost_ratio: float, verification_ratio: float = 1.0
) -> float:
    """Return the expected speed-up of decoding, prefill left out.

    Args:
        length: tokens per verification.
        passes: of the draft per round.
        cost_ratio: time of a pass of the draft, in passes of the target.
        verification_ratio: time of a verification, in passes of the target. On a GPU with small
            batches it is about 1: reading the weights takes most of both.
    """
    return length / (verification_ratio + passes * cost_ratio)


def with_model(figures: Mapping[str, Any], cost_ratio: float) -> dict[str, Any]:
    """Return the modelled speed-up of some figures of `tally.figures`, and the costs it is for.

    `cost_ratio` is that of the serving machine, where a verification costs one pass of the target;
    0: both as measured here.
    """
    measured = figures["speed"]["cost_ratio"], figures["speed"]["verification_ratio"]
    draft, verification = (cost_ratio, 1.0) if cost_ratio else measured
    known = None not in (figures["acceptance_length"], draft, verification)
    passes = figures["draft_passes"] / figures["rounds"] if figures["rounds"] else None
    return {
        "cost_ratio": draft,
        "verification_ratio": verification,
        "passes_per_round": passes,
        "speedup": modelled_speedup(figures["acceptance_length"], passes or 0, draft, verification)
        if known
        else None,
    }


def sweep_line(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sweep keeps of the figures of one number of drafted tokens."""
    names = ("draft_tokens", "acceptance_length", "interval", "rounds", "emitted", "speedup")
    return {name: figures[name] for name in names} | {"modelled": figures["modelled"]}


def fastest(sweep: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of drafted tokens with the largest modelled speed-up; None: unknown."""
    known = [line for line in sweep if line["modelled"]["speedup"] is not None]
    if not known:
        return None
    return int(max(known, key=lambda line: line["modelled"]["speedup"])["draft_tokens"])
