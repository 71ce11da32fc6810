"""The specification of a draft for a target, by the target's `architectures`.

The registry of families is `TARGETS` in `spec_data/models/families.py`, so that `spec-data` can
tell before a capture which drafts fit. Token ids and dtype of a target's config.json are read here.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

from spec_data.models.families import (
    TARGETS,
    DraftSpec,
    TargetShape,
    derived_spec,
    find_spec,
    text_table,
)
from spec_data.models.fitted_shape import fitted_shape
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import Positions
from spec_train.formats.flat import TOKEN_KEYS

log = logging.getLogger(__name__)


def resolve_eagle1_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for an EAGLE-1/2 draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "EAGLE-1/2")


def resolve_eagle3_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for an EAGLE-3 or P-EAGLE draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "EAGLE-3 or P-EAGLE")


def resolve_dspark_draft_spec(architectures: Sequence[str]) -> DraftSpec:
    """Return the first registered match for a DSpark or DFlash draft.

    Raises:
        DraftError: no match; the message lists what is supported.
    """
    return _resolve(architectures, "DSpark or DFlash")


def _resolve(architectures: Sequence[str], draft: str) -> DraftSpec:
    """Return the first registered match; `draft` names the kind of draft in the message."""
    if found := find_spec(architectures):
        return found
    raise DraftError(
        f"no {draft} draft is registered for a target of architectures {list(architectures)}; "
        f"supported: {', '.join(sorted(TARGETS))}. Targets that take images or audio, encoder-"
        "decoders and recurrent models are not supported. To add a decoder whose config.json has "
        "Llama's keys, add one line to TARGETS in spec_data/models/families.py"
    )


def target_shape(
    resolve: Callable[[Sequence[str]], DraftSpec],
    target_config: dict[str, Any],
    positions: Positions | None,
) -> TargetShape:
    """Return the shape that a draft takes from its target.

    Args:
        resolve: a function above. A family that it does not know is derived from its config, if
            the dataset has its rope.
        target_config: the target's config.json.
        positions: what the dataset records of the target's positions; None: it is older.

    Raises:
        DraftError: the family is not registered and its positions are not proven, or config.json
            lacks a size.
    """
    names = target_architectures(target_config)
    try:
        spec = resolve(names)
    except DraftError as error:
        if positions is None:
            raise
        if not positions.proven:
            raise DraftError(
                f"{error}. The dataset does not replace that line: the target's positions are not "
                f"proven ({positions.reason})"
            ) from None
        spec = derived_spec(names)
        log.info("the target's family is not registered: %s", spec.note)
    return fitted_shape(target_config, spec, positions)


def target_architectures(config: dict[str, Any]) -> list[str]:
    """Return `architectures` of a target's config.json; empty if the key is missing."""
    names = config.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


def target_dtype(config: dict[str, Any]) -> str | None:
    """Return the name of the target's dtype, or None if the config does not name one."""
    for table in (config, text_table(config)):
        for key in ("dtype", "torch_dtype"):
            if isinstance(table.get(key), str):
                return str(table[key]).removeprefix("torch.")
    return None


def special_ids(config: dict[str, Any]) -> list[int]:
    """Return the special token ids that a target's config names.

    They are part of every draft vocabulary.
    """
    values = token_ids(config).values()
    return [i for value in values for i in (value if isinstance(value, list) else [value])]


def token_ids(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bos, eos and pad ids of a config; the top level overrides `text_config`."""
    tables = (text_table(config), config)
    found = {key: table[key] for table in tables for key in TOKEN_KEYS if key in table}
    return {key: value for key, value in found.items() if value is not None}


def warn_of_last_layer(layers: tuple[int, ...], blocks: int) -> None:
    """Log a warning if a draft reads the output of the target's last block (`blocks` - 1)."""
    if layers and layers[-1] >= blocks - 1:
        log.warning(
            "layer %d is the target's last block: engines disagree on whether its output is taken "
            "before or after the final norm; do not use it in drafts for serving",
            layers[-1],
        )
