"""A few measured responses with every drafted token: what the acceptance viewer of a page shows.

A sample is plain JSON, in the file of `spec-train eval --json`. Its `parts` are, in order:

    {"kind": "context", "tokens": ids, "left_out": n}   tokens that are not drafted; the first n of
                                                        them are left out
    {"kind": "first", "tokens": ids}                    tokens that a response begins with
    {"kind": "round", "drafted": ids, "accepted": n,    one verification of the target
     "emitted": ids, "choice": id or null}

The first `accepted` of the `drafted` tokens were kept, `emitted` are the tokens that the round adds
to the response, and `choice` is the target's token where it rejected a draft or added one. In real
decoding `emitted` are the accepted drafts and the choice. On a document they are the document's own
tokens, which may differ from an accepted draft (the last one) or from the choice.
"""

import logging
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from spec_data.models.reading import load_tokenizer
from spec_data.shards.errors import SpecDataError
from spec_train.simulation.simulated_decoding import Walk

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 192
"""Tokens kept of a context: its last ones."""
RESPONSE_TOKENS = 1024
"""A sample ends with the round in which its responses reach so many tokens."""


def document_sample(
    name: str,
    source: str,
    walk: Walk,
    drafted: np.ndarray,
    input_ids: np.ndarray,
    target_argmax: np.ndarray,
) -> dict[str, Any]:
    """Return the sample of a document that was walked.

    Args:
        name, source: what the document is called, and where it is from.
        walk: of the document. drafted, input_ids, target_argmax: as for `judge_chains`.
    """
    ids, best = input_ids.tolist(), target_argmax.tolist()
    parts: list[dict[str, Any]] = []
    rounds = iter(walk.rounds)
    shown, done = 0, 0  # tokens of responses; tokens of the document
    upcoming = next(rounds, None)
    for start, end in walk.spans:
        if shown >= RESPONSE_TOKENS:
            break
        if start > done:
            parts.append(context_part(ids[done:start]))
        done = min(max(start + 1, 2), end)  # the first round knows this many tokens
        parts.append({"kind": "first", "tokens": ids[start:done]})
        while upcoming is not None and upcoming[0] < end and shown < RESPONSE_TOKENS:
            slot, count = upcoming
            upcoming = next(rounds, None)
            accepted = int(walk.outcomes.accepted[slot])
            censored = bool(walk.outcomes.censored[slot])
            kept = accepted if censored else count
            inside = drafted[slot, : end - slot - 2].tolist()
            rejected = not censored and slot + 1 + accepted < end - 1
            parts.append(
                {
                    "kind": "round",
                    "drafted": list(takewhile(lambda token: token >= 0, inside)),
                    "accepted": accepted,
                    "emitted": ids[done : done + kept],
                    "choice": best[slot + 1 + accepted] if rejected else None,
                }
            )
            shown, done = shown + kept, done + kept
    return {"name": name, "source": source, "parts": parts}


def context_part(tokens: list[int]) -> dict[str, Any]:
    """Return the part of tokens that are not drafted: the last CONTEXT_TOKENS of them."""
    left_out = max(0, len(tokens) - CONTEXT_TOKENS)
    return {"kind": "context", "tokens": tokens[left_out:], "left_out": left_out}


def tokenizer_of(directory: Path) -> Any:
    """Return the tokenizer that a dataset holds; None, with a line in the log, if it has none.

    Args:
        directory: `target/` of the dataset.
    """
    try:
        return load_tokenizer(directory)
    except (SpecDataError, OSError) as error:
        log.info("samples have token ids instead of texts: %s", str(error).splitlines()[0])
        return None
