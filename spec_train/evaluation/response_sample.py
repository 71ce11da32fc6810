"""A response of real decoding with its rounds, for the acceptance viewer (`simulation.samples`)."""

from collections.abc import Sequence
from typing import Any

from spec_train.decoding.chains import Generation
from spec_train.simulation.samples import RESPONSE_TOKENS, context_part


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
