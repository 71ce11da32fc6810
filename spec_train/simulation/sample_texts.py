"""The texts of the tokens of kept responses: of each token alone, and of several together.

The file of an evaluation has a table of the tokens alone. A character that several tokens make
together is found from these texts when a page is written (`with_characters`).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spec_data.pages.token_texts import Joiner, TokenTexts


def sample_ids(samples: Iterable[dict[str, Any]]) -> list[int]:
    """Return every token id of some samples once, ascending."""
    found: set[int] = set()
    for sample in samples:
        for part in sample["parts"]:
            for name in ("tokens", "drafted", "emitted"):
                found.update(part.get(name, ()))
            if part.get("choice") is not None:
                found.add(part["choice"])
    return sorted(found)


def token_texts(samples: Sequence[dict[str, Any]], tokenizer: Any) -> dict[str, str]:
    """Return the text of every token of some samples, by its id as text.

    Bytes that are no character by themselves are marks, such as ⟨E2 82⟩ (`pages.token_texts`).

    Args:
        samples: as in `simulation.samples`. tokenizer: of the target; None: without texts.
    """
    if tokenizer is None:
        return {}
    ids = sample_ids(samples)
    return dict(zip(map(str, ids), TokenTexts(tokenizer).table(ids), strict=True))


def with_characters(
    parts: Sequence[dict[str, Any]], texts: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return parts with the characters that several tokens make together (`Joiner`).

    Drafted tokens go on after the response before their round, the target's token after the drafts
    that were accepted.
    """

    def of(ids: Sequence[int]) -> list[str]:
        return [texts.get(str(token), "") for token in ids]

    response, out = Joiner(), []
    for part in parts:
        whole: dict[str, dict[int, str]] = {}
        if part["kind"] == "round":
            drafted = of(part["drafted"])
            whole["drafted"] = Joiner(response.begun).later(drafted)
            if part["choice"] is not None:
                kept = Joiner(response.begun)
                kept.later(drafted[: part["accepted"]])
                whole["choice"] = kept.later(of([part["choice"]]))
            whole["emitted"] = response.later(of(part["emitted"]))
        else:
            if part.get("left_out"):
                response = Joiner()
            whole["tokens"] = response.later(of(part["tokens"]))
        found = {name: own for name, own in whole.items() if own}
        out.append({**part, "whole": found} if found else part)
    return out
