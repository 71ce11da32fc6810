"""Which drafts can be fitted on a dataset: known before the capture, and proven when it begins.

A draft needs the target's sizes and its rotary frequencies. Families of the registry have both from
their config.json. Those of other families are derived: sizes from config.json, frequencies from the
loaded target.
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spec_data.capture.backend import TargetBackend
from spec_data.generation.plan import Plan
from spec_data.generation.setup import Setup
from spec_data.generation.target_files import config_json
from spec_data.models.engines import engine_warnings
from spec_data.models.families import derived_spec, find_spec
from spec_data.models.fitted_shape import fitted_shape, sizes_of
from spec_data.shards.errors import DraftError, TargetError
from spec_data.shards.layer_ids import AUTO_DRAFTS, RECIPES, recipe_layers
from spec_data.shards.position_data import ROPE, Positions
from spec_data.shards.schema import data_problem

log = logging.getLogger(__name__)

_ANYWAY = "Give --layers IDS to capture the states for another use"


@dataclass(frozen=True)
class Fitting:
    """Which drafts can be fitted on a dataset.

    Attributes:
        family: the target's family, and how its shape is known.
        problems: by draft, why it cannot be fitted; None if it can.
    """

    family: str
    problems: dict[str, str | None]

    @property
    def possible(self) -> list[str]:
        """The drafts that can be fitted."""
        return [draft for draft, problem in self.problems.items() if problem is None]

    @property
    def lines(self) -> list[str]:
        """What can be fitted, then a line for each reason why others cannot."""
        found = [f"{', '.join(self.possible) or 'none'} ({self.family})"]
        for reason in dict.fromkeys(p for p in self.problems.values() if p):
            drafts = [draft for draft, problem in self.problems.items() if problem == reason]
            found.append(f"not {', '.join(drafts)}: {reason}")
        return found


def fitting(setup: Setup) -> Fitting:
    """Return which drafts can be fitted on the dataset of a setup; no weights are needed."""
    names = setup.target["architectures"]
    spec = find_spec(names)
    known = ", ".join(names) or setup.target["model_type"]
    if spec is not None:
        family = f"the target is registered as {spec.family}"
    else:
        family = (
            f"{known} is not registered: its shape is derived, and proven or refused before the "
            "capture"
        )
    problem = None
    try:
        sizes_of(_config(setup), spec or derived_spec(names))
    except DraftError as error:
        problem = str(error)
    config = setup.config
    problems = {}
    for draft in RECIPES:
        own = data_problem(draft, config.supervision, config.final)
        if draft != "eagle" and not setup.layers:
            own = "no layer is captured"
        problems[draft] = problem or own
    return Fitting(family, problems)


def announce_drafts(setup: Setup, *, captures: bool = True) -> Fitting:
    """Log which drafts can be fitted on a dataset; refuse a capture that no draft can use.

    With `captures`, say also which layers are chosen, and what those of all drafts would cost.

    Raises:
        TargetError: there is none, and --layers names no layers.
    """
    found = fitting(setup)
    for line in found.lines:
        log.info("drafts: %s", line)
    if not found.possible:
        reasons = "\n  ".join(found.lines[1:])
        problem = "no draft of spec-train can be fitted on this dataset"
        _refuse_unless_asked(setup, f"{problem} ({found.family}):\n  {reasons}\n")
    if captures:
        log.info("layers: %s", layers_text(setup))
    chosen = setup.config.drafts or AUTO_DRAFTS
    for line in engine_warnings(chosen, setup.target["architectures"]):
        log.warning("warning: %s", line)
    return found


def _refuse_unless_asked(setup: Setup, problem: str) -> None:
    """Raise TargetError, or warn if the layers were named: the states have another use then."""
    if setup.config.layers.startswith(("auto", "spread")):
        raise TargetError(f"{problem}{_ANYWAY}")
    log.warning("warning: %s", problem.strip())


def layers_text(setup: Setup) -> str:
    """Say which layers are captured, for which drafts, and what `--for all` would cost instead."""
    count = setup.target["num_layers"]
    recipes = {draft: recipe_layers(draft, count) for draft in RECIPES}
    own = [
        d for d, layers in recipes.items() if layers is not None and {*layers} <= {*setup.layers}
    ]
    every = sorted({k for layers in recipes.values() for k in layers or ()})
    text = f"{_listed(setup.layers)} ({_bytes(setup, setup.layers)}), the recipe of "
    text += ", ".join(own) or "no draft"
    others = [draft for draft, layers in recipes.items() if layers is not None and draft not in own]
    if not others:
        return text
    return (
        f"{text}. {', '.join(others)} read others by their recipes; --for all captures "
        f"{_listed(every)} ({_bytes(setup, every)})"
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers)) or "none"


def _bytes(setup: Setup, layers: Sequence[int]) -> str:
    """Return the bytes per token of a capture of these layers; some columns have fewer tokens."""
    total = sum(c.bytes_per_token for c in setup.columns_for(layers))
    return f"up to {total:,.0f} bytes per token"


def find_positions(setup: Setup, plan: Plan, target: TargetBackend) -> Positions:
    """Read and prove the positions of a loaded target; log what was found.

    A difference between the target's modules and its config.json is logged as a warning.

    Raises:
        TargetError: no draft can be fitted, because the family is not registered and nothing was
            proven; --layers names no layers.
    """
    found = target.positions(int(plan.lengths.max()))
    names = setup.target["architectures"] or [target.architecture]
    spec = find_spec(names)
    if found.proven and found.kind == ROPE:
        dimensions = {table.size for table in found.tables.values()}
        log.info(
            "positions: rotary frequencies of %s dimensions, proven up to position %s",
            *(" and ".join(map(str, sorted(dimensions))), f"{found.proven_to - 1:,}"),
        )
    elif found.proven:
        log.info("positions: learned; a draft uses rotary positions instead")
    elif found.kind != ROPE and spec is not None:
        log.warning(
            "warning: positions: not found in the target (%s); a draft uses its config's rope",
            found.reason,
        )
    if spec is None and not found.proven:
        _refuse_unless_asked(
            setup,
            f"no draft of spec-train can be fitted on this dataset: {', '.join(names)} is not "
            f"registered, and the positions of the target are not proven ({found.reason}). Add the "
            "family to TARGETS in spec_data/models/families.py. ",
        )
    try:
        fitted_shape(_config(setup, target), spec or derived_spec(names), found)
    except DraftError as error:
        log.warning("warning: %s", error)
    return found


def _config(setup: Setup, target: TargetBackend | None = None) -> dict[str, Any]:
    """Return config.json as the dataset will have it."""
    if target is None:
        found = config_json(setup, torch.float32)
    else:
        found = config_json(setup, target.dtype, target.architecture)
    return json.loads(found)
