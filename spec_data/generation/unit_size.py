"""How many tokens a unit has: as many as --max-shard-size allows, or what "auto" chooses.

A unit is what a killed worker captures again, what workers share out, and the step in which a
training run beside generation sees data. "auto" keeps it below each of:

    500 MB of shard     lm4c stores 8 KB per token of an 8B target (hidden size 4,096, 3 layers and
                        hidden.final): 61,000 tokens, 6 s at 10,000 tokens/s
    262,144 tokens      for small targets, and for slow ones: 4.4 minutes at 1,000 tokens/s
    1/16 of the corpus  so that a small corpus, too, has units to share out and to resume from; but
                        at least one batch of the target, below which the target is used badly
"""

from spec_data.options.option_values import parse_size

AUTO = "auto"
BATCH_TOKENS = 8192
"""Tokens per forward of the target where its memory is not measured."""
_BYTES, _TOKENS, _UNITS = 500_000_000, 262_144, 16


def unit_tokens(size: str, bytes_per_token: int, tokens: int, batch_tokens: int) -> int:
    """Return the most tokens of a unit, at least 1; a longer document has a unit of its own.

    Args:
        size: --max-shard-size, such as "500MB", or "auto".
        bytes_per_token: payload bytes of a stored token.
        tokens: tokens of all documents.
        batch_tokens: tokens per forward of the target.
    """
    if size != AUTO:
        return max(1, parse_size(size) // bytes_per_token)
    most = min(_BYTES // bytes_per_token, _TOKENS)
    share = max(-(-tokens // _UNITS), batch_tokens)  # rounded up
    return max(1, min(most, share))
