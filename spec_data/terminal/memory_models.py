"""A target that a Python program holds: a loaded model and its tokenizer, instead of a directory.

Commands pass the name of a target on, so the pair gets a name, under which it is kept while the
command runs. No torch here: what a model is, `generation.held_target` finds out.
"""

import itertools
import os
from typing import Any

from spec_data.shards.errors import ConfigError, an
from spec_data.terminal.kept import Kept

PREFIX = "loaded:"
_kept: Kept[tuple[Any, Any]] = Kept()
_numbers = itertools.count(1)  # two models of a class are two targets


def named(option: str, value: Any, takes_it: bool) -> Any:
    """Return the name of a pair (model, tokenizer), which is kept; texts and paths stay.

    `takes_it`: the command accepts such a pair.

    Raises:
        ConfigError: it does not, or this is a model without its tokenizer.
    """
    if isinstance(value, (str, bytes, os.PathLike)):
        return value
    pair = value if isinstance(value, (tuple, list)) and len(value) == 2 else None
    model, tokenizer = pair or (value, None)
    if not hasattr(model, "named_modules"):
        return value
    kind = type(model).__name__
    if not takes_it:
        raise ConfigError(
            f"{option}: this is {an(kind)} in memory, and only `generate` takes one; save it and "
            f"its tokenizer with save_pretrained, and pass the directory"
        )
    if not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            f"{option}: this is {an(kind)} without its tokenizer; pass both: (model, tokenizer)"
        )
    return _kept.keep(f"{PREFIX}{kind}:{next(_numbers)}", (model, tokenizer))


def pair_of(name: str) -> tuple[Any, Any] | None:
    """Return the model and the tokenizer that are kept under a name; None: it is no such name."""
    return _kept.get(name)
