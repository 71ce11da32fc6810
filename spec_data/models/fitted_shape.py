"""The shape of a draft: from the target's config.json, and from what its modules were seen to do.

`generate` reads inverse frequencies and the final norm from the live modules and proves them
(`shards.position_data`). So a family needs no code to have the right rope. Where config.json says
otherwise, the data decide, and the difference is logged. Engines compute a draft's rope from its
config.json. So settings that have the same frequencies are searched first. Where none have, the
draft stores the frequencies, and an export for engines is refused.
"""

import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from spec_data.models.families import TargetShape, target_shape
from spec_data.models.rope_settings import RopeSettings, config_table, stored_json
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import ROPE, Positions, RopeTable

log = logging.getLogger(__name__)

_ROPE_KEYS = ("rope_parameters", "rope_scaling")
_DIGITS = 7  # of a theta that is searched


def fitted_shape(config: dict[str, Any], positions: Positions | None) -> TargetShape:
    """Return the shape of a draft; `positions` are those of its dataset, None if not recorded.

    Raises:
        DraftError: config.json lacks a size, or has a rope that is unknown and not proven.
    """
    positions = positions or Positions()
    table = positions.of_draft if positions.proven else None
    try:
        shape = target_shape(config)
    except DraftError as error:
        if table is None:
            raise
        shape = target_shape(_without_rope(config))  # raises again if a size is missing
        log.warning("the rope of config.json is not used: %s", error)
    eps = positions.norm.get("eps")
    if eps is not None and not math.isclose(eps, shape.rms_norm_eps, rel_tol=1e-6):
        log.warning(
            "warning: config.json leads to eps %g of the norms, the target's final norm has %g, "
            "which is used",
            *(shape.rms_norm_eps, eps),
        )
        shape = replace(shape, rms_norm_eps=eps)
    if table is not None:
        return _with_table(shape, table)
    if positions.kind == ROPE:
        log.warning(
            "warning: the target's rotary frequencies are not proven (%s): those of its "
            "config.json are used",
            positions.reason or "no table for full attention",
        )
    return shape


def check_sizes(config: dict[str, Any]) -> None:
    """Check the sizes of a target's config.json before it is loaded.

    Raises:
        DraftError: config.json lacks one.
    """
    target_shape(_without_rope(config))


def _without_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config without its tables of rope settings, at both levels."""
    return {
        key: _without_rope(value) if key == "text_config" and isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _ROPE_KEYS
    }


def _with_table(shape: TargetShape, table: RopeTable) -> TargetShape:
    """Return the shape with the rotary embedding of a proven table."""
    if table.size > shape.head_dim:
        shape = replace(shape, head_dim=table.size)
    for parameters in (shape.rope_parameters, *_candidates(shape, table)):
        fitted = replace(shape, rope_parameters=parameters)
        expressed = _table_of(fitted)
        if expressed is None or not expressed.equals(table):
            continue
        if parameters is not shape.rope_parameters:
            log.warning(
                "warning: the rope of the target's config.json, %s, is not what its rotary module "
                "computes. The module decides; the draft's config.json has %s",
                *(shape.rope_parameters, parameters),
            )
        return replace(fitted, positions=stored_json(table, expressed=True))
    log.warning(
        "warning: the rope of the target's config.json, %s, is not what its rotary module "
        "computes, and no rope settings are. The draft stores the module's frequencies; engines "
        "cannot serve it",
        shape.rope_parameters,
    )
    return replace(shape, positions=stored_json(table, expressed=False))


def _table_of(shape: TargetShape) -> RopeTable | None:
    """Return the table of a shape's rope settings, None if they have none."""
    try:
        return config_table(RopeSettings.of(shape))
    except (KeyError, TypeError, ValueError, AttributeError, ZeroDivisionError):
        return None


def _candidates(shape: TargetShape, table: RopeTable) -> Iterator[dict[str, Any]]:
    """Yield rope settings that may have the frequencies of a table."""
    share = table.size / shape.head_dim
    while int(shape.head_dim * share) < table.size:  # readers round down
        share = math.nextafter(share, 2)
    partial = {"partial_rotary_factor": share} if share < 1 else {}
    plain = {k: v for k, v in shape.rope_parameters.items() if k != "partial_rotary_factor"}
    yield plain | partial
    count = len(table.inv_freq)
    if count < 2 or not bool((table.inv_freq > 0).all()):
        return
    first, last = float(table.inv_freq[0]), float(table.inv_freq[-1])
    exact = (first / last) ** (count / (count - 1))
    for digits in range(1, _DIGITS + 1):
        theta = {"rope_theta": float(f"{exact:.{digits}g}")}
        yield {"rope_type": "default"} | theta | partial
        yield {"rope_type": "linear"} | theta | {"factor": float(f"{1 / first:.6g}")} | partial
