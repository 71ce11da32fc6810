"""The options of EAGLE-1/2. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from spec_data.terminal.types import Positive
from spec_train.options.draft_options import DRAFT, SHAPE, LossOptions, ShapeOptions, Weight


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class EagleOptions(LossOptions, ShapeOptions):
    """Options of the EAGLE-1/2 draft (arXiv 2401.15077, 2406.16858)."""

    example: ClassVar[Mapping[str, Any]] = {"depth": 4}
    num_layers: Annotated[Positive, SHAPE] = 1
    """Decoder layers of the draft; 1 as published."""
    regression_weight: ClassVar[float] = 1.0
    """Weight of the smooth L1 distance from the target's next final hidden state."""
    ce_weight: ClassVar[float] = 0.1
    """Weight of --loss, between the target's distribution and the draft's, both through the
    target's head."""
    noise: Annotated[Weight, DRAFT] = 0.1
    """Half width of the uniform noise on the input states, only in training."""
    depth: Positive = 5
    """Tokens drafted at once, also in validation; training looks one token ahead."""


OPTIONS = EagleOptions
