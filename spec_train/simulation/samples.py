"""A few measured responses with every drafted token: what the acceptance viewer of a page shows.

A sample is plain JSON, in the file of `spec-train eval --json`. Its `parts` are, in order:

    {"kind": "context", "tokens": ids, "left_out": n}   tokens that are not drafted; the first n of
                                                        them are left out
    {"kind": "first", "tokens": ids}                    tokens that a response begins with
    {"kind": "round", "drafted": ids, "accepted": n,    one verification of the target
     "emitted": ids, "choice": id or null}

A response that was also decoded without the draft has "plain": its tokens, its `seconds`, and the
`draft_seconds` of the response with it.

The first `accepted` of the `drafted` tokens were kept, `emitted` are the tokens that the step adds
to the response, and `choice` is the target's token where it rejected a draft or added one. In real
decoding `emitted` are the accepted drafts and the choice. On a document they are the document's own
tokens, which may differ from an accepted draft (the last one) or from the choice.
"""

import logging
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

from spec_data.models.tokenizer import load_tokenizer
from spec_data.pages.token_texts import TokenTexts
from spec_data.shards.errors import SpecDataError
from spec_train.simulation.simulated_decoding import SimulatedDocument

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 192
"""Tokens kept of a context: its last ones."""
RESPONSE_TOKENS = 1024
"""A sample ends with the step in which its responses reach so many tokens."""


def document_sample(name: str, source: str, document: SimulatedDocument) -> dict[str, Any]:
    """Return the sample of a document; `name` and `source` say which it is."""
    drafted, input_ids, target_argmax, _ = document.arrays
    outcomes, ids, best = document.outcomes, input_ids.tolist(), target_argmax.tolist()
    parts: list[dict[str, Any]] = []
    shown, done = 0, 0  # tokens of responses; tokens of the document
    for (start, end), steps in document.spans:
        if shown >= RESPONSE_TOKENS:
            break
        if start > done:
            parts.append(context_part(ids[done:start]))
        done = min(max(start + 1, 2), end)  # the first step knows this many tokens
        parts.append({"kind": "first", "tokens": ids[start:done]})
        for slot, count in steps:
            if shown >= RESPONSE_TOKENS:
                break
            accepted, censored = int(outcomes.accepted[slot]), bool(outcomes.censored[slot])
            emitted = accepted if censored else count
            inside = drafted[slot, : end - slot - 2].tolist()
            rejected = not censored and slot + 1 + accepted < end - 1
            parts.append(
                {
                    "kind": "round",
                    "drafted": list(takewhile(lambda token: token >= 0, inside)),
                    "accepted": accepted,
                    "emitted": ids[done : done + emitted],
                    "choice": best[slot + 1 + accepted] if rejected else None,
                }
            )
            shown, done = shown + emitted, done + emitted
    return {"name": name, "source": source, "parts": parts}


def context_part(tokens: list[int]) -> dict[str, Any]:
    """Return the part of tokens that are not drafted: the last CONTEXT_TOKENS of them."""
    left_out = max(0, len(tokens) - CONTEXT_TOKENS)
    return {"kind": "context", "tokens": tokens[left_out:], "left_out": left_out}


def token_texts(samples: Sequence[dict[str, Any]], tokenizer: Any) -> dict[str, str]:
    """Return the text of every token of some samples, each alone, by its id as text.

    Bytes that are no character by themselves are U+FFFD (`pages.token_texts`). `tokenizer` is that
    of the target; None: without texts.
    """
    if tokenizer is None:
        return {}
    parts = [part for sample in samples for part in sample["parts"]]
    lists = [part.get(name, ()) for part in parts for name in ("tokens", "drafted", "emitted")]
    lists += [sample["plain"]["tokens"] for sample in samples if "plain" in sample]
    lists.append([part["choice"] for part in parts if part.get("choice") is not None])
    ids = sorted(set().union(*lists))
    return dict(zip(map(str, ids), TokenTexts(tokenizer).table(ids), strict=True))


def tokenizer_of(directory: Path) -> Any:
    """Return the tokenizer in `target/` of a dataset; None, with a line in the log, without one."""
    try:
        return load_tokenizer(directory)
    except (SpecDataError, OSError) as error:
        log.info("samples have token ids instead of texts: %s", str(error).splitlines()[0])
        return None
