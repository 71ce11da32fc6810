"""The options of MTP. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from spec_data.terminal.rules import Rule
from spec_data.terminal.types import ON, Positive
from spec_train.options.draft_options import (
    AUTO,
    DECAY,
    DRAFT,
    SHAPE,
    LossOptions,
    Ratio,
    TargetShape,
    WeightsOptions,
    WholeVocabulary,
    of_one_token,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class MtpOptions(LossOptions, WeightsOptions, TargetShape, WholeVocabulary):
    """Options of the target's own MTP block, trained for several steps (FastMTP, arXiv 2509.18362).
    Its shape is the target's."""

    example: ClassVar[Mapping[str, Any]] = {"depth": 3}
    rules: ClassVar[tuple[Rule, ...]] = (DECAY,)
    needless: ClassVar[tuple[Rule, ...]] = of_one_token(
        "depth", step_decay=0.6, position_weights=AUTO
    )
    starts_trained: ClassVar[bool] = True
    depth: Positive = 3
    """Steps of the block, each on its own output, and tokens drafted at once."""
    step_decay: Annotated[Ratio, DRAFT] = 0.6
    """With --position-weights auto: the loss of step s, counted from 0, has the weight
    step_decay ** s."""
    norm_output: Annotated[bool, SHAPE, ON] = True
    """Feed the normed output back. vLLM feeds back that of GLM-4-MoE before its norm, other engines
    after it: for this target it must be given, unless the depth is 1."""


OPTIONS = MtpOptions
