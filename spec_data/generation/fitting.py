"""What `generate` reads of the target's positions, for the drafts of the dataset."""

import json
import logging

from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import config_json
from spec_data.models.families import derived_spec, find_spec
from spec_data.models.fitted_shape import fitted_shape
from spec_data.shards.errors import DraftError
from spec_data.shards.position_data import ROPE, Positions
from spec_data.target.live_positions import read_positions
from spec_data.target.model import Target

log = logging.getLogger(__name__)


def find_positions(setup: Setup, plan: Plan, target: Target) -> Positions:
    """Read and prove the positions of a loaded target; log what was found.

    A difference between the target's modules and its config.json is logged as a warning.
    """
    found = read_positions(target.model, int(plan.lengths.max()))
    names = setup.target["architectures"]
    if found.proven and found.kind == ROPE:
        dimensions = {table.size for table in found.tables.values()}
        log.info(
            "positions: rotary frequencies of %s dimensions, proven up to position %s",
            *(" and ".join(map(str, sorted(dimensions))), f"{found.proven_to - 1:,}"),
        )
    elif found.proven:
        log.info("positions: learned; a draft uses rotary positions instead")
    config = json.loads(config_json(setup, target.dtype, type(target.model).__name__))
    try:
        fitted_shape(config, find_spec(names) or derived_spec(names), found)
    except DraftError as error:
        log.warning("warning: %s", error)
    return found
