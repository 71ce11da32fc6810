"""The options of EAGLE-3. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from cyclopts import Parameter

from spec_data.terminal.rules import Rule
from spec_data.terminal.types import Positive
from spec_train.options.draft_options import (
    AUTO,
    DECAY,
    DRAFT,
    SHAPE,
    NormOptions,
    Ratio,
    of_one_token,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Eagle3Options(NormOptions):
    """Options of the EAGLE-3 draft (arXiv 2503.01840)."""

    example: ClassVar[Mapping[str, Any]] = {"draft_vocab_size": 40, "ttt_steps": 3}
    num_layers: Annotated[Positive, SHAPE] = 1
    """Decoder layers of the draft; 1 as published. Only the first one reads the token and the
    captured layers; llama.cpp serves one layer."""
    ttt_steps: Positive = 7
    """Unroll steps of the training-time test, and tokens drafted at once. Memory and time grow
    with it; 3 to 7 are common."""
    rounds: ClassVar[str] = "ttt_steps"
    rules: ClassVar[tuple[Rule, ...]] = (*NormOptions.rules, DECAY)
    needless: ClassVar[tuple[Rule, ...]] = of_one_token(
        "ttt_steps", step_decay=0.8, position_weights=AUTO
    )
    step_decay: Annotated[Ratio, DRAFT] = 0.8
    """With --position-weights auto: the loss of unroll step s, counted from 0, has the weight
    step_decay ** s."""
    norm_output: Annotated[bool, SHAPE] = False
    """Feed the normalised output back (EAGLE-3.1)."""


OPTIONS = Eagle3Options
