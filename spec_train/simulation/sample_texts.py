"""The texts of the tokens of kept responses, each token alone."""

from collections.abc import Iterable, Sequence
from typing import Any

from spec_data.pages.token_texts import TokenTexts


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
