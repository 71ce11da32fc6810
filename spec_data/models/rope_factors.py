"""Longrope targets have two sets of RoPE factors; choose one for every document of a capture.

transformers takes the long factors for a batch if its longest document has more than
`original_max_position_embeddings` positions. So the states of a short document would depend on what
shares its batch. Engines such as vLLM choose once, at their start: they take the long factors for
every prompt if their maximum length is above that bound. A capture therefore chooses once as well.
"""

import logging
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spec_data.models.reading import text_config
from spec_data.shards.errors import ConfigError

logger = logging.getLogger(__name__)

_LONGROPE, _FIXED = "longrope", "longrope, fixed"


def short_positions(config: Any) -> int | None:
    """Return how many positions the short factors cover; None for a target without longrope."""
    rope = getattr(text_config(config), "rope_parameters", None) or {}
    longrope = rope.get("rope_type") == _LONGROPE
    return int(rope["original_max_position_embeddings"]) if longrope else None


def check_choice(choice: str, config: Any) -> None:
    """Raise ConfigError for a --rope-factors other than "auto" of a target without longrope."""
    if choice != "auto" and short_positions(config) is None:
        raise ConfigError(
            f"--rope-factors {choice}: this target has no longrope; leave the option out"
        )


def chosen_factors(choice: str, config: Any, longest: int) -> str | None:
    """Return the factors of every document, "short" or "long"; None without longrope.

    The `choice` "auto" of --rope-factors takes the long ones if a document of `longest` tokens
    needs them.
    """
    limit = short_positions(config)
    if limit is None:
        return None
    factors = choice if choice != "auto" else "long" if longest > limit else "short"
    logger.log(
        logging.WARNING if factors == "long" and longest <= limit else logging.INFO,
        "longrope: every document is captured with the %s factors (the longest has %d tokens, the "
        "short ones cover %d). Engines such as vLLM use the long ones for every prompt if their "
        "maximum length is above %d; --rope-factors long captures so",
        *(factors, longest, limit, limit),
    )
    return factors


@torch.no_grad()
def fix_rope_factors(model: Any, factors: str | None) -> None:
    """Make a longrope model use these factors for every batch; None changes nothing."""
    if factors is None:
        return
    limit = short_positions(model.config) or 0
    length = limit + 1 if factors == "long" else None
    for module in model.modules():
        if getattr(module, "rope_type", None) == _LONGROPE:
            device = module.inv_freq.device
            frequencies, _ = ROPE_INIT_FUNCTIONS[_LONGROPE](module.config, device, seq_len=length)
            module.inv_freq.copy_(frequencies)
            module.rope_type = _FIXED  # transformers then updates no frequency
