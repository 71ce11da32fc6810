"""The metrics of real decoding, from the responses of an evaluation.

A verification step costs one verification and the passes of the draft, and emits `length` tokens on
average; the target alone needs one pass for each token. So with times in passes of the target

    speed-up = length / (verification + passes * cost_ratio)

which is Theorem 3.8 of Leviathan et al., Fast Inference from Transformers via Speculative Decoding
(2023), with the measured length instead of one that follows from a constant acceptance rate. The
prefill, which is the same with and without a draft, is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest

from spec_train.decoding.chains import Generation
from spec_train.simulation.breakdown import mode_json
from spec_train.simulation.intervals import FEWER, length_interval, ratio_interval
from spec_train.simulation.modes import ordered
from spec_train.simulation.ranges import range_json, range_of
from spec_train.simulation.samples import RESPONSE_TOKENS, context_part


@dataclass(frozen=True, kw_only=True)
class Response:
    """A response with the draft, to token ids; `where` and `group` are row and set of its prompt.

    `plain` is the response without the draft that was decoded beside it, so that their times can be
    compared; None: there is none. `modes` are those of `simulation.modes`.
    """

    where: str
    group: str
    ids: Sequence[int]
    generation: Generation
    plain: Generation | None = None
    modes: Sequence[str] = ()

    def positions(self) -> list[tuple[int, int]]:
        """Return the position of each verification step, and the tokens that it emitted.

        The first token of a response belongs to no step, so the first position is 1.
        """
        emitted = [step.emitted for step in self.generation.steps]
        return list(zip(accumulate(emitted, initial=1), emitted, strict=False))

    def sample(self) -> dict[str, Any]:
        """Return the response as a sample for the acceptance viewer (`simulation.samples`)."""
        tokens = self.generation.tokens
        parts = [context_part(list(self.ids)), {"kind": "first", "tokens": tokens[:1]}]
        done = 1
        for step in self.generation.steps:
            if done >= RESPONSE_TOKENS:
                break
            emitted = tokens[done : done + step.emitted]
            done += step.emitted
            choice = emitted[step.accepted] if step.accepted < step.emitted else None
            part = {"drafted": list(step.tokens), "accepted": step.accepted}
            parts.append({"kind": "round", **part, "emitted": emitted, "choice": choice})
        sample = {"name": self.where, "source": "", "parts": parts}
        if self.plain is None or done < len(tokens):  # the times are of all of it
            return sample
        seconds = {"seconds": self.plain.seconds, "draft_seconds": self.generation.seconds}
        return sample | {"plain": {"tokens": self.plain.tokens, **seconds}}


def decoding_metrics(
    responses: Sequence[Response], depth: int, cost_ratio: float = 0.0, *, timed: bool = True
) -> dict[str, Any]:
    """Return the metrics of all responses, decoded with up to `depth` drafted tokens per step.

    Without `timed`, verifications took other times than in an engine: no speed-up is told of them.
    """
    generations = [response.generation for response in responses]
    pairs = [(r.plain, r.generation) for r in responses if r.plain is not None]
    alone = _ratio(sum(len(a.tokens) for a, _ in pairs), sum(a.seconds for a, _ in pairs))
    paired = _ratio(sum(len(b.tokens) for _, b in pairs), sum(b.seconds for _, b in pairs))
    prompts = _by_prompt(responses)
    groups: dict[str, list[Response]] = {}
    for response in responses:
        groups.setdefault(response.group, []).append(response)
    metrics = {
        **_acceptance(responses, prompts, depth),
        "draft_tokens": depth,
        "drafted": sum(step.drafted for g in generations for step in g.steps),
        "draft_passes": sum(generation.draft_passes for generation in generations),
        "responses": len(responses),
        "tokens": sum(len(generation.tokens) for generation in generations),
        "stopped": sum(generation.stopped for generation in generations),
        "tokens_per_second": paired or 0.0,
        "plain_tokens_per_second": alone or 0.0,
        "speedup": _ratio(paired, alone) if timed else None,
        "speedup_interval": _speedup_interval(pairs) if timed else None,
        "timed_pairs": len(pairs),
        "speed": speed(pairs, timed),
        "by_set": [_of_set(name, some) for name, some in groups.items()],
        "per_prompt": prompts,
        **_by_part(responses),
    }
    return metrics | {"modelled": modelled_speed(metrics, cost_ratio)}


def _acceptance(
    responses: Sequence[Response], prompts: Sequence[Mapping[str, Any]], depth: int
) -> dict[str, Any]:
    """Return length with interval, and the share accepted by depth."""
    steps = [step for response in responses for step in response.generation.steps]
    counts = np.array([(p["rounds"], p["emitted"]) for p in prompts], dtype=np.int64)
    interval = length_interval(counts.reshape(-1, 2))
    emitted = sum(step.emitted for step in steps)
    tried = [sum(step.tried > d for step in steps) for d in range(depth)]
    accepted = [sum(step.accepted > d for step in steps) for d in range(depth)]
    return {
        "acceptance_length": _ratio(emitted, len(steps)),
        "interval": None if interval is None else list(interval),
        "accept_rate": [_ratio(*pair) for pair in zip(accepted, tried, strict=True)],
        "rounds": len(steps),
        "emitted": emitted,
    }


def _of_set(name: str, responses: Sequence[Response]) -> dict[str, Any]:
    prompts = _by_prompt(responses)
    depth = max((step.tried for r in responses for step in r.generation.steps), default=0)
    return {"set": name, "prompts": len(prompts)} | _acceptance(responses, prompts, depth)


def _by_prompt(responses: Sequence[Response]) -> list[dict[str, Any]]:
    """Return the verification steps and their tokens of each prompt, in the order of their rows."""
    digests = _digests(responses)
    prompts: dict[str, dict[str, Any]] = {}
    for response in sorted(responses, key=lambda response: response.where):
        digest = digests[response.where]
        line = prompts.setdefault(digest, {"prompt": digest, "rounds": 0, "emitted": 0})
        line["rounds"] += len(response.generation.steps)
        line["emitted"] += sum(step.emitted for step in response.generation.steps)
    return list(prompts.values())


def _digests(responses: Sequence[Response]) -> dict[str, str]:
    """Return what names the prompt of each row: a digest of its first turn's token ids.

    Rows of one prompt are one, and so are the turns of a row: their answers are not independent.
    The digest is the same on every machine.
    """
    first: dict[str, Sequence[int]] = {}
    for response in responses:
        first.setdefault(response.where, response.ids)
    return {
        where: xxh3_64_hexdigest(np.asarray(ids, dtype="<i8").tobytes())
        for where, ids in first.items()
    }


def _by_part(responses: Sequence[Response]) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of ranges of positions and of contexts, and of modes."""
    digests = _digests(responses)
    positions, contexts, modes = Parts(), Parts(), Parts()
    for response in responses:
        prompt = digests[response.where]
        for position, emitted in response.positions():
            positions.add(range_of(position), prompt, 1, emitted)
            contexts.add(range_of(len(response.ids) + position), prompt, 1, emitted)
            for mode in response.modes:
                modes.add(mode, prompt, 1, emitted)
    return {
        "by_position": [range_json(n, *positions.length(n)) for n in sorted(positions)],
        "by_context": [range_json(n, *contexts.length(n)) for n in sorted(contexts)],
        "by_mode": [mode_json(mode, *modes.length(mode)) for mode in ordered(list(modes))],
    }


class Parts(dict[Any, dict[str, list[int]]]):
    """Verifications and their tokens by part of what was measured, and by prompt."""

    def add(self, part: Any, prompt: str, rounds: int, emitted: int) -> None:
        """Count verifications of a prompt that are in a part."""
        counts = self.setdefault(part, {}).setdefault(prompt, [0, 0])
        counts[0] += rounds
        counts[1] += emitted

    def length(self, part: Any) -> tuple[int, float | None, list[float] | None]:
        """Return verifications, acceptance length and its interval over the prompts of a part."""
        counts = np.array(list(self[part].values()), dtype=np.int64)
        rounds, emitted = counts.sum(0).tolist()
        interval = length_interval(counts, resamples=FEWER)
        return rounds, _ratio(emitted, rounds), None if interval is None else list(interval)


def _speedup_interval(pairs: Sequence[tuple[Generation, Generation]]) -> list[float] | None:
    """Return the interval of the measured speed-up, by resampling the pairs of responses.

    A machine that does something else meanwhile slows single responses: the interval is wide.
    """
    rows = [(len(b.tokens), b.seconds, len(a.tokens), a.seconds) for a, b in pairs]
    interval = ratio_interval(np.array(rows, dtype=np.float64).reshape(-1, 4))
    return None if interval is None else list(interval)


def speed(pairs: Sequence[tuple[Generation, Generation]], timed: bool = True) -> dict[str, Any]:
    """Return costs, in seconds and in passes of the target; None: unknown.

    Each pair is a response without the draft and the one with it. Without `timed` the costs of
    verifications are unknown.
    """
    decoding = sum(a.seconds - a.prefill_seconds for a, _ in pairs)
    target_pass = _ratio(decoding, sum(len(a.tokens) - 1 for a, _ in pairs))
    draft_pass = _ratio(
        sum(b.draft_seconds for _, b in pairs), sum(b.draft_passes for _, b in pairs)
    )
    verification = None
    if timed:
        seconds = sum(b.verify_seconds for _, b in pairs)
        verification = _ratio(seconds, sum(len(b.steps) for _, b in pairs))
    return {
        "target_pass_seconds": target_pass,
        "draft_pass_seconds": draft_pass,
        "verification_seconds": verification,
        "cost_ratio": _ratio(draft_pass, target_pass),
        "verification_ratio": _ratio(verification, target_pass),
    }


def modelled_speed(metrics: Mapping[str, Any], cost_ratio: float) -> dict[str, Any]:
    """Return the modelled speed-up of some metrics, and the costs that it is for; None: unknown.

    `cost_ratio` is the time of a pass of the draft, in passes of the target, on the machine that
    serves; there a verification counts as one pass, as on a GPU with small batches: reading the
    weights takes most of both. 0: both costs as measured here.
    """
    measured = metrics["speed"]["cost_ratio"], metrics["speed"]["verification_ratio"]
    draft, verification = (cost_ratio, 1.0) if cost_ratio else measured
    length = metrics["acceptance_length"]
    passes = _ratio(metrics["draft_passes"], metrics["rounds"])
    speedup = None
    if length is not None and draft is not None and verification is not None:
        speedup = length / (verification + (passes or 0) * draft)
    return {
        "cost_ratio": draft,
        "verification_ratio": verification,
        "passes_per_round": passes,
        "speedup": speedup,
    }


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def sweep_line(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a sweep keeps of the metrics of one number of drafted tokens."""
    names = ("draft_tokens", "acceptance_length", "interval", "rounds", "emitted", "speedup")
    return {name: metrics[name] for name in (*names, "modelled")}


def fastest(sweep: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of drafted tokens with the largest modelled speed-up; None: unknown."""
    modelled = [line for line in sweep if line["modelled"]["speedup"] is not None]
    best = max(modelled, key=lambda line: line["modelled"]["speedup"], default=None)
    return None if best is None else int(best["draft_tokens"])
