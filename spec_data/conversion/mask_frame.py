"""Does a stored loss mask mark the supervised tokens themselves, or the tokens before them?

A trainer may store the mask of labels: entry t then stands for token t + 1. The chat template of
the target shows it: an answer begins right after the generation prompt, so the last token of the
prompt comes just before a run of ones. Where the prompt ends *inside* the run, the mask is one too
early; where it ends one token before that place, the mask is one too late.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spec_data.shards.errors import ConfigError

TOKEN, NEXT = "token", "next"
"""Entry t of the mask is about token t, or about token t + 1."""

_TOKENS = 3  # of the end of the generation prompt that must be found
_RUNS = 4  # fewest runs that say something


def in_token_frame(mask: Tensor, frame: str) -> Tensor:
    """Return a mask [T] whose entry t is about token t."""
    if frame == TOKEN:
        return mask
    return torch.cat([mask.new_zeros(1), mask[:-1]])


def generation_prompt(tokenizer: Any) -> list[int]:
    """Return the last token ids before an answer, by the chat template; [] if unknown."""
    message = [{"role": "user", "content": "a"}]
    try:
        given = {"tokenize": True, "return_dict": False}
        without = tokenizer.apply_chat_template(message, add_generation_prompt=False, **given)
        with_prompt = tokenizer.apply_chat_template(message, add_generation_prompt=True, **given)
    except Exception:  # there is no template, or it fails: a program, it can raise anything
        return []
    own = list(with_prompt)[len(without) :]
    return own[-_TOKENS:] if list(with_prompt)[: len(without)] == list(without) else []


def runs_by_offset(
    documents: Sequence[tuple[Tensor, Tensor]], prompt: Sequence[int]
) -> dict[int, int]:
    """Count runs of ones by where the generation prompt ends, relative to the token before the run.

    Args:
        documents: token ids int64 [T] and mask [T], in the token frame.
        prompt: of `generation_prompt`.

    Returns:
        Number of runs by offset: 0 is right, 1 a mask that is one too early, -1 one too late.
    """
    counts = {0: 0, 1: 0, -1: 0}
    width = len(prompt)
    for ids, mask in documents:
        edges = torch.diff(mask.long(), prepend=mask.new_zeros(1).long())
        for start in (edges == 1).nonzero().flatten().tolist():
            for offset in counts:
                end = start + offset
                if width <= end <= len(ids) and ids[end - width : end].tolist() == list(prompt):
                    counts[offset] += 1
    return counts


def check_frame(counts: dict[int, int], frame: str) -> str:
    """Refuse a mask that is shifted against its tokens; return what was found, in words.

    Raises:
        ConfigError: most runs of ones begin one token too early or too late.
    """
    total, right = sum(counts.values()), counts[0]
    worst = max((1, -1), key=lambda offset: counts[offset])
    if total < _RUNS:
        return (
            "not checked: the generation prompt of the chat template was not found before answers"
        )
    if counts[worst] <= right:
        return f"{right} of {total} supervised runs begin right after the generation prompt"
    if worst == 1 and frame == TOKEN:
        raise ConfigError(
            f"the loss masks are one token too early: {counts[1]} of {total} supervised runs begin "
            "with the last token of the generation prompt, so entry t is about token t + 1. What "
            "fits is --mask-frame next. Nothing was written"
        )
    advice = " What fits is --mask-frame token." if frame == NEXT else ""
    raise ConfigError(
        f"the loss masks are shifted: {counts[worst]} of {total} supervised runs begin one token "
        f"too {'early' if worst == 1 else 'late'}.{advice} Nothing was written"
    )
