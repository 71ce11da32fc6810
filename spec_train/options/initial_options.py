"""The option that decides how a draft's random weights start. No torch here."""

import math
from dataclasses import dataclass
from typing import Annotated

from spec_data.shards.errors import DraftError
from spec_data.terminal.types import NO_FLAG


@dataclass(frozen=True, kw_only=True)
class InitialOptions:
    """How the matrices of a new draft start, except those taken from the target."""

    initializer_range: Annotated[float, NO_FLAG] = 0.0
    """Standard deviation of the draft's random initial matrices; 0: torch's default, which falls
    with the width of a matrix's input (0.58 / sqrt(width))."""

    def __post_init__(self) -> None:
        """Reject values outside their range."""
        if not 0 <= self.initializer_range < math.inf:
            raise DraftError(f"initializer_range = {self.initializer_range}: 0 or more")
